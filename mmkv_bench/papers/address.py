"""Addresses of numbers: model, data, metric, method with all its parameters, budget and conditions.

Two numbers with the same address are comparable, even under different labels. The file of a method and its reading give defaults
to all its parameters, so a changed default changes the address.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import cache
from typing import Any

from mmkv_bench.config.files import content, options
from mmkv_bench.config.names import UNAVAILABLE
from mmkv_bench.config.schema import READINGS
from mmkv_bench.errors import ConfigError, nearest
from mmkv_bench.methods.build import method
from mmkv_bench.methods.node import flat_parameters, read, under_reading
from mmkv_bench.protocols import NAMES as PROTOCOLS

NONE, ENTRIES, FRACTION = "none", "entries", "fraction"
SYNTHETIC = ("made_up_text", "made_up_image", "made_up_video")
"""Data sets of `scenario=efficiency`: made-up prompts of a given length."""
STAND_IN = "tiny"
"""The embedded model. Its numbers replace those of other models in stand-ins, and are no evidence for a printed number."""
MEAN = "mean"
"""Metric of an address whose number is a mean over several others."""
_SIZE_SUFFIXES = ("small", "large")
_options, _file = cache(options), cache(read)
_CONDITIONS = ("max_new_tokens", "cut_prompt", "frames", "samples", "length", "new_tokens", "batch")
KEYS = (
    *("model", "dataset", "group", "metric", "method", "with", "calibration", "minus", "reading", "protocol", "budget"),
    *("seeds", *_CONDITIONS),
)
"""Allowed keys of an address."""
CALIBRATED = ("samples", "data", "instruction")
"""Keys that distinguish two calibrations."""
BESIDE_PARAMETERS = ("calibration", "reads_answer", "over_budget")
"""Keys in the rows' parameters that are not settings: the calibration file, and marks."""


@dataclass(frozen=True)
class MethodSettings:
    """A method with its settings.

    Attributes:
        name: name of its file in conf/method.
        settings: settings that differ from the defaults, as sorted JSON.
        calibration: source of its calibration, as sorted JSON of `CALIBRATED`; "" for the model's default one (`auto`).
    """

    name: str
    settings: str = "{}"
    calibration: str = ""

    @classmethod
    def of(cls, name: str, settings: Mapping[str, Any] | None = None, calibration: Any = None) -> MethodSettings:
        """Return the method `name` with the settings that differ from the defaults in its file.

        calibration: source of its calibration: "auto", null, or a mapping with keys of `CALIBRATED`.

        Raises:
            ConfigError: no such method, a parameter that the method does not have, or an incomplete calibration.
        """
        defaults, settings = flat_parameters(_file(name)), dict(settings or {})
        if calibration == "auto" and defaults.get("calibration") != "auto":
            settings["calibration"] = "auto"
        for key in settings:
            if key not in defaults:
                raise ConfigError(f"method {name} has no parameter {key!r}; {nearest(key, defaults)}")
        typed_settings = {
            key: float(value) if isinstance(defaults[key], float) else value for key, value in settings.items()
        }
        changed = {key: value for key, value in typed_settings.items() if value != defaults[key]}
        calibration_source = calibration if isinstance(calibration, Mapping) else {}
        has_source = not calibration_source or {"samples", "data"} <= {*calibration_source} <= {*CALIBRATED}
        if not has_source or not isinstance(calibration, Mapping | str | None):
            raise ConfigError(
                f"{name}: calibration={calibration} is not allowed; use auto, or a mapping with samples "
                "and data (instruction is optional)"
            )
        return cls(name, _sorted(changed), _sorted(calibration_source) if calibration_source else "")

    @property
    def changed(self) -> dict[str, Any]:
        """Settings that differ from the defaults: name -> value."""
        return dict(json.loads(self.settings))

    def setting(self, key: str) -> Any:
        """Return the value of one parameter of the method, the default if it was not changed."""
        return self.changed.get(key, flat_parameters(_file(self.name))[key])

    @property
    def calibrated(self) -> dict[str, Any]:
        """Source of the calibration (data, samples, instruction); empty if none was given."""
        return dict(json.loads(self.calibration)) if self.calibration else {}

    @property
    def base(self) -> str:
        """Name of the base method, as result rows contain it."""
        return str(_file(self.name)["base"])

    @property
    def unbudgeted(self) -> bool:
        """True if the method keeps every entry and so takes no budget."""
        allocator = _file(self.name).get("allocator")
        keeps_all = isinstance(allocator, Mapping) and ".keep_all." in str(allocator.get("_target_"))
        return self.base == "full" or keeps_all

    def parameters(self, reading: str) -> str:
        """Return the parameters that differ from the base method's defaults, as sorted JSON.

        reading: `paper` or `released`, the version of the method's rules.
        """
        return "{}" if self.base == "full" else _resolved(self, reading)

    def version(self, reading: str) -> int:
        """Return the number of this method's version in the installed code; rows store it as `method_version` (null: 1).

        reading: `paper` or `released`, the version of the method's rules.
        """
        return _version(self, reading)

    def __str__(self) -> str:
        setting_texts = [f"{key}={_plain(value)}" for key, value in self.changed.items()]
        setting_texts += [f"{key}={value}" for key, value in self.calibrated.items()]
        return f"{self.name}({', '.join(setting_texts)})" if setting_texts else self.name


