"""Words of a command line as Hydra's overrides: read, told apart, and the further config folders that they name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mmkv_bench.config.schema import groups
from mmkv_bench.errors import ConfigError

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

SEARCHPATH = "hydra.searchpath"
LONGEST = 4000
"""Values of a list in one override: Hydra's parser takes seconds for as many, and four times as long for twice as many."""
_QUOTED = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""")


def parse(text: str) -> Override:
    """One override.

    Raises:
        ConfigError: it cannot be read, or its lists hold more values than Hydra reads in good time.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    if text.count(",") >= LONGEST and (values := _QUOTED.sub("", text).count(",") + 1) > LONGEST:
        raise ConfigError(
            f"{text.partition('=')[0]}=... holds {values:,} values; allowed: at most {LONGEST:,} in one override; give some "
            "of them at a time, in commands with the same out"
        )
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise ConfigError(
            f"cannot read the override {text!r}; allowed: key=value, key=[a,b], key={{a: 1}}, values with '=', ',' or "
            f"brackets in quotes (key='\"a=b\"'); write it that way ({str(error).splitlines()[0]})"
        ) from None
    if not override.key_or_group or override.package:
        raise ConfigError(f"cannot read the override {text!r}; allowed: key=value; name a key before '='")
    if override.key_or_group == SEARCHPATH and isinstance(override.value(), list):
        return OverridesParser.create().parse_override(searched(override.value()))
    return override


def is_choice(override: Override) -> bool:
    """Whether it chooses files of a config group and changes no value."""
    key = override.key_or_group
    return key in groups() or key.startswith("hydra/")


def searchpath(parsed: Sequence[Override]) -> tuple[str, ...]:
    """Further config folders (`hydra.searchpath=[...]`, which `--config-dir` becomes)."""
    from mmkv_bench.config.source import SCHEME

    found = [o.value() for o in parsed if o.key_or_group == SEARCHPATH]
    return tuple(str(folder).removeprefix(f"{SCHEME}://") for value in found for folder in value)


def searched(folders: Sequence[str]) -> str:
    """The override that has further config folders read as `conf/` is."""
    from mmkv_bench.config.source import located

    return f"{SEARCHPATH}=[{','.join(repr(located(str(folder))) for folder in folders)}]"
