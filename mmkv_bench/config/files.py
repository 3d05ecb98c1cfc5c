"""What a file of a config group holds, wherever it lies and in whichever form: a file of its own, or a table's row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmkv_bench.config import gates, tables
from mmkv_bench.config.method_parts import expanded
from mmkv_bench.config.schema import conf_dir
from mmkv_bench.errors import ConfigError

METHOD, MODEL = "method", "model"


def content(group: str, name: str, folders: Sequence[str | Path] = ()) -> dict[str, Any]:
    """The values of `group=name` as plain data, a method's with its parts and parameters; needs no Hydra.

    Args:
        folders: further config folders, which are asked after `conf/`.

    Raises:
        ConfigError: no such file, or a method's part that does not exist.
    """
    import yaml

    for root in (conf_dir(), *map(Path, folders)):
        found = read(root / group, name, lambda file: yaml.safe_load(file.read_text(encoding="utf-8")) or {})
        if found is not None:
            return found
    raise ConfigError(f"there is no {group} {name!r}")


def read(group: Path, name: str, load: Callable[[Path], Mapping[str, Any]]) -> dict[str, Any] | None:
    """`content` of one folder, its files read by `load`; None where it has nothing of that name."""
    file = group / f"{name}.yaml"
    if not file.is_file():
        return tables.member(group, name)
    found = dict(load(file))
    if group.name == MODEL and "gates" in found:
        found["gates"] = gates.filled(name, found["gates"])
    return expanded(name, found) if group.name == METHOD else found
