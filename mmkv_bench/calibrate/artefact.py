"""Calibration artefacts: measurements of a model as JSON files, from which methods take parameters.

An artefact has the fingerprint of its model, as rows do, so it is never used for other weights. It is plain JSON with a
checksum over all other fields; nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv_bench.config.files import conf_dir
from mmkv_bench.errors import CalibrationError, nearest
from mmkv_bench.store.files import canonical_json, write_bytes

if TYPE_CHECKING:
    from mmkv_bench.families.facts import ModelFacts


FORMAT = 1
AUTO = "auto"
"""Value of `calibration`: the committed artefact of the run's model, below `conf/calibration/<model name>/`."""
METHODS = ("hybridkv", "mmshift", "prefixkv", "sparsemm")
EMBEDDED_NAME = "tiny"
"""`model.name` of the embedded model, the command's default."""
DIGITS = 6
"""Decimals of stored numbers, so that a kernel's rounding noise does not change an artefact."""

SHOWN = 16
"""Number of a checksum's digits in rows and messages."""

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][\w.+-]*")


@dataclass(frozen=True)
class Artefact:
    """One calibration: measurements of a model that a method needs, as stored in a JSON file.

    Attributes:
        method: one of `METHODS`.
        model, model_fingerprint, model_revision: the measured model.
        dataset: description of the samples.
        samples: ids of the samples, in order; empty if released files were imported.
        settings: options of the command that affect the data.
        versions: package -> version.
        data: JSON values that the method reads; the docstring of the function that computes them describes the keys.
        checksum: sha256 in hex over the canonical JSON of all other fields.
    """

    method: str
    model: str
    model_fingerprint: str
    model_revision: str | None
    dataset: str
    samples: Sequence[str]
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    data: Mapping[str, Any]
    format: int = FORMAT
    checksum: str = ""

    @classmethod
    def make(cls, digits: int | None = DIGITS, **fields: Any) -> Artefact:
        """Return an artefact with these fields, and with its checksum.

        Args:
            digits: decimals to which the data's numbers are rounded; None does not round.
            fields: all attributes except `format` and `checksum`.
        """
        fields["data"] = fields["data"] if digits is None else rounded(fields["data"])
        field_values = asdict(cls(**fields))
        return cls(**fields, checksum=digest(field_values))


def rounded(value: Any) -> Any:
    """Return a JSON value with every float rounded to `DIGITS` decimals."""
    if isinstance(value, float):
        return round(value, DIGITS)
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list | tuple) else value


def digest(fields: Mapping[str, Any]) -> str:
    """Return the sha256 (hex) over the canonical JSON of an artefact's fields without the checksum."""
    return hashlib.sha256(
        canonical_json({key: value for key, value in fields.items() if key != "checksum"}).encode()
    ).hexdigest()


def committed(method: str, model_name: str) -> Path:
    """Return the path of the artefact that `calibration=auto` reads for a method and a model.

    Raises:
        CalibrationError: the model name is not a plain name.
    """
    if not _PLAIN_NAME.fullmatch(model_name):
        raise CalibrationError(
            f"calibration=auto finds artefacts by model.name, but {model_name!r} is not a plain name (letters, digits "
            f"and _ . + -); rename the model, or give {method}'s file with calibration=<path>"
        )
    return conf_dir() / "calibration" / model_name / f"{method}.json"


def save(artefact: Artefact, path: Path) -> Path:
    """Write an artefact as JSON with sorted keys, one row of numbers per line. Return its path."""
    write_bytes(path, (_readable(json.loads(canonical_json(asdict(artefact)))) + "\n").encode())
    return path


def load(method: str, spec: Any, model_name: str, model_fingerprint: str) -> Artefact:
    """Load the artefact that a method of a run reads.

    Args:
        method: one of `METHODS`.
        spec: `auto`, or the path of an artefact.
        model_name, model_fingerprint: the run's model.

    Raises:
        CalibrationError: an argument is not valid, or the file is missing, is not an artefact, was changed after it was
            written, or belongs to another method or model.
    """
    if method not in METHODS:
        raise CalibrationError(f"there is no calibration for {method!r}; {nearest(str(method), METHODS)}")
    if not isinstance(spec, str) or not spec.strip():
        raise CalibrationError(f"calibration={spec!r} is not valid; allowed: auto, or the path of an artefact")
    path = committed(method, model_name) if spec == AUTO else Path(spec).expanduser()
    remedy = f"make it with python -m mmkv_bench calibrate {method}"
    if model_name != EMBEDDED_NAME:  # without these options the command measures the embedded model
        remedy += f" --path <model.path> --name {model_name}"
    try:
        fields = json.loads(path.read_text())
    except FileNotFoundError:
        missing_sentence = (
            f"model {model_name} has no committed calibration" if spec == AUTO else f"calibration={spec} does not exist"
        )
        raise CalibrationError(f"{missing_sentence} for {method} (no file {_label(path)}); {remedy}") from None
    except (OSError, ValueError) as error:
        raise CalibrationError(f"{_label(path)} cannot be read as JSON ({error}); {remedy}") from error
    artefact = _checked_artefact(fields, path, remedy)
    if artefact.method != method:
        raise CalibrationError(
            f"{_label(path)} is a calibration of {artefact.method}, not of {method}; {remedy}, or give the file of {method}"
        )
    if artefact.model_fingerprint != model_fingerprint:
        raise CalibrationError(
            f"{_label(path)} was made for model {artefact.model} ({artefact.model_fingerprint}), but this run's model is "
            f"{model_name} ({model_fingerprint}); a calibration is valid for the measured weights only; {remedy}"
        )
    return artefact


