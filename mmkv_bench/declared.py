"""What the package declares in YAML files beside its modules: words, columns, the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def declared(module: str, name: str = "") -> Any:
    """Content of the YAML file of a module's own name, or of another one beside it. module: its `__file__`."""
    import yaml

    file = Path(module).with_name(name) if name else Path(module).with_suffix(".yaml")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C, where it was built: every command waits for it
    return loader(file.read_bytes()).get_single_data()
