"""Composition of a `RunConfig` from command-line overrides by Hydra. A mistake becomes an error of one sentence.

Hydra reads and merges every file anew for each composition (half a second for all methods). So the composition of the
chosen files is cached while no YAML file changes: all jobs of a sweep choose the same files. Overrides of values are
then applied to a copy of that composition, as Hydra applies them.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from itertools import product
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra._internal.core_plugins.bash_completion import BashCompletion
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.hydra import Hydra
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigLoadError, ConfigResult
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from mmkv_bench.config.files import TABLE_FOLDER, TABLES, conf_dir, content, members, read
from mmkv_bench.config.overrides import (
    SCHEME,
    SEARCHPATH,
    check_choice,
    check_option,
    checked_value,
    is_choice,
    is_users_own,
    located,
    parse,
    searched,
    searchpath,
    sweep_refusal,
)
from mmkv_bench.config.run_config import composed_schema, run_config, settle
from mmkv_bench.config.schema import LIST_GROUPS, RunConfig
from mmkv_bench.config.shorthand import expand_short_forms
from mmkv_bench.errors import ConfigError, nearest
from mmkv_bench.file_state import State


def compose(overrides: Sequence[str] = ()) -> RunConfig:
    """Compose the configuration of a run from command-line overrides, with all absolute interpolations resolved.

    `folders` records the further config folders, because their methods have defaults too. `retry` becomes a tuple of
    words (on a command line `nan` is a number). If `only` is given, only its datasets stay.

    Raises:
        ConfigError: an override that cannot be read, a sweep, an unknown group, option or key, a value of the wrong
            kind, an interpolation to a missing key, a key without a value, or an unknown dataset in `only`.
    """
    parsed = expand_short_forms([parse(text) for text in overrides])
    for override in parsed:
        if override.is_sweep_override():
            raise ConfigError(sweep_refusal(override))
    parsed = _with_full_keys(parsed)
    extra_folders = searchpath(parsed)
    choices = [o for o in parsed if is_choice(o)]
    for override in choices:
        check_choice(override, extra_folders)
    fixed_overrides = [o.input_line for o in choices] + [o.input_line for o in parsed if o.key_or_group == SEARCHPATH]
    values = [o for o in parsed if not is_choice(o) and o.key_or_group != SEARCHPATH]
    reference = _reference(fixed_overrides, extra_folders) if values else {}
    config = composed(fixed_overrides, [checked_value(o, reference) for o in values], extra_folders)
    settle(config)
    config.folders = list(extra_folders)
    run = run_config(config)
    dataset_names = [*run.datasets] if run.only is None else [*map(str, run.only)]
    for name in dataset_names:
        if name not in run.datasets:
            raise ConfigError(
                f"only={name} is not a dataset of this run; {nearest(name, [*run.datasets])}; name datasets of this run"
            )
    datasets = {name: node for name, node in run.datasets.items() if name in dataset_names}
    return run.updated(retry=tuple(map(str, run.retry)), datasets=datasets)


def launcher_of(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the settings `hydra.launcher` of a sweep. Raises ConfigError if Hydra cannot compose them."""
    composition = by_hydra(for_hydra(overrides), with_hydra=True)
    return OmegaConf.to_container(composition.hydra.launcher, resolve=True)


def method_defaults(names: Sequence[str], extra: Sequence[str] = ()) -> dict[str, Mapping[str, Any]]:
    """Map each method name to the content of its YAML file, as plain values without overrides.

    Args:
        names: method names (file names in `conf/method`).
        extra: further config folders.

    Raises:
        ConfigError: a name without a file.
    """
    names = list(dict.fromkeys(names))
    for name in names:
        check_option("method", name, tuple(extra))
    folders = [searched(extra)] if extra else []
    if not names:
        return {}
    nodes = composed((f"method=[{','.join(names)}]", *folders), extra=extra).methods
    settle(nodes)
    return OmegaConf.to_container(nodes, resolve=False)


