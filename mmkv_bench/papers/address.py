"""What a cell of a paper's table is: a model, data, a metric, a method with all its parameters, a budget, conditions.

Two cells are the same where these are, whatever anybody calls them. A method's parameters are those that it has once its
file's defaults and its reading are applied, so a changed default changes the address instead of what stands at it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import cache
from typing import Any

from mmkv_bench.config.files import content
from mmkv_bench.config.schema import READINGS, options
from mmkv_bench.config.unavailable import UNAVAILABLE
from mmkv_bench.errors import ConfigError, nearest
from mmkv_bench.methods.node import flat_parameters, read, under_reading
from mmkv_bench.methods.registry import method
from mmkv_bench.protocols import NAMES as PROTOCOLS

NONE, ENTRIES, FRACTION = "none", "entries", "fraction"
SYNTHETIC = ("made_up_text", "made_up_image", "made_up_video")
"""In a dataset's place, as `scenario=efficiency` names its prompts of a length."""
STAND_IN = "tiny"
"""The embedded model: what it shows stands in for what others would, and is no evidence of a paper's number."""
_SIZES = ("small", "large")
MEAN = "mean"
"""Metric of an address that is a mean over several."""

_CONDITIONS = ("max_new_tokens", "cut_prompt", "frames", "samples", "length", "new_tokens", "batch")
KEYS = (
    *("model", "dataset", "group", "metric", "method", "with", "calibration", "minus", "reading", "protocol", "budget"),
    *("seeds", *_CONDITIONS),
)
"""What an address is written with."""
CALIBRATED = ("samples", "data", "instruction")
"""What a calibration is told apart by."""
BESIDE_PARAMETERS = ("calibration", "reads_answer", "over_budget")
"""Keys in the rows' parameters that are no setting: which artefact was read, and marks."""


@dataclass(frozen=True)
class MethodSettings:
    """A method by what it does.

    Attributes:
        name: of its file in conf/method; given: what is set besides, as sorted JSON.
        calibration: what its calibration was made of, as sorted JSON of `samples`, `data` (a dataset) and `instruction`
            (as of the command); empty: the model's own, that `auto` finds.
    """

    name: str
    given: str = "{}"
    calibration: str = ""

    @classmethod
    def of(cls, name: str, given: Mapping[str, Any] | None = None, calibration: Any = None) -> MethodSettings:
        """The method that settings describe; what is set to its default is as if it were not set.

        Raises:
            ConfigError: no such method, or a parameter that it does not have.
        """
        defaults = flat_parameters(_node(name))
        given = dict(given or {})
        if calibration == "auto" and defaults.get("calibration") != "auto":
            given["calibration"] = "auto"
        for key in given:
            if key not in defaults:
                raise ConfigError(f"method {name} has no parameter {key!r}; {nearest(key, defaults)}")
        given = {key: float(value) if isinstance(defaults[key], float) else value for key, value in given.items()}
        changed = {key: value for key, value in given.items() if value != defaults[key]}
        of = calibration if isinstance(calibration, Mapping) else {}
        if (
            set(of) - {*CALIBRATED}
            or (of and not {"samples", "data"} <= {*of})
            or not isinstance(calibration, Mapping | str | None)
        ):
            raise ConfigError(
                f"calibration={calibration} of {name}: allowed: auto, or samples and data, with or without instruction"
            )
        return cls(name, _sorted(changed), _sorted(of) if of else "")

    @property
    def changed(self) -> dict[str, Any]:
        """What is set besides the defaults."""
        return dict(json.loads(self.given))

    def setting(self, key: str) -> Any:
        """The value of one of its parameters."""
        return self.changed.get(key, flat_parameters(_node(self.name))[key])

    @property
    def calibrated(self) -> dict[str, Any]:
        """What its calibration was made of, where that is said."""
        return dict(json.loads(self.calibration)) if self.calibration else {}

    @property
    def base(self) -> str:
        """The family that rows of it name."""
        return str(_node(self.name)["base"])

    @property
    def unbudgeted(self) -> bool:
        """Whether it takes no budget: it keeps every entry."""
        node = _node(self.name)
        kept = node.get("allocator")
        return node["base"] == "full" or (isinstance(kept, Mapping) and ".keep_all." in str(kept.get("_target_")))

    def parameters(self, reading: str) -> str:
        """What its parameters under a reading are besides the defaults of its base (`canonical`)."""
        return "{}" if self.base == "full" else _resolved(self.name, self.given, reading)

    def version(self, reading: str) -> int:
        """Which numbers this code's method has under a reading (column `method_version`, 1 where that is null)."""
        return _version(self.name, self.given, reading)

    def __str__(self) -> str:
        told = [f"{key}={_plain(value)}" for key, value in self.changed.items()]
        told += [f"{key}={value}" for key, value in self.calibrated.items()]
        return f"{self.name}({', '.join(told)})" if told else self.name


