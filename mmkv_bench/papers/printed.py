"""Numbers that the papers print (`results/reference/*.csv`), and their addresses.

A row is one value. `names.yaml` maps the papers' names of models, methods and columns to ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from mmkv_bench.config.files import reference_dir
from mmkv_bench.declared import read_yaml
from mmkv_bench.errors import ConfigError, StoreError, nearest
from mmkv_bench.papers.address import NONE, Address, address
from mmkv_bench.papers.layout import is_stand_in

if TYPE_CHECKING:
    import pandas as pd

_TEXT_COLUMNS = "paper table model method variant budget budget_kind inferred_budget dataset subset metric"
COLUMNS = {
    **dict.fromkeys(_TEXT_COLUMNS.split(), "string"),
    "higher_is_better": "boolean",
    "value": "string",
    "number": "float64",
    **dict.fromkeys(("unit", "status", "reason"), "string"),
    "line": "Int64",
    "note": "string",
}
"""Column of the files -> type."""

COMPARABLE, OPEN, RATIOS = "comparable", "settings open", "other device"
CLAIM = "claim"
STATUSES = {
    COMPARABLE: "compared with ours",
    OPEN: "no code is released: compared with every reading that was declared beforehand",
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
"""Status -> meaning."""

_BUDGET_TYPES = {"tokens_per_head": int, "ratio": float}


@dataclass(frozen=True)
class Printed:
    """A value as a paper prints it.

    value: the printed text. number: the number, with a decimal point restored if the scan lost it; None if unreadable.
    half: half a unit of the last printed digit.
    status: key of `STATUSES`, which tells whether the number is comparable with ours. reason: why.
    line: line in the paper's text.
    """

    value: str
    number: float | None
    half: float
    unit: str
    status: str
    reason: str
    line: int | None

    @property
    def readable_number(self) -> float:
        """`number` of a readable value."""
        assert self.number is not None
        return self.number


def table_id(paper: str, table: str) -> str:
    """Return the id of a table, such as `mmshift_table01`, `mmshift_fig03` or `mmshift_text`."""
    if table.isdigit():
        return f"{paper}_table{int(table):02d}"
    return f"{paper}_fig{int(table.removeprefix('fig')):02d}" if table.startswith("fig") else f"{paper}_{table}"


@cache
def load() -> pd.DataFrame:
    """Return all printed values, one per row, with the column `id` (`table_id`). All callers share the frame: do not change it.

    Raises:
        StoreError: the folder has no csv file.
    """
    import pandas as pd

    files = sorted(reference_dir().glob("*.csv"))
    if not files:
        raise StoreError(f"{reference_dir()} has no files of printed numbers (*.csv); run in a checkout")
    rows = pd.concat([pd.read_csv(file, dtype="string", keep_default_na=False) for file in files], ignore_index=True)
    rows["id"] = [table_id(*pair) for pair in zip(rows["paper"], rows["table"], strict=True)]
    for name, kind in COLUMNS.items():
        if kind == "boolean":
            rows[name] = rows[name].map({"true": True, "false": False}).astype("boolean")
        elif kind != "string":
            rows[name] = pd.to_numeric(rows[name].where(rows[name] != "")).astype(kind)
    return rows


def half_digit(literal: str, number: float) -> float:
    """Return half a unit of the last digit of a printed number. literal, number: `value` and `number` of `Printed`."""
    digits = literal.strip().lstrip("+-").replace(",", ".")  # a scan's comma
    decimals = len(digits.partition(".")[2])
    if "." not in digits and number != float(digits or 0):  # a lost point: the same digits, with fewer before the point
        decimals = max(len(digits) - len(str(int(abs(number)))), 0)
    return 0.5 * 10.0**-decimals


@cache
def names() -> Mapping[str, Any]:
    return read_yaml((reference_dir() / "names.yaml").read_bytes())


@cache
def of_table(name: str) -> Mapping[tuple[str, ...], Printed]:
    """Return `Address.printed` -> printed value, for all values of a table except claims.

    Raises:
        ConfigError: `names.yaml` lacks a name, two values have the same address, or the table is a stand-in.
    """
    if is_stand_in(name):
        raise ConfigError(f"{name} is a stand-in, so no paper prints its numbers; give a paper's table")
    rows = load()
    values: dict[tuple[str, ...], Printed] = {}
    for row in rows[(rows["id"] == name) & (rows["status"] != CLAIM)].to_dict("records"):
        key = printed_address(row).printed
        if key in values:
            raise ConfigError(
                f"{name} prints two values for one address: {values[key].value} and {row['value']}; correct names.yaml"
            )
        number = float(row["number"]) if row["number"] == row["number"] else None
        half_digit_width = half_digit(row["value"], number) if number is not None else 0.0
        text_line = None if row["line"] is None else int(row["line"])
        values[key] = Printed(
            row["value"], number, half_digit_width, row["unit"], row["status"], row["reason"], text_line
        )
    return values


def printed_address(row: Mapping[str, Any]) -> Address:
    """Return the address of a printed value, in our names. row: a row of `load`.

    Raises:
        ConfigError: `names.yaml` lacks a name.
    """
    subset = f"/{row['subset']}" if row["subset"] else ""
    column = _required_name("columns", f"{row['dataset']}{subset}:{row['metric']}", row)
    name = row["method"] + (f"|{row['variant']}" if row["variant"] else "")
    budget = row["budget"] or row["inferred_budget"]
    settings_at_budget = _lookup("methods", f"{name}@{budget}", row)
    method = settings_at_budget or _lookup("methods", name, row) or (None if row["variant"] else {"method": name})
    address_keys = {"model": _required_name("models", row["model"], row), **column}
    address_keys |= _required_name("methods", name, row) if method is None else method
    if row["budget_kind"] != NONE and not settings_at_budget:
        address_keys["budget"] = _BUDGET_TYPES[row["budget_kind"]](budget)
    return address(address_keys)


def _lookup(kind: str, name: str, row: Mapping[str, Any]) -> Any:
    """Return our equivalent of a paper's name, or None: for the row's table, else for the row's paper, else for all papers.

    kind: section of `names.yaml`. row: the printed value.
    """
    names_of_kind = names()[kind]
    keys = (f"{row['id']} {name}", f"{row['paper']} {name}", name)
    return next((names_of_kind[key] for key in keys if key in names_of_kind), None)


def _required_name(kind: str, name: str, row: Mapping[str, Any]) -> Any:
    our_keys = _lookup(kind, name, row)
    if our_keys is None:
        raise ConfigError(f"{row['id']}: names.yaml has no {kind} {name!r}; {nearest(name, names()[kind])}")
    return our_keys
