"""Loader of YAML files: configuration, and the texts, columns and command-line verbs declared in a file beside a module."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def read_yaml(text: str | bytes) -> Any:
    """Parse a YAML document and return its value. The C parser is used if PyYAML has it, because every command waits for
    this."""
    import yaml

    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text).get_single_data()


def declared(module: str, name: str = "") -> Any:
    """Return the value of a YAML file beside a module: the file `name`, by default the file with the module's stem.

    module: the module's `__file__`.
    """
    file = Path(module).with_name(name) if name else Path(module).with_suffix(".yaml")
    return read_yaml(file.read_bytes())
