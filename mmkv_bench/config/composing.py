"""What Hydra composes of the files of `conf/`: group choices once, the values of a command on top of them.

Hydra reads and merges every file anew for each composition, half a second for all methods; what choices give is therefore
kept for as long as the files stay what they are (a sweep asks for the same ones for every job). Overrides of values change
no choice, so they are laid on a copy as Hydra lays them on what it has just merged.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from mmkv_bench.config.schema import conf_dir
from mmkv_bench.errors import ConfigError
from mmkv_bench.file_state import State

if TYPE_CHECKING:
    from omegaconf import DictConfig

_Files = tuple[tuple[str, State], ...]


def composed(choices: Sequence[str], values: Sequence[str] = (), extra: Sequence[str] = ()) -> DictConfig:
    """What Hydra composes of these overrides; the caller's own.

    Args:
        choices: overrides of groups and of the search path; values: overrides of keys, checked; extra: the further config
            folders of that search path.

    Raises:
        ConfigError: Hydra cannot compose it.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if any(text.startswith("hydra.") for text in values):
        return by_hydra((*choices, *values))
    config = copy.deepcopy(_of_choices(tuple(choices), _files((conf_dir(), *map(Path, extra)))))
    try:
        for one in OverridesParser.create().parse_overrides(list(values)):
            OmegaConf.update(config, one.key_or_group, one.value(), merge=True, force_add=one.is_force_add())
    except OmegaConfBaseException:
        return by_hydra((*choices, *values))  # which says in its own words what cannot be
    return config


@lru_cache(maxsize=16)
def _of_choices(choices: tuple[str, ...], files: _Files) -> DictConfig:
    return by_hydra(choices)


def _files(folders: Sequence[Path]) -> _Files:
    """Every file of these folders, with what tells its content from another."""
    found = []
    for folder in folders:
        for root, _, names in os.walk(folder):
            paths = (os.path.join(root, name) for name in names if name.endswith(".yaml"))
            found += [(path, State.of(os.stat(path))) for path in paths]
    return tuple(sorted(found))


def by_hydra(overrides: Sequence[str], with_hydra: bool = False) -> DictConfig:
    """What Hydra composes of all of them at once; with_hydra: its own node `hydra`, too.

    Raises:
        ConfigError: it cannot.
    """
    from hydra import compose as hydra_compose
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    from mmkv_bench.config.source import register

    register()
    try:
        with _initialised():
            return hydra_compose("config", overrides=list(overrides), return_hydra_config=with_hydra)
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:
        raise ConfigError(_one_sentence(error)) from error


@contextmanager
def _initialised() -> Iterator[None]:
    """Hydra's global state for composing, also inside a multirun job that has one of its own."""
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(conf_dir()), job_name="mmkv_bench", version_base="1.3"):
            yield
    finally:
        GlobalHydra.instance().hydra = outer


def _one_sentence(error: Exception) -> str:
    """What Hydra or OmegaConf says, without its pages: the message's first line and its cause's."""
    first = next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
    cause = error.__cause__ or error.__context__
    if cause is not None and str(cause).strip():
        first += f" ({str(cause).strip().splitlines()[0]})"
    if "hydra/launcher/submitit" in first:
        return (
            "launcher=slurm needs the package hydra-submitit-launcher; install it with: pip install 'mmkv-bench[slurm]'"
        )
    return f"the configuration cannot be composed: {first}; see `python -m mmkv_bench --help` for keys and values"
