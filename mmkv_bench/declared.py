"""Loader of the YAML files that modules keep beside them: texts, columns, the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def declared(module: str, name: str = "") -> Any:
    """Return the content of the YAML file beside a module: the file of the same stem, or `name`. module: the module's
    `__file__`."""
    import yaml

    file = Path(module).with_name(name) if name else Path(module).with_suffix(".yaml")
    loader = getattr(
        yaml, "CSafeLoader", yaml.SafeLoader
    )  # the C loader if it was built, because every command waits for this
    return loader(file.read_bytes()).get_single_data()