def expand_sweep(overrides: Sequence[str]) -> list[list[str]]:
    """Return the overrides of each job of a sweep: the product of all comma lists and ranges."""
    values_by_override = []
    for override in map(parse, overrides):
        if override.is_sweep_override():
            if not override.is_discrete_sweep():
                raise ConfigError(
                    f"{override.input_line}: only lists (a,b) and range(...) can be swept; list the values"
                )
            values_by_override.append(
                [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
            )
        else:
            values_by_override.append([override.input_line])
    return [list(job) for job in product(*values_by_override)]


FORKED = ("method", "budget", "seed", "protocol")
"""Keys that take a list of values which one run forks from the same prefill."""


def forked(overrides: Sequence[str]) -> list[str]:
    """Turn comma lists of the keys `FORKED` (such as methods and budgets) into list values, and return all overrides.

    A comma list would make one job per value; with a list value, one job answers for all values from a shared prefill.
    """
    list_overrides = []
    for override in map(parse, overrides):
        key, is_sweep = override.get_key_element(), override.is_sweep_override()
        values = [*override.sweep_string_iterator()] if key in FORKED and is_sweep else []
        becomes_list = values and not any(value.startswith("[") for value in values)
        list_overrides.append(f"{key}=[{','.join(values)}]" if becomes_list else override.input_line)
    return list_overrides


def for_hydra(overrides: Sequence[str]) -> list[str]:
    """Return overrides as Hydra takes them: with full keys in place of short forms and `dataset.<key>`, and with `++`
    before keys that a user may add."""
    named = _with_full_keys(expand_short_forms([parse(text) for text in overrides]))
    return ["++" + o.input_line.lstrip("+") if is_users_own(o.key_or_group) else o.input_line for o in named]


def _with_full_keys(parsed: Sequence[Override]) -> list[Override]:
    """Replace `dataset.<key>` by `datasets.<name>.<key>`, and `method.<key>` by `methods.<name>.<key>`.

    Raises:
        ConfigError: the run has not exactly one dataset or method, or a sweep over groups may change this one.
    """
    fixed_overrides, extra = [o for o in parsed if is_choice(o) or o.key_or_group == SEARCHPATH], searchpath(parsed)
    named_overrides = list(parsed)
    for group in LIST_GROUPS:
        short_overrides = [o for o in named_overrides if o.key_or_group.startswith(f"{group}.")]
        if not short_overrides:
            continue
        override_text, key = short_overrides[0].input_line, short_overrides[0].key_or_group.removeprefix(f"{group}.")
        remedy = f"say which one: {group}s.<name>.{key}=..."
        if any(o.is_sweep_override() for o in fixed_overrides):
            raise ConfigError(f"{override_text}: a sweep over groups may change the {group}; {remedy}")
        for override in filter(is_choice, fixed_overrides):
            check_choice(override, extra)
        chosen_names = list(_reference([o.input_line for o in fixed_overrides], extra)[f"{group}s"])
        if len(chosen_names) != 1:
            raise ConfigError(
                f"{override_text}: this run has {len(chosen_names)} {group}s ({', '.join(chosen_names)}); {remedy}"
            )
        long_prefix = f"{group}s.{chosen_names[0]}."
        named_overrides = [
            parse(o.input_line.replace(f"{group}.", long_prefix, 1)) if o in short_overrides else o
            for o in named_overrides
        ]
    return named_overrides


def _reference(choices: Sequence[str], extra: Sequence[str]) -> dict[str, Any]:
    """Return the keys and defaults that overrides of values are checked against. `folders` is left out: only `compose`
    fills it.

    choices: overrides that choose files of config groups.
    extra: further config folders.
    """
    keys = OmegaConf.to_container(_cached_composition(choices, extra), resolve=False)
    return {key: value for key, value in keys.items() if key != "folders"}


# ---------------------------------------------------------------------- compositions by Hydra
def composed(choices: Sequence[str], values: Sequence[str] = (), extra: Sequence[str] = ()) -> DictConfig:
    """Compose a configuration from choices of files and overrides of values. The caller may change the result.

    The composition of `choices` is cached. With a value of `hydra.*`, or one that OmegaConf refuses, Hydra composes
    everything anew.

    Args:
        choices: overrides of groups and of the search path.
        values: checked overrides of keys.
        extra: the further config folders of the search path.

    Raises:
        ConfigError: Hydra cannot compose the configuration.
    """
    if any(text.startswith("hydra.") for text in values):
        return by_hydra((*choices, *values))
    config = copy.deepcopy(_cached_composition(choices, extra))
    try:
        for one in OverridesParser.create().parse_overrides(list(values)):
            OmegaConf.update(config, one.key_or_group, one.value(), merge=True, force_add=one.is_force_add())
    except OmegaConfBaseException:
        return by_hydra((*choices, *values))  # raises Hydra's own message
    return config


def _cached_composition(choices: Sequence[str], extra: Sequence[str]) -> DictConfig:
    """Compose `choices`, or return the earlier composition if no YAML file has changed."""
    paths = (
        os.path.join(root, name)
        for folder in (conf_dir(), *map(Path, extra))
        for root, _, names in os.walk(folder)
        for name in names
        if name.endswith(".yaml")
    )
    return _composition_of_files(tuple(choices), tuple(sorted((path, State.of(os.stat(path))) for path in paths)))


@lru_cache(maxsize=128)
def _composition_of_files(choices: tuple[str, ...], files: tuple[tuple[str, State], ...]) -> DictConfig:
    return by_hydra(choices)


def by_hydra(overrides: Sequence[str], with_hydra: bool = False) -> DictConfig:
    """Compose all overrides by Hydra alone, without a cache. with_hydra: include Hydra's own node `hydra`.

    Raises:
        ConfigError: Hydra cannot compose the configuration.
    """
    try:
        with _hydra_session():
            composition = hydra_compose("config", overrides=list(overrides), return_hydra_config=with_hydra)
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:
        raise ConfigError(_one_sentence(error)) from error
    with open_dict(composition):
        for name in [name for name, node in composition.methods.items() if "base" not in node]:
            del composition.methods[name]  # parameters that an experiment sets for a method that is not chosen
    return composition


@contextmanager
def _hydra_session() -> Iterator[Hydra]:
    """Yield a Hydra that searches `conf/`. Afterwards restore the Hydra of a program that uses Hydra itself."""
    for plugin in (FolderSource, OwnFolder):
        Plugins.instance().register(plugin)
    ConfigStore.instance().store("schema", composed_schema(), provider="mmkv_bench")
    outer_hydra = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(conf_dir()), job_name="mmkv_bench", version_base="1.3"):
            yield GlobalHydra.instance().hydra
    finally:
        GlobalHydra.instance().hydra = outer_hydra


