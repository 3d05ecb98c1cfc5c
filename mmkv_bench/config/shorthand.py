"""Short forms and common words of the field in overrides, translated before anything is composed.

- `torch_dtype=bf16`: `model.dtype=bfloat16` (synonyms of `field_words.yaml`; for its other words, the answer says what to type).
- `method=[snapkv,mine.py]`: a Python file among methods is a variant of `custom` named by the file's stem, with settings
  `methods.mine.<key>`.
- `model=<folder>` and `model=org/name`: `model=hf model.path=...`, or the file of `conf/model` with exactly this path.
- `snapkv.window=8`: `methods.snapkv.window=8`; likewise with a dataset's name.

Nothing is guessed: a word is a short form only if it is not a name of `conf/` or a key.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv_bench.config.files import MODEL, content, groups, options
from mmkv_bench.config.method_parts import FOLDERS
from mmkv_bench.config.names import KEY_ANSWERS, KEYS, VALUES, chosen, unavailable
from mmkv_bench.config.overrides import parse, searchpath
from mmkv_bench.config.schema import LIST_GROUPS, as_list, keys
from mmkv_bench.errors import ConfigError, nearest

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override


CUSTOM = "custom"
"""The method whose parts come from a user's file."""

_STEM = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
README = "see docs/own_method.md"
OBSERVATION = "docs/observation.md lists all that `obs` offers"


def expand_short_forms(parsed: Sequence[Override]) -> list[Override]:
    """Return the overrides with every short form replaced by keys of the configuration.

    Raises:
        ConfigError: a file whose name cannot be a method's, a setting that a method's file does not take, a sweep over
            files or locations, or a word without one translation.
    """
    extra_folders = searchpath(parsed)
    parsed = understood(parsed, extra_folders)
    path_by_stem = {Path(path).stem: path for path in _method_files(parsed)}
    for stem, path in path_by_stem.items():
        check_name(stem, path, extra_folders)
        if any(override.key_or_group == f"variants.{stem}" for override in parsed):
            raise ConfigError(f"method={path} and variants.{stem} are two methods with one name; rename one of them")
    overrides = [one for override in parsed for one in _expand_override(override, path_by_stem, extra_folders)]
    variant_settings = {f"variants.{stem}": {"base": CUSTOM, "path": path} for stem, path in path_by_stem.items()}
    after_last_method = 1 + max((at for at, one in enumerate(overrides) if one.key_or_group == "method"), default=-1)
    return [*overrides[:after_last_method], *map(parse, words(variant_settings)), *overrides[after_last_method:]]


def _expand_override(override: Override, files: Mapping[str, str], extra: tuple[str, ...]) -> Iterator[Override]:
    """Yield the overrides that one override stands for. files: stem of each method file to its path."""
    key, override_text = override.key_or_group, override.input_line
    stem, _, setting = key.removeprefix("methods.").partition(".")
    if key == "method" and files and not override.is_sweep_override():
        named_methods = [str(name) for name in as_list(override.value()) if not _is_file(name)]
        yield parse(f"{override_text.partition('=')[0]}=[{','.join(named_methods)}]")
    elif key == "model" and _is_location(override, extra):
        yield from _model(str(override.value()))
    elif key.removeprefix("methods.") in files and key.startswith("methods."):
        yield parse(override_text.lstrip("+~").replace("methods.", "variants.", 1))
    elif setting and stem in files:  # methods.mine.window, or mine.window
        yield parse(f"variants.{stem}.{_setting(override, stem, files[stem])}")
    elif (group := _group_of(key, extra)) is not None:
        prefix_length = len(override_text) - len(override_text.lstrip("+~"))
        yield parse(f"{override_text[:prefix_length]}{group}s.{override_text[prefix_length:]}")
    else:
        yield override


# ---------------------------------------------------------------------- files among methods
def _method_files(parsed: Sequence[Override]) -> list[str]:
    """Return the Python files among the last choice of methods.

    Raises:
        ConfigError: a sweep over files, or two files with one stem.
    """
    method_files: list[str] = []
    for override in parsed:
        if override.key_or_group != "method" or override.is_delete():
            continue
        if override.is_sweep_override():
            if ".py" in override.input_line:
                methods_value = override.input_line.partition("=")[2]
                raise ConfigError(
                    f"{override.input_line}: a sweep over methods takes names of conf/method; allowed for files: "
                    f"'method=[{methods_value}]' (one run that shares its prefills); write that"
                )
            continue
        method_files = [str(name) for name in as_list(override.value()) if _is_file(name)]
    for path in method_files:
        file_of_same_stem = next(
            (other for other in method_files if other != path and Path(other).stem == Path(path).stem), None
        )
        if file_of_same_stem is not None or method_files.count(path) > 1:
            raise ConfigError(
                f"method: {path} and {file_of_same_stem or path} are both the method {Path(path).stem!r}; name each once, and "
                f"rename one file, or give it another name: 'variants.<name>={{base: {CUSTOM}, path: {path}}}'"
            )
    return method_files