@dataclass(frozen=True)
class Address:
    """Everything that determines one number of a paper's table: what was measured, with which method and settings.

    Attributes:
        metric: name of the metric; `mean` for a mean over several addresses.
        minus: the method whose number is subtracted.
        max_new_tokens, cut_prompt, frames: None if the data set's settings apply.
        samples: None if all samples of the data set are asked.
        length, new_tokens, batch: shape of timed passes.
    """

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
        """The fields that a paper's table also contains, as texts. Table cells and printed numbers are matched by these."""
        texts = (self.model, self.dataset, self.metric, str(self.method), str(self.minus or ""), self.budget_kind)
        return *texts, self.budget, *(str(n or "") for n in (self.length, self.new_tokens, self.batch))

    @property
    def runs(self) -> bool:
        """True unless the model cannot be run, which `config/unavailable.yaml` records."""
        return self.model not in UNAVAILABLE

    def __str__(self) -> str:
        texts = [self.model, self.dataset, self.metric, str(self.method)]
        texts += [f"minus {self.minus}"] if self.minus else []
        return " ".join(texts + ([f"budget {self.budget}"] if self.budget else []))


def address(parts: Mapping[str, Any]) -> Address:
    """Return the `Address` of a number from a mapping with keys of `KEYS`, as in the files of table layouts.

    Raises:
        ConfigError: a key is missing or unknown, or names something that does not exist.
    """
    for key in parts:
        if key not in KEYS:
            raise ConfigError(f"{key!r} is no key of an address; {nearest(key, KEYS)}")
    parts = {key: value for key, value in parts.items() if value is not None}
    if "group" in parts:
        parts = {**parts, "dataset": parts.pop("group"), "metric": MEAN}
    missing = [key for key in ("model", "method", "dataset", "metric") if key not in parts]
    if missing:
        raise ConfigError(f"an address needs {', '.join(missing)}; this one has {_listed(parts)}")
    minuend_and_subtrahend = [node for node in (parts, parts.get("minus")) if node is not None]
    methods = [
        MethodSettings.of(node["method"], node.get("with"), node.get("calibration")) for node in minuend_and_subtrahend
    ]
    kind, budget = (NONE, "") if methods[0].unbudgeted else budget_of(parts.get("budget"), parts)
    other_fields = {
        key: parts[key] for key in ("model", "dataset", "metric", "reading", "protocol", *_CONDITIONS) if key in parts
    }
    other_fields |= dict(zip(("method", "minus"), methods, strict=False)) | {"seeds": tuple(parts.get("seeds", (0,)))}
    plain_address = Address(budget_kind=kind, budget=budget, **other_fields)
    names_a_dataset = plain_address.metric != MEAN and plain_address.dataset not in SYNTHETIC
    for what, name, known in (
        ("model", plain_address.model, {*_options("model"), *UNAVAILABLE}),
        (
            "dataset",
            file_of(plain_address.dataset),
            _options("dataset") if names_a_dataset else [file_of(plain_address.dataset)],
        ),
        ("reading", plain_address.reading, READINGS),
        ("protocol", plain_address.protocol, PROTOCOLS),
    ):
        if name not in known:
            raise ConfigError(f"unknown {what} {name!r}; {nearest(name, known)}")
    if plain_address.dataset in SYNTHETIC and None in (plain_address.length, plain_address.new_tokens):
        raise ConfigError(f"{plain_address}: made-up prompts need length and new_tokens; give both")
    return plain_address