def print_composed(
    overrides: Sequence[str], cfg: str | None, info: str | None, package: str | None, resolve: bool
) -> None:
    """Check that the overrides make a configuration, then print it as Hydra prints it.

    cfg, info, package, resolve: Hydra's flags of these names.
    """
    compose(overrides)
    hydra_overrides = for_hydra(overrides)
    with _hydra_session() as hydra:
        if info is not None:
            hydra.show_info(info, "config", hydra_overrides)
        else:
            hydra.show_cfg("config", hydra_overrides, cfg or "job", package, resolve)


def completions(before: Sequence[str], last: str) -> list[str]:
    """Return the settings that begin with `last` and may follow the overrides `before`, for completion in a shell.

    Empty if `before` is not a valid configuration.
    """
    try:
        with _hydra_session() as hydra:
            offered_words = BashCompletion(hydra.config_loader)._query("config", " ".join([*before, last]))
    except Exception:  # noqa: BLE001 - whatever Hydra raises about half a line
        return []
    return sorted({word for word in offered_words if word.startswith(last) and re.split(r"\W", word)[0] != TABLES})


def _one_sentence(error: Exception) -> str:
    """Shorten an error of Hydra or OmegaConf to the first lines of its message and of its cause."""
    first_message_line = next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
    cause = error.__cause__ or error.__context__
    if cause is not None and str(cause).strip():
        first_message_line += f" ({str(cause).strip().splitlines()[0]})"
    if "hydra/launcher/submitit" in first_message_line:
        return (
            "launcher=slurm needs the package hydra-submitit-launcher; install it with: pip install 'mmkv-bench[slurm]'"
        )
    if (key := re.search(r"'hydra\.launcher\.([\w.]+)' \(Key .* not in '(\w+)'", first_message_line)) is not None:
        if key[2] == "BasicLauncherConf":
            return (
                f"hydra.launcher.{key[1]} only affects jobs on Slurm; write it with `launcher=slurm`, or leave it out"
            )
        return f"hydra.launcher has no key {key[1]!r}; {nearest(key[1], content('launcher', 'slurm')['hydra']['launcher'])}"
    return (
        f"the configuration cannot be composed: {first_message_line}; see `mmkv-bench run --help` for keys and values"
    )


# ---------------------------------------------------------------------- files as Hydra reads them
class FolderSource(FileConfigSource):
    """A Hydra source that reads a folder of config groups by `files.read`.

    In groups of which a run may choose several files, a file's values go below `<group>s.<name>`, without a header in
    the file.
    """

    @staticmethod
    def scheme() -> str:
        return SCHEME

    def load_config(self, config_path: str) -> ConfigResult:
        group, _, name = config_path.removesuffix(".yaml").rpartition("/")
        file = Path(self.path, group, f"{name}.yaml")
        content = read(file.parent, name, lambda path: _load_yaml(path, State.of(path.stat())))
        if content is None:
            raise ConfigLoadError(f"Config not found : {file}")
        header_values = self._get_header_dict(file.read_text(encoding="utf-8")[:512] if file.is_file() else "")
        if group in LIST_GROUPS and header_values["package"] is None:
            header_values["package"] = f"{group}s.{name}"
        return ConfigResult(self.provider, self.full_path(), OmegaConf.create(content), header_values)

    def is_config(self, config_path: str) -> bool:
        file = Path(self.path, self._normalize_file_name(config_path))
        return super().is_config(config_path) or file.stem in members(file.parent)

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        table_members = set() if results_filter == ObjectType.GROUP else members(Path(self.path, config_path))
        return sorted({*super().list(config_path, results_filter)} - {TABLE_FOLDER} | table_members)


@cache
def _load_yaml(file: Path, state: State) -> dict[str, Any]:
    return OmegaConf.to_container(OmegaConf.load(file), resolve=False)


class OwnFolder(SearchPathPlugin):
    """A plugin that makes `FolderSource` read `conf/`. The search paths of other programs stay unchanged."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for element in search_path.get_path():
            if element.path.removeprefix("file://") == str(conf_dir()):
                element.path = located(element.path)
