"""The numbers that the papers print: `results/reference/*.csv`, typed, and the addresses that they belong to.

One row is one value as it stands in a paper; nothing is corrected. `value` is the literal, `number` the same as a number
(the decimal point that a scan lost put back, null where nothing is readable). `status` says what it may be held against,
`reason` why, `line` where it stands in the paper's text. Names of the papers become ours by `names.yaml` alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv_bench.config.schema import reference_dir
from mmkv_bench.errors import ConfigError, StoreError, nearest
from mmkv_bench.papers.address import NONE, Address, address
from mmkv_bench.papers.layout import is_stand_in

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = {
    "paper": "string",
    "table": "string",
    "model": "string",
    "method": "string",
    "variant": "string",
    "budget": "string",
    "budget_kind": "string",
    "inferred_budget": "string",
    "dataset": "string",
    "subset": "string",
    "metric": "string",
    "higher_is_better": "boolean",
    "value": "string",
    "number": "float64",
    "unit": "string",
    "status": "string",
    "reason": "string",
    "line": "Int64",
    "note": "string",
}

COMPARABLE, OPEN, RATIOS = "comparable", "settings open", "other device"
CLAIM = "claim"
STATUSES = {
    COMPARABLE: "held against ours",
    OPEN: "no code is released: held against every reading that was declared beforehand",
    "prompt differs": "the paper's prompt is not ours",
    "weights not released": "the paper's model cannot be had",
    "model cannot be run": "no class of the installed transformers runs it",
    "other judge": "another model judged the answers",
    "prompt cutting differs": "prompts beyond the context are cut otherwise",
    RATIOS: "times and peaks of another device: ratios to the full cache alone compare",
    "data not released": "the paper's samples cannot be had",
    "baseline implementation differs": "a baseline of another code base",
    "inconsistent": "the paper contradicts itself",
    "unattainable": "no sample count or printed definition gives it",
    "unreadable": "the text that we have has lost it",
    "other sample count": "another number of samples than the data set has",
    CLAIM: "a sentence of the text, see the claims",
}
"""What may stand in `status`, and what it says."""

_KINDS = {"tokens_per_head": int, "ratio": float}


@dataclass(frozen=True)
class Printed:
    """One printed value. `number` is None where none can be read, `half` what rounding may hide; `line` is that of the
    paper's text."""

    value: str
    number: float | None
    half: float
    unit: str
    status: str
    reason: str
    line: int | None


def table_id(paper: str, table: str) -> str:
    """`mmshift_table01`, `mmshift_fig03`, `mmshift_text`."""
    if table.isdigit():
        return f"{paper}_table{int(table):02d}"
    return f"{paper}_fig{int(table.removeprefix('fig')):02d}" if table.startswith("fig") else f"{paper}_{table}"


@cache
def load(folder: Path | None = None) -> pd.DataFrame:
    """All printed values, one a row, with the column `id` (see `table_id`); the frame is shared: do not change it.

    Raises:
        StoreError: a file with other columns, a status that is none, or a number that is not its literal's.
    """
    import pandas as pd

    folder = folder or reference_dir()
    found = []
    for file in sorted(folder.glob("*.csv")):
        texts = pd.read_csv(file, dtype="string", keep_default_na=False)
        if list(texts.columns) != list(COLUMNS):
            raise StoreError(f"{file} has the columns {', '.join(texts.columns)}; allowed: {', '.join(COLUMNS)}")
        found.append(texts)
    if not found:
        raise StoreError(f"{folder} holds no printed numbers (*.csv)")
    rows = pd.concat(found, ignore_index=True)
    unknown = sorted({*rows["status"]} - {*STATUSES})
    if unknown:
        raise StoreError(f"status {unknown[0]!r} in {folder} is none; {nearest(unknown[0], STATUSES)}")
    rows["id"] = [table_id(*pair) for pair in zip(rows["paper"], rows["table"], strict=True)]
    return _typed(rows)