@dataclass(frozen=True)
class Address:
    """Where a number belongs. `metric` is `mean` where it is a mean over several; `minus` is the method whose number is
    subtracted; numbers of tokens are None where the dataset's own settings hold, and samples where all of it is asked."""

    model: str
    dataset: str
    metric: str
    method: MethodSettings
    minus: MethodSettings | None = None
    budget_kind: str = NONE
    budget: str = ""
    reading: str = READINGS[0]
    protocol: str = PROTOCOLS[0]
    seeds: tuple[int, ...] = (0,)
    max_new_tokens: int | None = None
    cut_prompt: str | None = None
    frames: int | None = None
    samples: int | None = None
    length: int | None = None
    new_tokens: int | None = None
    batch: int | None = None

    @property
    def printed(self) -> tuple[str, ...]:
        """What of it a paper prints: the key under which cells and printed numbers meet."""
        texts = (self.model, self.dataset, self.metric, str(self.method), str(self.minus or ""), self.budget_kind)
        return *texts, self.budget, *(str(n or "") for n in (self.length, self.new_tokens, self.batch))

    @property
    def runs(self) -> bool:
        """Whether there is a model to run."""
        return self.model not in UNAVAILABLE

    def __str__(self) -> str:
        parts = [self.model, self.dataset, self.metric, str(self.method)]
        parts += [f"minus {self.minus}"] if self.minus else []
        parts += [f"budget {self.budget}"] if self.budget else []
        return " ".join(parts)


def address(parts: Mapping[str, Any]) -> Address:
    """The address that keys of `KEYS` describe.

    Raises:
        ConfigError: a key is missing, unknown or says what is not there.
    """
    for key in parts:
        if key not in KEYS:
            raise ConfigError(f"{key!r} is no part of an address; {nearest(key, KEYS)}")
    parts = {key: value for key, value in parts.items() if value is not None}
    missing = [key for key in ("model", "method") if key not in parts]
    missing += ["dataset"] if not {"dataset", "group"} & {*parts} else []
    if "group" in parts:
        parts = {**parts, "dataset": parts.pop("group"), "metric": MEAN}
    missing += ["metric"] if "metric" not in parts else []
    if missing:
        raise ConfigError(f"an address without {', '.join(missing)}: {_told(parts)}")
    method = MethodSettings.of(parts["method"], parts.get("with"), parts.get("calibration"))
    minus = parts.get("minus")
    kind, budget = (NONE, "") if method.unbudgeted else budget_of(parts.get("budget"), parts)
    found = Address(
        model=parts["model"],
        dataset=parts["dataset"],
        metric=parts["metric"],
        method=method,
        minus=None
        if minus is None
        else MethodSettings.of(minus["method"], minus.get("with"), minus.get("calibration")),
        budget_kind=kind,
        budget=budget,
        reading=parts.get("reading", READINGS[0]),
        protocol=parts.get("protocol", PROTOCOLS[0]),
        seeds=tuple(parts.get("seeds", (0,))),
        **{key: parts[key] for key in _CONDITIONS if key in parts},
    )
    _check(found)
    return found