class Calibrations:
    """Loader of one model's artefacts for the methods of a run. Each is read once; its checksum goes into rows.

    Attributes:
        used: method -> shortened checksum of its artefact, for methods that read one since the last call of `taken`.
        seen: shortened checksum -> description of the artefact's samples: `dataset`, number of `samples`, and
            `instruction`, if the samples were selected by the length of their text.
    """

    def __init__(self, model_name: str, model_fingerprint: str):
        self.model_name, self.model_fingerprint = model_name, model_fingerprint
        self.used: dict[str, str] = {}
        self.seen: dict[str, dict[str, Any]] = {}
        self._loaded: dict[tuple[str, str], Artefact] = {}

    def data(self, method: str, spec: Any) -> dict[str, Any]:
        """Return the data of a method's artefact, and record its checksum in `used`. See `load` for the arguments."""
        key = (method, str(spec))
        if key not in self._loaded:
            self._loaded[key] = load(method, spec, self.model_name, self.model_fingerprint)
        artefact = self._loaded[key]
        self.used[method] = artefact.checksum[:SHOWN]
        samples = {"dataset": artefact.dataset, "samples": len(artefact.samples)}
        recorded_settings = {key: artefact.settings[key] for key in ("instruction",) if key in artefact.settings}
        self.seen[artefact.checksum[:SHOWN]] = samples | recorded_settings
        return json.loads(canonical_json(artefact.data))

    def taken(self) -> dict[str, str]:
        """Return `used`, and empty it."""
        used_checksums, self.used = self.used, {}
        return used_checksums


def _checked_artefact(fields: Any, path: Path, make: str) -> Artefact:
    field_names = set(Artefact.__dataclass_fields__)
    if not isinstance(fields, Mapping) or set(fields) != field_names or not isinstance(fields["data"], Mapping):
        raise CalibrationError(f"{_label(path)} is not a calibration artefact (it has other keys); {make}")
    if fields["format"] != FORMAT:
        raise CalibrationError(f"{_label(path)} has format {fields['format']}, but this version reads {FORMAT}; {make}")
    actual_checksum = digest(fields)
    if fields["checksum"] != actual_checksum:
        raise CalibrationError(
            f"{_label(path)} was changed after it was written: the stored checksum is {str(fields['checksum'])[:SHOWN]}, but "
            f"the content has {actual_checksum[:SHOWN]}; restore the file, or {make}"
        )
    return Artefact(**fields)


def _label(path: Path) -> str:
    try:
        return f"conf/{path.relative_to(conf_dir()).as_posix()}"
    except ValueError:
        return str(path)


def _readable(value: Any, depth: int = 0) -> str:
    """Return a value as JSON text with one line per innermost list, for readable diffs."""
    if isinstance(value, dict):
        key_prefixes = [f"{json.dumps(key, ensure_ascii=False)}: " for key in value]
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        key_prefixes = [""] * len(value)
    else:
        return json.dumps(value, ensure_ascii=False)
    items = value.values() if isinstance(value, dict) else value
    line_break = "\n" + " " * (depth + 1)
    lines = [line_break + name + _readable(item, depth + 1) for name, item in zip(key_prefixes, items, strict=True)]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return opening + ",".join(lines) + "\n" + " " * depth + closing if lines else opening + closing


class StandIns(Calibrations):
    """Calibrations for a dry run: an artefact that cannot be loaded is replaced by made-up data, equal for all layers
    and heads.

    Attributes:
        made_up: methods that got made-up data.
    """

    def __init__(self, model_name: str, model_fingerprint: str, family: ModelFacts):
        super().__init__(model_name, model_fingerprint)
        self.family = family
        self.made_up: set[str] = set()

    def data(self, method: str, spec: Any) -> dict[str, Any]:
        """Return the data of a method's artefact, or made-up data.

        Raises:
            CalibrationError: the artefact cannot be loaded, and no data are made up for this method.
        """
        try:
            return super().data(method, spec)
        except CalibrationError as error:
            layers, heads = self.family.num_layers, self.family.num_query_heads
            budget_shares = [step / 100 for step in range(1, 101)]
            data_by_method: dict[str, dict[str, Any]] = {
                "prefixkv": {"grid": budget_shares, "ratios": [[share] * layers for share in budget_shares]},
                "sparsemm": {"scores": [[1.0] * heads] * layers, "kv_heads": self.family.num_kv_heads},
                "hybridkv": {"theta": 0.5},
            }
            if method not in data_by_method:
                raise CalibrationError(f"{method} needs a calibration of {self.model_name}: {error}") from error
            self.made_up.add(method)
            return data_by_method[method]
