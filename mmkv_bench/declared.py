"""YAML that the package reads: what it declares beside its modules (words, columns, the command line), and configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def read_yaml(text: str | bytes) -> Any:
    """Content of a YAML document, read by the parser in C where it was built: every command waits for it."""
    import yaml

    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text).get_single_data()


def declared(module: str, name: str = "") -> Any:
    """Content of the YAML file of a module's own name, or of another one beside it. module: its `__file__`."""
    file = Path(module).with_name(name) if name else Path(module).with_suffix(".yaml")
    return read_yaml(file.read_bytes())