def budget_of(value: Any, parts: Mapping[str, Any]) -> tuple[str, str]:
    """(kind, text) of a budget: a whole number is entries per KV head, any other the fraction kept.

    Raises:
        ConfigError: none is given, or it is neither.
    """
    if isinstance(value, bool) or value is None:
        raise ConfigError(f"an address without a budget: {_told(parts)}")
    if isinstance(value, int):
        return ENTRIES, str(value)
    try:
        number = Decimal(str(value))
    except InvalidOperation:
        raise ConfigError(f"budget={value}: allowed: entries (64) or a fraction kept (0.2)") from None
    if not 0 < number <= 1:
        raise ConfigError(f"budget={value}: a fraction lies above 0 and at most at 1")
    return FRACTION, f"{number.normalize():f}"


@cache
def canonical(base: str, parameters: str) -> str:
    """What parameters (JSON, as rows have them) set besides the defaults of their base's file, as sorted JSON. A parameter
    that rows do not have came later than they did: it has its default. Marks and artefacts are no settings."""
    told = {key: value for key, value in json.loads(parameters).items() if key not in BESIDE_PARAMETERS}
    if base in _options("method"):
        node = _node(base)
        defaults = flat_parameters(under_reading(base, node, READINGS[0], node))
        told = {key: value for key, value in told.items() if key not in defaults or defaults[key] != value}
    return _sorted(told)


def file_of(dataset: str) -> str:
    """Name of a data set's file in conf/dataset: rows name pages with their size, `pages_walk_small`."""
    name, _, size = dataset.rpartition("_")
    return name if size in _SIZES and name in _options("dataset") else dataset


@cache
def samples_of(dataset: str) -> int:
    """How many samples a data set has, as its file says; 0 where it says no number, or about how many."""
    told = (content("dataset", dataset).get("about") or {}).get("samples")
    found = re.match(r"\d[\d,]*", str(told))
    return int(found[0].replace(",", "")) if found else 0


def members(group: str) -> list[tuple[str, str]]:
    """(dataset, metric that counts) of a benchmark's group, written as `MileBench T`.

    Raises:
        ConfigError: no dataset belongs to such a group.
    """
    if group not in _groups():
        raise ConfigError(f"no dataset belongs to the group {group!r}; {nearest(group, _groups())}")
    return _groups()[group]


def is_group(dataset: str) -> bool:
    """Whether a dataset's name is that of a benchmark's group."""
    return dataset in _groups()


@cache
def _groups() -> dict[str, list[tuple[str, str]]]:
    found: dict[str, list[tuple[str, str]]] = {}
    for name in sorted(_options("dataset")):
        node = content("dataset", name)
        for benchmark, sizes in ((node.get("about") or {}).get("groups") or {}).items():
            for group in sizes:
                found.setdefault(f"{benchmark} {group}", []).append((name, node["metrics"][0]))
    return found


def _check(found: Address) -> None:
    known = {*_options("model"), *UNAVAILABLE}
    if found.model not in known:
        raise ConfigError(f"there is no model {found.model!r}; {nearest(found.model, known)}")
    if found.metric != MEAN and found.dataset not in SYNTHETIC and file_of(found.dataset) not in _options("dataset"):
        raise ConfigError(f"there is no dataset {found.dataset!r}; {nearest(found.dataset, _options('dataset'))}")
    if found.reading not in READINGS:
        raise ConfigError(f"reading={found.reading}; {nearest(found.reading, READINGS)}")
    if found.protocol not in PROTOCOLS:
        raise ConfigError(f"protocol={found.protocol}; {nearest(found.protocol, PROTOCOLS)}")
    if found.dataset in SYNTHETIC and None in (found.length, found.new_tokens):
        raise ConfigError(f"made-up prompts need length and new_tokens: {found}")


@cache
def _options(group: str) -> frozenset[str]:
    return frozenset(options(group))


@cache
def _node(name: str) -> Mapping[str, Any]:
    return read(name)


@cache
def _resolved(name: str, given: str, reading: str) -> str:
    defaults = _node(name)
    plain = under_reading(name, {**defaults, **json.loads(given)}, reading, defaults)
    return canonical(str(defaults["base"]), _sorted(flat_parameters(plain)))


@cache
def _version(name: str, given: str, reading: str) -> int:
    return method(name, reading=reading, **json.loads(given)).version


def _sorted(value: Mapping[str, Any]) -> str:
    return json.dumps(dict(value), sort_keys=True)


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)


def _told(parts: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in parts.items()) or "nothing is given"
