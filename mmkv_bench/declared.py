"""Loader of YAML: of the files that modules keep beside them (texts, columns, the command line), and of configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def read_yaml(text: str | bytes) -> Any:
    """Return the content of a YAML document, read by the C parser if it was built, because every command waits for this."""
    import yaml

    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text).get_single_data()


def declared(module: str, name: str = "") -> Any:
    """Return the content of the YAML file beside a module: the file of the same stem, or `name`. module: the module's
    `__file__`."""
    file = Path(module).with_name(name) if name else Path(module).with_suffix(".yaml")
    return read_yaml(file.read_bytes())