def budget_of(value: Any, parts: Mapping[str, Any]) -> tuple[str, str]:
    """Return (kind, text) of a budget. A whole number means entries per KV head, any other number the fraction kept.

    value: the budget. parts: the address's keys, for the message.

    Raises:
        ConfigError: there is no budget, or it is neither entries nor a fraction.
    """
    if isinstance(value, bool) or value is None:
        raise ConfigError(f"an address needs a budget; this one has {_listed(parts)}")
    if isinstance(value, int):
        return ENTRIES, str(value)
    try:
        number = Decimal(str(value))
    except InvalidOperation:
        raise ConfigError(f"budget={value} is no number; allowed: entries (64) or a fraction kept (0.2)") from None
    if not 0 < number <= 1:
        raise ConfigError(f"budget={value} is out of range; allowed: a fraction above 0 and at most 1")
    return FRACTION, f"{number.normalize():f}"


@cache
def canonical(base: str, parameters: str) -> str:
    """Return the parameters (JSON) of a row that differ from the defaults of the method `base`, as sorted JSON.

    A parameter that an old row lacks counts as default. Items that are no parameters of the method, such as checksums of
    calibrations, are left out.
    """
    settings = {key: value for key, value in json.loads(parameters).items() if key not in BESIDE_PARAMETERS}
    if base in _options("method"):
        configuration = _file(base)
        defaults = flat_parameters(under_reading(base, configuration, READINGS[0], configuration))
        settings = {key: value for key, value in settings.items() if key not in defaults or defaults[key] != value}
    return _sorted(settings)


def file_of(dataset: str) -> str:
    """Return the name of a data set's file in conf/dataset. Rows append the size to the names of pages: `pages_walk_small`."""
    name, _, size = dataset.rpartition("_")
    return name if size in _SIZE_SUFFIXES and name in _options("dataset") else dataset


@cache
def samples_of(dataset: str) -> int:
    """Return the number of samples in a data set's file; 0 if the file has none or only an approximate number."""
    stated_size = (content("dataset", dataset).get("about") or {}).get("samples")
    leading_number = re.match(r"\d[\d,]*", str(stated_size))
    return int(leading_number[0].replace(",", "")) if leading_number else 0


def members(group: str) -> list[tuple[str, str]]:
    """Return (dataset, first metric) of each data set in a benchmark's group, such as `MileBench T`.

    Raises:
        ConfigError: no data set belongs to such a group.
    """
    if group not in _groups():
        raise ConfigError(f"no dataset belongs to the group {group!r}; {nearest(group, _groups())}")
    return _groups()[group]


def is_group(dataset: str) -> bool:
    """Return True if `dataset` is the name of a benchmark's group."""
    return dataset in _groups()


@cache
def _groups() -> dict[str, list[tuple[str, str]]]:
    groups: dict[str, list[tuple[str, str]]] = {}
    for name in sorted(_options("dataset")):
        node = content("dataset", name)
        for benchmark, sizes in ((node.get("about") or {}).get("groups") or {}).items():
            for group in sizes:
                groups.setdefault(f"{benchmark} {group}", []).append((name, node["metrics"][0]))
    return groups


@cache
def _resolved(settings: MethodSettings, reading: str) -> str:
    defaults = _file(settings.name)
    resolved = under_reading(settings.name, {**defaults, **settings.changed}, reading, defaults)
    return canonical(str(defaults["base"]), _sorted(flat_parameters(resolved)))


@cache
def _version(settings: MethodSettings, reading: str) -> int:
    return method(settings.name, reading=reading, **settings.changed).version


def _sorted(value: Mapping[str, Any]) -> str:
    return json.dumps(dict(value), sort_keys=True)


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)


def _listed(parts: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in parts.items()) or "nothing is given"