def _is_file(name: object) -> bool:
    return str(name).endswith(".py")


def check_name(stem: str, path: str, extra: tuple[str, ...] = ()) -> None:
    """Raise ConfigError if a method file's stem cannot be a method's name, or is already taken."""
    remedy = f"'variants.<name>={{base: {CUSTOM}, path: {path}}}' gives it a name"
    if not _STEM.fullmatch(stem):
        raise ConfigError(
            f"method={path}: {stem!r} cannot be a method's name; allowed: letters, digits, _ and -, a letter "
            f"first; rename the file, or {remedy}"
        )
    if stem in options("method", extra):
        raise ConfigError(f"method={path}: {stem} is the name of another method; rename the file, or {remedy}")


def _setting(override: Override, stem: str, path: str) -> str:
    """Return a setting of a method file (`mine.window=8`) as `<key>=<value>`, without the file's stem.

    Raises:
        ConfigError: the method `custom` has no such key; arguments of the file's own classes belong into `args`.
    """
    setting_text = override.input_line.lstrip("+~")
    key, _, value = setting_text.removeprefix("methods.").removeprefix(f"{stem}.").partition("=")
    settings = {*content("method", CUSTOM)} - {"base", "about", "path", "released", *FOLDERS} | {"reading", "decoding"}
    first_word = key.split(".")[0]
    if first_word not in settings:
        raise ConfigError(
            f"{override.input_line}: {stem} has no setting {first_word!r}; {nearest(first_word, settings)}; for a "
            f"constructor's argument in {path}, write methods.{stem}.args.{key}={value}; {README}"
        )
    return f"{key}={value}"


# ---------------------------------------------------------------------- a model's location
def _is_location(override: Override, extra: tuple[str, ...]) -> bool:
    """Tell whether `model=` names a folder, a GGUF file or a hub id.

    Raises:
        ConfigError: a sweep over such locations.
    """
    if override.is_sweep_override():
        if "/" in override.input_line:
            model_value = override.input_line.partition("=")[2]
            raise ConfigError(
                f"{override.input_line}: a sweep over models takes names of conf/model; write model=hf -m "
                f"model.path={model_value}"
            )
        return False
    value = override.value()
    if not isinstance(value, str) or value in options("model", extra) or unavailable(value) is not None:
        return False
    return (
        "/" in value or value.startswith((".", "~")) or value.endswith(".gguf") or bool(value and Path(value).is_dir())
    )


def _model(place: str) -> Iterator[Override]:
    """Yield the overrides for a model's location: the only file of `conf/model` with this path, else `model=hf`."""
    models_of_path = [name for name in options("model") if content("model", name).get("path") == place]
    if len(models_of_path) == 1:
        yield parse(f"model={models_of_path[0]}")
    else:
        yield from map(parse, ["model=hf", *words({"model.path": place})])


# ---------------------------------------------------------------------- keys that begin with a name
def _group_of(key: str, extra: tuple[str, ...]) -> str | None:
    """Return the group that offers the first word of a key (`method` for `snapkv.window`); None if there is none, or
    if a key or group has that name."""
    name_in_key, _, key_in_name = key.partition(".")
    if not key_in_name or name_in_key in keys() or name_in_key in groups():
        return None
    return next((group for group in LIST_GROUPS if name_in_key in options(group, extra)), None)


_UNQUOTED_WORD = re.compile(r"(?!(?:null|true|false|nan|inf)$)[A-Za-z0-9_./%+-]+", re.IGNORECASE)


def words(settings: Mapping[str, Any]) -> list[str]:
    """Return nested settings as command-line words: `{"methods": {"snapkv": {"window": 16}}}` gives
    `methods.snapkv.window=16`."""
    return [f"{key}={_word(value)}" for key, value in _leaves(settings)]


