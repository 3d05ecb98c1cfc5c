"""Canonical JSON and short checksums, so that equal things have equal names."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def canonical_json(value: Any) -> str:
    """JSON with sorted keys, no spaces and no NaN: equal values give equal text.

    Raises ValueError for NaN and infinities, TypeError for what JSON cannot hold.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def checksum(data: bytes) -> str:
    """First 16 hex digits of the sha256."""
    return hashlib.sha256(data).hexdigest()[:16]
