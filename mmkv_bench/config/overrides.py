"""Command-line words as Hydra's overrides, checked before Hydra composes them.

Hydra would refuse some mistakes with a page of text, and accept others (`+sede=1`). Overrides are checked against the
configuration of the chosen groups: an override changes a value and adds no key, except the keys of `is_users_own`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from mmkv_bench.config.files import DATASET, groups, options
from mmkv_bench.config.names import NAME_ANSWERS, tables, unavailable
from mmkv_bench.config.schema import LIST_GROUPS, SCHEMAS, accepts, allowed
from mmkv_bench.errors import SIMILAR, ConfigError, folded, near, nearest

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

_OPTIONAL_GROUPS = ("experiment",)
SEARCHPATH = "hydra.searchpath"
SCHEME = "mmkv"
"""Scheme of folders whose files are read as `compose.FolderSource` does."""
_REMEDY_BY_GROUP = {
    "method": "`mmkv-bench run --help` lists them, and `mmkv-bench new mine.py` writes a file for a new method",
    "model": "any other checkpoint of a supported family is `model=<folder or org/name>`, and docs/own_model.md "
    "adds a family",
    "experiment": "`mmkv-bench run --help` lists them; `--config-dir <folder> experiment=<name>` uses your file "
    "<folder>/experiment/<name>.yaml",
}
"""The remedy for an unknown name of each group, if no name is similar."""
LONGEST = 4000
"""Maximum number of values of a list in one override. Hydra's parser takes seconds for this number, and four times as long for
twice as many."""
_QUOTED_TEXT = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""")