def _leaves(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _word(value: Any) -> str:
    """Return a value as text in Hydra's grammar of overrides, which parses to the same value."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_word(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_word, value)) + "]"
    text = str(value)
    if _UNQUOTED_WORD.fullmatch(text):
        return text
    escaped_text = re.sub(r"(\\*)'", r"\1\1\\'", text)  # escape a quotation mark, and backslashes before it
    return "'" + re.sub(r"(\\+)$", r"\1\1", escaped_text) + "'"


# ---------------------------------------------------------------------- words of the field
def understood(parsed: Sequence[Override], extra: tuple[str, ...]) -> list[Override]:
    """Return overrides with this package's keys and names in place of other tools' words (`torch_dtype=bf16`:
    `model.dtype=bfloat16`).

    Raises:
        ConfigError: words whose translation depends on more than the word. The message says what to type for each.
    """
    answers_and_lines = [
        (KEY_ANSWERS[_folded_key(one)], one.input_line) for one in parsed if _folded_key(one) in KEY_ANSWERS
    ]
    if answers_and_lines:
        raise ConfigError(
            "; ".join(f"{text}: {filled(answer, text.partition('=')[2])}" for answer, text in answers_and_lines)
        )
    return [_understood(one, extra) for one in parsed]


def _folded_key(override: Override) -> str:
    return override.key_or_group.lower().replace("-", "_")


def _understood(override: Override, extra: tuple[str, ...]) -> Override:
    key, override_text = override.key_or_group, override.input_line
    word, value = _folded_key(override), override_text.partition("=")[2]
    if word in KEYS and not (word in ("methods", "datasets") and isinstance(override.value(), Mapping)):
        prefix_characters = override_text[: len(override_text) - len(override_text.lstrip("+~"))]
        return _understood(parse(f"{prefix_characters}{KEYS[word]}={value}"), extra)
    synonyms = VALUES.get(key, {})
    if (override_text := ",".join(synonyms.get(one.lower(), one) for one in value.split(","))) != value and synonyms:
        return parse(f"{key}={override_text}")
    return _renamed(override, extra) if key in groups() and not override.is_delete() else override


def _renamed(override: Override, extra: tuple[str, ...]) -> Override:
    """Return an override that chooses a file by name (`model=...`) with the name's spelling in `conf/`."""
    group, value = override.key_or_group, override.value()
    is_sweep = override.is_sweep_override()
    given_names = [*override.sweep_string_iterator()] if is_sweep else as_list(value)
    names_of_choices = [
        [str(one)] if _is_no_conf_name(group, str(one)) else chosen(group, str(one), extra) for one in given_names
    ]
    if value is None or [[str(one)] for one in given_names] == names_of_choices:
        return override
    if is_sweep:
        new_value = ",".join(one[0] if len(one) == 1 else f"[{','.join(one)}]" for one in names_of_choices)
    else:
        flat_names = [name for one in names_of_choices for name in one]
        new_value = f"[{','.join(flat_names)}]" if isinstance(value, list) or len(flat_names) > 1 else flat_names[0]
    return parse(f"{override.input_line.partition('=')[0]}={new_value}")


def _is_no_conf_name(group: str, name: str) -> bool:
    """Tell whether a choice is not a name of `conf/` but a file, a folder, a hub id, or a list of a sweep."""
    return (
        name.endswith(".py") or name[:1] in ("[", ".", "~") or "/" in name or (group == MODEL and Path(name).is_dir())
    )


def filled(answer: str, value: str) -> str:
    """Return an error text of `field_words` with its placeholders replaced by the user's value (the text after `=`)."""
    unquoted_value = value.strip("[]'\"")
    shares = [_share(text.strip()) for text in unquoted_value.split(",")]
    if ("{kept}" in answer or "{rest}" in answer) and None in shares:
        return "a budget counts kept entries: write the share as `budget=10%`, or entries per KV head as `budget=64`"
    digits = re.search(r"\d+", re.sub(r"(\d+)k\b", lambda match: f"{int(match[1]) * 1024}", value.lower()))
    return answer.format(
        value=value or "<value>",
        kept=_list_text([f"{100 * share:.6g}%" for share in shares if share]),
        rest=_list_text([f"{100 - 100 * share:.6g}%" for share in shares if share]),
        digits=digits[0] if digits else "<number>",
        minutes=_minutes(value.strip("'\"")),
    )


def _list_text(texts: list[str]) -> str:
    return texts[0] if len(texts) == 1 else f"[{','.join(texts)}]"


def _share(text: str) -> float | None:
    """Convert `0.1` or `10%` to a share between 0 and 1; None for other text."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        return None
    return share if 0 < share < 1 else None


def _minutes(text: str) -> str:
    """Convert a time in Slurm's notation (`90`, `90:00`, `1:30:00`, `1-12`, `1-12:00:00`) to minutes, rounded up.

    Return text; `<minutes>` for other input.
    """
    time_match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if time_match is None:
        return "<minutes>"
    days, first_number, second_number, third_number = (int(part or 0) for part in time_match.groups())
    has_hours = time_match[1] is not None or time_match[4] is not None
    seconds = days * 86400 + (
        first_number * 3600 + second_number * 60 + third_number if has_hours else first_number * 60 + second_number
    )
    return str(-(-seconds // 60))
