"""Addresses of numbers: model, data, metric, method with all parameters, budget and conditions.

Numbers with the same address are comparable, whatever their labels in the papers.
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
"""Data sets of timed passes (`scenario=efficiency`): made-up prompts of a given length."""
STAND_IN = "tiny"
"""The embedded model, which fills stand-ins and is no evidence for a printed number."""
MEAN = "mean"
"""Metric of an address whose number is a mean."""
_SIZE_SUFFIXES = ("small", "large")
_options, _file = cache(options), cache(read)
_CONDITIONS = ("max_new_tokens", "cut_prompt", "frames", "samples", "length", "new_tokens", "batch")
KEYS = (
    *("model", "dataset", "group", "metric", "method", "with", "calibration", "minus", "reading", "protocol", "budget"),
    *("seeds", *_CONDITIONS),
)
"""Allowed keys of an address."""
CALIBRATED = ("samples", "data", "instruction")
"""Keys of a calibration's source."""
BESIDE_PARAMETERS = ("calibration", "reads_answer", "over_budget")
"""Keys in the rows' `parameters` that are no settings of the method."""


@dataclass(frozen=True)
class MethodSettings:
    """A method with its settings.

    Attributes:
        name: name of the file in conf/method.
        settings: settings that differ from the defaults in the file, as sorted JSON.
        calibration: source of the calibration, as sorted JSON with keys of `CALIBRATED`; "" if no source is given.
    """

    name: str
    settings: str = "{}"
    calibration: str = ""

    @classmethod
    def of(cls, name: str, settings: Mapping[str, Any] | None = None, calibration: Any = None) -> MethodSettings:
        """Return a method with its settings.

        Args:
            name: name of the file in conf/method.
            settings: parameter -> value.
            calibration: "auto", None, or the source: a mapping with keys of `CALIBRATED`.

        Raises:
            ConfigError: no such method, no such parameter, or an incomplete source.
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
        return cls(name, _sorted_json(changed), _sorted_json(calibration_source) if calibration_source else "")

    @property
    def changed(self) -> dict[str, Any]:
        """Parameter -> value, for settings that differ from the defaults."""
        return dict(json.loads(self.settings))

    def setting(self, key: str) -> Any:
        """Return the value of the parameter `key`."""
        return self.changed.get(key, flat_parameters(_file(self.name))[key])

    @property
    def calibrated(self) -> dict[str, Any]:
        """Source of the calibration, with keys of `CALIBRATED`; empty if no source is given."""
        return dict(json.loads(self.calibration)) if self.calibration else {}

    @property
    def base(self) -> str:
        """Name of the base method, as in column `base` of the rows."""
        return str(_file(self.name)["base"])

    @property
    def unbudgeted(self) -> bool:
        """True if the method keeps every entry, so that it has no budget."""
        allocator = _file(self.name).get("allocator")
        keeps_all = isinstance(allocator, Mapping) and ".keep_all." in str(allocator.get("_target_"))
        return self.base == "full" or keeps_all

    def parameters(self, reading: str) -> str:
        """Return the parameters that differ from the base method's defaults, as sorted JSON. reading: `paper` or `released`."""
        return "{}" if self.base == "full" else _resolved_parameters(self, reading)

    def version(self, reading: str) -> int:
        """Return the version of the method's installed code, as in column `method_version` of the rows.

        reading: `paper` or `released`.
        """
        return _version(self, reading)

    def __str__(self) -> str:
        setting_texts = [f"{key}={_value_text(value)}" for key, value in self.changed.items()]
        setting_texts += [f"{key}={value}" for key, value in self.calibrated.items()]
        return f"{self.name}({', '.join(setting_texts)})" if setting_texts else self.name


@dataclass(frozen=True)
class Address:
    """Everything that determines a number of a paper's table.

    Attributes:
        metric: name of the metric; `mean` for a mean over several addresses.
        minus: method whose number is subtracted; None: no difference.
        max_new_tokens, cut_prompt, frames: None if the data set's settings apply.
        samples: number of samples; None: all samples of the data set.
        length, new_tokens, batch: prompt length, answer length [tokens] and batch of timed passes.
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
        """The fields that papers state, as texts. Table cells and printed numbers are matched by these."""
        texts = (self.model, self.dataset, self.metric, str(self.method), str(self.minus or ""), self.budget_kind)
        return *texts, self.budget, *(str(n or "") for n in (self.length, self.new_tokens, self.batch))

    @property
    def runs(self) -> bool:
        """True unless `config/unavailable.yaml` says that the model cannot be run."""
        return self.model not in UNAVAILABLE

    def __str__(self) -> str:
        texts = [self.model, self.dataset, self.metric, str(self.method)]
        texts += [f"minus {self.minus}"] if self.minus else []
        return " ".join(texts + ([f"budget {self.budget}"] if self.budget else []))


def address(parts: Mapping[str, Any]) -> Address:
    """Return the address with the given keys of `KEYS`, as the files of table layouts have them.

    Raises:
        ConfigError: a key is missing or unknown, or a value does not exist.
    """
    for key in parts:
        if key not in KEYS:
            raise ConfigError(f"{key!r} is no key of an address; {nearest(key, KEYS)}")
    parts = {key: value for key, value in parts.items() if value is not None}
    if "group" in parts:
        parts = {**parts, "dataset": parts.pop("group"), "metric": MEAN}
    missing = [key for key in ("model", "method", "dataset", "metric") if key not in parts]
    if missing:
        raise ConfigError(f"an address needs {', '.join(missing)}; this one has {_keys_text(parts)}")
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
    """Return (kind, text) of a budget.

    value: int (entries per KV head), or another number (fraction of the entries kept). parts: keys of the address, for messages.

    Raises:
        ConfigError: `value` is None, no number, or a fraction outside (0, 1].
    """
    if isinstance(value, bool) or value is None:
        raise ConfigError(f"an address needs a budget; this one has {_keys_text(parts)}")
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
    """Return a row's parameters without `BESIDE_PARAMETERS` and without defaults of the method `base`, as sorted JSON.

    parameters: JSON.
    """
    settings = {key: value for key, value in json.loads(parameters).items() if key not in BESIDE_PARAMETERS}
    if base in _options("method"):
        configuration = _file(base)
        defaults = flat_parameters(under_reading(base, configuration, READINGS[0], configuration))
        settings = {key: value for key, value in settings.items() if key not in defaults or defaults[key] != value}
    return _sorted_json(settings)


def file_of(dataset: str) -> str:
    """Return the file in conf/dataset of a row's data set, whose name may have a page size behind it: `pages_walk_small`."""
    name, _, size = dataset.rpartition("_")
    return name if size in _SIZE_SUFFIXES and name in _options("dataset") else dataset


@cache
def samples_of(dataset: str) -> int:
    """Return the number of samples that a data set's file states; 0 without one, or for a text such as "about 500"."""
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
def _resolved_parameters(settings: MethodSettings, reading: str) -> str:
    defaults = _file(settings.name)
    resolved = under_reading(settings.name, {**defaults, **settings.changed}, reading, defaults)
    return canonical(str(defaults["base"]), _sorted_json(flat_parameters(resolved)))


@cache
def _version(settings: MethodSettings, reading: str) -> int:
    return method(settings.name, reading=reading, **settings.changed).version


def _sorted_json(value: Mapping[str, Any]) -> str:
    return json.dumps(dict(value), sort_keys=True)


def _value_text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)


def _keys_text(parts: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in parts.items()) or "nothing is given"
