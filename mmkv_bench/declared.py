"""Loader of YAML files: configuration, and texts, columns and command-line verbs that are declared beside a module."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def read_yaml(text: str | bytes) -> Any:
    """Parse a YAML document, with PyYAML's faster C parser if there is one, and return its value."""
    import yaml

    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text).get_single_data()


def read_declared(module: str, name: str = "") -> Any:
    """Return the value of the YAML file `name` (default: the module's stem) beside a module. module: its `__file__`."""
    file = Path(module).with_name(name) if name else Path(module).with_suffix(".yaml")
    return read_yaml(file.read_bytes())
