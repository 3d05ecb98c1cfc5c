"""Loader of YAML files: texts, columns and the command line, which stand beside modules, and configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def read_yaml(text: str | bytes) -> Any:
    """Parse a YAML document. The C parser is used if it was built, because every command waits for this."""
    import yaml

    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text).get_single_data()


def declared(module: str, name: str = "") -> Any:
    """Return the content of the YAML file beside a module: the file of the same stem, or `name`. module: the module's
    `__file__`."""
    file = Path(module).with_name(name) if name else Path(module).with_suffix(".yaml")
    return read_yaml(file.read_bytes())