@lru_cache(maxsize=256)
def parse(text: str) -> Override:
    """Parse the text of one command-line override. The caller must not change the result, because it is cached.

    Raises:
        ConfigError: the override cannot be read, or its lists have more values than Hydra reads in reasonable time.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    if text.count(",") >= LONGEST and (values := _QUOTED_TEXT.sub("", text).count(",") + 1) > LONGEST:
        raise ConfigError(
            f"{text.partition('=')[0]}=... has {values:,} values; allowed: at most {LONGEST:,} in one override; "
            "split them over several commands with the same out"
        )
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise ConfigError(
            f"cannot read the override {text!r}; allowed: key=value, key=[a,b], key={{a: 1}}, values with '=', "
            f"',' or brackets in quotes (key='\"a=b\"'); use one of these forms ({str(error).splitlines()[0]})"
        ) from None
    if not override.key_or_group or override.package:
        raise ConfigError(f"cannot read the override {text!r}; allowed: key=value; name a key before '='")
    if override.key_or_group == SEARCHPATH and isinstance(override.value(), list):
        return OverridesParser.create().parse_override(searched(override.value()))
    return override


def is_choice(override: Override) -> bool:
    """Tell whether the override chooses files of a config group rather than changing a value."""
    key = override.key_or_group
    return key in groups() or key.startswith("hydra/")


def searchpath(parsed: Sequence[Override]) -> tuple[str, ...]:
    """Return the further config folders (`hydra.searchpath=[...]`, also written by `--config-dir`)."""
    folder_lists = [o.value() for o in parsed if o.key_or_group == SEARCHPATH]
    return tuple(str(folder).removeprefix(f"{SCHEME}://") for value in folder_lists for folder in value)


def searched(folders: Sequence[str]) -> str:
    """Return the override that makes Hydra search `folders` in addition to `conf/`."""
    return f"{SEARCHPATH}=[{','.join(repr(located(str(folder))) for folder in folders)}]"


def located(folder: str) -> str:
    """Return a config folder's address with the scheme `SCHEME`. Addresses with another scheme than `file` stay
    unchanged."""
    scheme, divided, path_in_scheme = folder.partition("://")
    return f"{SCHEME}://{path_in_scheme if divided else folder}" if not divided or scheme == "file" else folder


# ---------------------------------------------------------------------- checks against the configuration of the choices
def is_users_own(key: str) -> bool:
    """Tell whether a user may add this key, without a plus.

    These are `variants.<name>...`, `methods.<method>.reading`, `methods.<method>.decoding` (`checked_value` refuses a
    second decode policy), `methods.<method>.args...` (arguments of outside code, checked by its constructor),
    `datasets.<dataset>.generation.<setting>` (checked by the decode rules), and
    `hydra.launcher.additional_parameters.<flag>` (checked by sbatch).
    """
    path = key.split(".")
    return (
        (path[0] == "variants" and len(path) > 1)
        or (path[0] == "methods" and path[2:] in (["reading"], ["decoding"]))
        or (path[0] == "methods" and path[2:3] == ["args"])
        or (path[0] == "datasets" and path[2:3] == ["generation"] and len(path) <= 4)
        or path[:3] == ["hydra", "launcher", "additional_parameters"]
    )


def check_choice(override: Override, extra: tuple[str, ...]) -> None:
    group, override_text = override.key_or_group, override.input_line
    if group.startswith("hydra/"):
        return
    value = override.value()
    if override.is_delete():
        raise ConfigError(
            f"{override_text}: a group cannot be removed; allowed: {', '.join(options(group, extra))}; choose one"
        )
    if override.is_force_add() or (override.is_add() and group not in LIST_GROUPS):
        raise ConfigError(f"{override_text}: {group} is already part of every run; write {override_text.lstrip('+')}")
    if value is None and group in _OPTIONAL_GROUPS:
        return
    chosen_names = value if isinstance(value, list) else [value]
    if isinstance(value, list) and group not in LIST_GROUPS:
        raise ConfigError(
            f"{override_text}: {group} takes one name, not a list; allowed: {', '.join(options(group, extra))}"
        )
    for name in chosen_names:
        check_option(group, str(name), extra)
    duplicates = {str(n) for n in chosen_names if chosen_names.count(n) > 1}
    if duplicates:
        raise ConfigError(
            f"{override_text} names {', '.join(sorted(duplicates))} more than once; name each {group} once"
        )


def check_option(group: str, name: str, extra: tuple[str, ...]) -> None:
    option_names = options(group, extra)
    if "/" in name:  # experiment=papers/mmshift_llava
        option_names = options(f"{group}/{name.rpartition('/')[0]}", extra)
        option_names = tuple(f"{name.rpartition('/')[0]}/{one}" for one in option_names)
    if name not in option_names:
        if group == "model" and (model := unavailable(name)) is not None:
            raise ConfigError(model.sentence(name))
        raise ConfigError(f"unknown {group} {name!r}; {_advice_on_name(group, name, option_names, extra)}")


def _advice_on_name(group: str, name: str, names: Sequence[str], extra: tuple[str, ...]) -> str:
    """Return the end of an error message about an unknown name, such as an answer to a common word, the groups with
    that name, or a similar name."""
    if group == DATASET and (size_remedy := _page_size_advice(name, names)):
        return size_remedy
    if answer := NAME_ANSWERS.get(group, {}).get(folded(name) or name):
        return answer
    if other_choices := [f"`{other}={name}`" for other in groups() if other != group and name in options(other, extra)]:
        return f"write {' or '.join(other_choices)}"
    if group == "experiment" and (table_names := tables(name)):
        commands = " or ".join(f"`mmkv-bench papers {one}`" for one in table_names)
        return f"{commands} prints the table, and the experiment that runs each of its cells"
    suggestion = nearest(name, names)
    if suggestion.startswith(SIMILAR):
        return suggestion
    return f"{suggestion}; {_REMEDY_BY_GROUP.get(group, '`mmkv-bench run --help` lists them')}"


def _page_size_advice(name: str, names: Sequence[str]) -> str:
    """Return advice for a pages dataset that is given with its size, as in tables (`pages_walk_large`); "" for other
    names."""
    folded_name = folded(name)
    for pages, size in ((one, size) for one in names if one.startswith("pages") for size in ("small", "large")):
        if folded(f"{pages}_{size}").startswith(folded_name) and len(folded_name) > len(folded(pages)):
            return f"pages have two sizes; write `dataset={pages} page_size={size}`"
    return ""


def checked_value(override: Override, reference: Mapping[str, Any]) -> str:
    """Check that an override's key exists and its value has the right kind, and return the override in Hydra's form.

    reference: all keys with their defaults (`compose._reference`).
    """
    override_text, path = override.input_line, override.key_or_group.split(".")
    if path[0] == "hydra":
        return "++" + override_text.lstrip("+") if is_users_own(override.key_or_group) else override_text
    if override.is_delete():
        raise ConfigError(
            f"{override_text}: keys cannot be removed, only changed; write key=value (key=null if null is allowed)"
        )
    if is_users_own(override.key_or_group) and (path[0] == "variants" or path[1] in reference[path[0]]):
        if path[0] == "methods" and path[2:] == ["decoding"]:
            _check_decoding(path[1], override.value(), reference["methods"][path[1]])
        if path[0] == "methods" and path[2:3] == ["args"]:
            _check_args(path, override.value(), reference["methods"][path[1]])
        if path[0] == "datasets":
            _check_generation(path, override.value(), reference["datasets"][path[1]]["generation"])
        return "++" + override_text.lstrip("+")
    if path == ["variants"] and override.value() != {}:
        raise ConfigError(
            f"{override_text}: variants are given one by one; allowed: 'variants.<name>={{base: <method>, <parameter>: <value>}}'"
        )
    default_value = _look_up(path, reference, override_text)
    if override.is_add():
        raise ConfigError(
            f"{override_text}: {'.'.join(path)} already exists, so it is changed without a plus; write "
            f"{override_text.lstrip('+')}"
        )
    value = override.value()
    if value == {} and isinstance(default_value, Mapping) and default_value:
        raise ConfigError(
            f"{override_text}: an empty mapping removes no keys; to change one, write {'.'.join(path)}.<key>=<value>, "
            f"where <key> is one of {', '.join(map(str, default_value))}"
        )
    _check_kind(".".join(path), value, default_value, strict=path[0] in ("methods", "datasets"))
    return override_text


def _check_decoding(name: str, value: Any, method: Mapping[str, Any]) -> None:
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(
            f"methods.{name}.decoding={value} is {_kind(value)}; allowed: null, or {{_target_: <a class of "
            "mmkv_bench.compression.decoding>, <parameter>: <value>}"
        )
    if value is not None and method.get("decoding") is not None:
        raise ConfigError(
            f"{name} already has a decode policy; change its parameters, or replace it in a variant: "
            f"'variants.<name>={{base: {name}, decoding: {{_target_: ...}}}}'"
        )


def _check_args(path: Sequence[str], value: Any, method: Mapping[str, Any]) -> None:
    if "args" not in method:
        raise ConfigError(f"{'.'.join(path)}: {path[1]} has no args; {nearest('args', method)}")
    if len(path) == 3 and not isinstance(value, Mapping):
        raise ConfigError(
            f"{'.'.join(path)}={value} is {_kind(value)}, but keys are needed; write {{<argument>: <value>}}"
        )


def _check_generation(path: Sequence[str], value: Any, defaults: Mapping[str, Any]) -> None:
    """Refuse a generation setting of another kind than its default. Settings without a default accept any value."""
    setting_path = ".".join(path[:3])
    values = {path[3]: value} if len(path) > 3 else value
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"{setting_path}={value} is {_kind(value)}, but keys are needed; write {setting_path}.<setting>=<value>"
        )
    for key, inner in values.items():
        if str(key) in defaults:
            _check_kind(f"{setting_path}.{key}", inner, defaults[str(key)], strict=True)


def _look_up(path: Sequence[str], reference: Mapping[str, Any], text: str) -> Any:
    node: Any = reference
    for depth, key in enumerate(path):
        parent_path = ".".join(path[:depth])
        if not isinstance(node, Mapping):
            raise ConfigError(f"{text}: {parent_path} is a value without keys below it; write {parent_path}=<value>")
        if key not in node:
            if parent_path in ("methods", "datasets"):
                raise ConfigError(_unchosen_name_message(text, parent_path.removesuffix("s"), key, tuple(node)))
            parent_clause = f" in {parent_path}" if parent_path else ""
            suggestion = nearest(key, node) if parent_path else _nearest_key(text, path, reference)
            raise ConfigError(f"{text}: unknown key {key!r}{parent_clause}; {suggestion}")
        node = node[key]
    return node


def _nearest_key(text: str, path: Sequence[str], reference: Mapping[str, Any]) -> str:
    """Return the end of an error message about an unknown key.

    For `window` it suggests this key of a group or of a chosen method or dataset, else a similar key. For
    `snapkw.window` it suggests a similar key, else a similar method or dataset.
    """
    key, paths_by_key = path[0], dict[str, list[str]]()
    nodes = {group: reference.get(group) or {} for group in SCHEMAS if group}
    nodes |= {name: node for group in LIST_GROUPS for name, node in reference[f"{group}s"].items()}
    for name, node in nodes.items():
        for leaf in node:
            paths_by_key.setdefault(leaf, []).append(f"{name}.{leaf}")
    if len(path) == 1 and key in paths_by_key:
        value = text.partition("=")[2]
        return "write " + " or ".join(f"`{one}={value}`" for one in paths_by_key[key])
    option_names = [name for group in LIST_GROUPS for name in options(group)] if len(path) > 1 else []
    paths_of_similar_keys = [one for leaf in near(key, paths_by_key) for one in paths_by_key[leaf]]
    if similar_keys := near(key, {*reference, *groups()}) or paths_of_similar_keys or near(key, option_names):
        return f"{SIMILAR} {' or '.join(map(repr, similar_keys))}?"
    return "`mmkv-bench run --help` lists the keys"


def _unchosen_name_message(text: str, group: str, name: str, chosen: tuple[str, ...]) -> str:
    if name not in options(group):
        return f"{text}: unknown {group} {name!r}; {nearest(name, options(group))}"
    return (
        f"{text}: {group} {name!r} is not part of this run (chosen: {', '.join(chosen) or 'none'}); "
        f"choose it with '{group}=[{','.join((*chosen, name))}]'"
    )


def _check_kind(path: str, value: Any, old: Any, strict: bool) -> None:
    """Refuse unknown keys inside mappings, values of another type than declared and, if `strict`, of another kind than
    the default `old`."""
    if isinstance(value, dict) and isinstance(old, Mapping):
        for key, inner in value.items():
            if str(key) not in old:
                raise ConfigError(f"{path}={value}: unknown key {str(key)!r} in {path}; {nearest(str(key), old)}")
            _check_kind(f"{path}.{key}", inner, old[str(key)], strict)
    elif isinstance(old, Mapping):
        raise ConfigError(
            f"{path}={value} is {_kind(value)}, but keys are needed; write {path}.<key>=<value>, where <key> is "
            f"one of {', '.join(old)}"
        )
    elif not accepts(path, value):
        raise ConfigError(f"{path}={value} is {_kind(value)}; allowed: {allowed(path)}; give an allowed value")
    elif strict and not same_kind(value, old, path):
        raise ConfigError(
            f"{path}={value} is {_kind(value)}; allowed: {_kind(old)}, like the default {old!r}; give such a value"
        )


def same_kind(value: Any, default: Any, key: str) -> bool:
    """Tell whether a value may replace a default: same type, or an integer for a float.

    A default that is null or an interpolation accepts any value. key: the setting or its path; `recents` is a count or
    a share.
    """
    if default is None or (isinstance(default, str) and default.startswith("${")):
        return True
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(default, bool) and isinstance(value, bool)
    if isinstance(default, float) or key.rpartition(".")[2] == "recents":
        return isinstance(value, (int, float))
    if isinstance(default, str):
        return isinstance(value, str) or type(value).__name__ == "QuotedString"
    return isinstance(value, type(default))


def _kind(value: Any) -> str:
    name_by_type = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        list: "a list",
        dict: "a group of keys",
    }
    return "null" if value is None else name_by_type.get(type(value), "text")


def sweep_refusal(override: Override) -> str:
    key, _, value = override.input_line.partition("=")
    return (
        f"{override.input_line} lists several values without brackets; allowed: '{key}=[{value}]' (one run that "
        f"shares its prefills) or -m {override.input_line} (one run each); write one of them"
    )
