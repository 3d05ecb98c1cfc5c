"""Keeps secrets, and where a machine has its folders, out of a run's stored configuration."""

from __future__ import annotations

import re
from typing import Any

from mmkv_bench.secrecy import without_secrets

_FOLDER = re.compile(r"(/|~/).*?([^/]+)/*", re.DOTALL)


def redact(value: Any) -> Any:
    """`value` (nested mappings and lists) without secrets, and absolute paths by their last part."""
    return without_secrets(value, also=_without_folders)


def _without_folders(text: str) -> str:
    path = _FOLDER.fullmatch(text)
    return text if path is None else f".../{path[2]}"