def _typed(rows: pd.DataFrame) -> pd.DataFrame:
    import pandas as pd

    for name, kind in COLUMNS.items():
        if kind == "boolean":
            rows[name] = rows[name].map({"true": True, "false": False}).astype("boolean")
        elif kind != "string":
            rows[name] = pd.to_numeric(rows[name].where(rows[name] != "")).astype(kind)
    plain = pd.to_numeric(rows["value"], errors="coerce").astype("float64")
    lost = rows["note"].str.extract(r"ocr_likely=([0-9.]+)")[0]
    read = pd.to_numeric(lost).astype("float64").fillna(plain)
    other = (read != rows["number"]) & ~(read.isna() & rows["number"].isna())
    if other.any():
        row = rows[other].iloc[0]
        raise StoreError(f"{row['id']}: the number {row['number']} is not that of its literal {row['value']!r}")
    return rows


def half_digit(literal: str, number: float) -> float:
    """Half of the last digit of a printed number: what rounding may hide.

    literal: as it is printed; number: the same, where a scan has lost the decimal point with the point put back.
    """
    digits = literal.strip().lstrip("+-").replace(",", ".")  # a scan's comma
    places = len(digits.partition(".")[2])
    if "." not in digits and number != float(digits or 0):  # a lost point: as many digits, fewer of them before it
        places = max(len(digits) - len(str(int(abs(number)))), 0)
    return 0.5 * 10.0**-places


@cache
def names() -> Mapping[str, Any]:
    """The content of `names.yaml`."""
    import yaml

    return yaml.safe_load((reference_dir() / "names.yaml").read_text(encoding="utf-8"))


@cache
def of_table(name: str) -> Mapping[tuple[str, ...], Printed]:
    """The printed values of a table by the part of an address that a paper prints (`Address.printed`).

    Raises:
        ConfigError: a name without ours, two values of one address, or a stand-in, which nobody has printed.
    """
    if is_stand_in(name):
        raise ConfigError(f"{name} is a stand-in: no paper prints a number of it")
    rows = load()
    found: dict[tuple[str, ...], Printed] = {}
    for row in rows[(rows["id"] == name) & (rows["status"] != CLAIM)].to_dict("records"):
        key = printed_address(row).printed
        if key in found:
            raise ConfigError(f"{name} prints two values for one address: {found[key].value} and {row['value']}")
        number = float(row["number"]) if row["number"] == row["number"] else None
        half = half_digit(row["value"], number) if number is not None else 0.0
        told = (row["unit"], row["status"], row["reason"])
        found[key] = Printed(row["value"], number, half, *told, None if row["line"] is None else int(row["line"]))
    return found


def printed_address(row: Mapping[str, Any], told: Mapping[str, Any] | None = None) -> Address:
    """The address of a printed value: a row of `load`.

    Args:
        told: parts of an address that no table prints and that all its cells share.

    Raises:
        ConfigError: a name that `names.yaml` does not have.
    """
    own = (row["id"], row["paper"])
    subset = f"/{row['subset']}" if row["subset"] else ""
    column = _named("columns", f"{row['dataset']}{subset}:{row['metric']}", own)
    variant = f"|{row['variant']}" if row["variant"] else ""
    budget = row["budget"] or row["inferred_budget"]
    at = _lookup("methods", f"{row['method']}{variant}@{budget}", own)
    line = at or _lookup("methods", f"{row['method']}{variant}", own)
    if line is None and variant:
        raise _unknown("methods", f"{row['method']}{variant}", own)
    line = line or {"method": row["method"]}
    parts = {**(told or {}), "model": _named("models", row["model"], own), **column, **line}
    if row["budget_kind"] != NONE and not at:
        parts["budget"] = _KINDS[row["budget_kind"]](budget)
    return address(parts)


def _lookup(kind: str, name: str, own: tuple[str, str]) -> Any:
    known = names()[kind]
    return next((known[key] for key in (*(f"{one} {name}" for one in own), name) if key in known), None)


def _named(kind: str, name: str, own: tuple[str, str]) -> Any:
    found = _lookup(kind, name, own)
    if found is None:
        raise _unknown(kind, name, own)
    return found


def _unknown(kind: str, name: str, own: tuple[str, str]) -> ConfigError:
    return ConfigError(f"{own[0]}: names.yaml has no {kind} {name!r}; {nearest(name, names()[kind])}")
