"""A table or figure of a paper, as `conf/table/<id>.yaml` lays it out: rows x columns, each adding to a cell's address.

    paper, number, caption, kind       what it is; kind: accuracy, likelihood, efficiency or analysis
    cell: {model: ..., reading: ...}   what all cells share (keys of an address, see `address.KEYS`)
    blocks: [{model: ...}, ...]        parts of the table that repeat the rows
    rows, columns: [{method: ...}]     an item is keys of an address, and besides
        label: text                    what stands at its edge
        only: {model: ...}             it is there only in cells that have these keys so
        mean: all | [labels]           (columns) the mean of the other columns, or of these; keys of an address in a label's
                                       place are of a part that has no column
        readings: {name: {...}}        (rows) in the place of the table's
    across: [{budget: 64}, ...]        what every column is split by; a method without budget has one cell for all
    readings: {name: {...}}            further readings, declared beforehand: keys that are laid over a cell's (not over times
                                       and bytes of made-up prompts)
    together: true                     the columns of one budget stand in one cell ("PPL / ROUGE")
    figure: curves | radar | analysis  how its cells are drawn (papers/figure.py)
    experiments: [name]                files of conf/experiment/papers, and efficiency_* of conf/experiment, that run its cells
    notes: [text]

A stand-in (`conf/table/standin/<layout>.yaml`, id `standin.<layout>`) is a layout that the embedded model fills. It has no paper
and no number but `stands_for`, the tables that are laid out so, and `stores`, folders of rows below results/tiny.

A cell whose address is not complete, or to which two parts give different values, is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from typing import Any

from mmkv_bench.config.schema import TABLES, conf_dir, options
from mmkv_bench.errors import ConfigError, nearest
from mmkv_bench.papers.address import KEYS, MEAN, STAND_IN, SYNTHETIC, Address, address, is_group, members

STAND_INS = "standin"
"""Folder of the stand-ins, and what their ids begin with."""
FIGURES = ("curves", "radar", "analysis")
KINDS = ("accuracy", "likelihood", "efficiency", "analysis")
PAPERS = {
    "mmshift": "MM-ShiftKV",
    "prefixkv": "PrefixKV",
    "flashcache": "FlashCache",
    "hybridkv": "HybridKV",
    "meda": "MEDA",
}
_TOP = (
    "caption",
    "kind",
    "cell",
    "blocks",
    "rows",
    "columns",
    "across",
    "readings",
    "together",
    "figure",
    "experiments",
    "notes",
)
_ITEM = ("label", "only", "mean", "readings")
_NAMES = ("paper", "number")
_NAMES_OF_STAND_INS = ("stands_for", "stores")


@dataclass(frozen=True)
class TableItem:
    """One row, column, block or value of `across`. `mean`: labels of columns or keys of addresses, ("all",) for all other
    columns, empty for none."""

    label: str
    parts: Mapping[str, Any]
    only: Mapping[str, Any] = field(default_factory=dict)
    mean: tuple[str | Mapping[str, Any], ...] = ()
    readings: Mapping[str, Mapping[str, Any]] | None = None


@dataclass(frozen=True)
class TableCell:
    """One cell. `across` is None where a method without a budget has one cell for all.

    address: its own; parts: of a mean, the addresses that it is a mean of. readings: name -> (address, parts) of the
    readings that were declared besides, those that change nothing left out.
    """

    block: int
    row: int
    column: int
    across: int | None
    address: Address
    parts: tuple[Address, ...] = ()
    readings: Mapping[str, tuple[Address, tuple[Address, ...]]] = field(default_factory=dict)

    @property
    def needed(self) -> tuple[Address, ...]:
        """The addresses whose numbers it is made of."""
        return self.parts or (self.address,)


@dataclass(frozen=True)
class TableLayout:
    """A table, laid out. `cells` are in the order of blocks, rows, columns and `across`. Of a stand-in `paper` and `number` are
    empty; `stands_for` names the tables that are laid out like it, `stores` folders of rows below results/tiny."""

    id: str
    paper: str
    number: str
    caption: str
    kind: str
    blocks: tuple[TableItem, ...]
    rows: tuple[TableItem, ...]
    columns: tuple[TableItem, ...]
    across: tuple[TableItem, ...]
    cells: tuple[TableCell, ...]
    together: bool = False
    notes: tuple[str, ...] = ()
    experiments: tuple[str, ...] = ()
    stands_for: tuple[str, ...] = ()
    stores: tuple[str, ...] = ()
    figure: str = ""

    @property
    def title(self) -> str:
        """`MM-ShiftKV Table 1`."""
        return "Stand-in" if self.stands_for else f"{PAPERS[self.paper]} {self.number}"

    def own(self, cell: TableCell) -> bool:
        """Whether a cell is of the paper's own method, and not of a baseline; a stand-in has no such method."""
        if self.stands_for:
            return False
        return cell.address.method.name == self.paper or cell.address.method.name.startswith(f"{self.paper}_")


def table_ids() -> tuple[str, ...]:
    """All tables and figures of the papers, sorted; no stand-in is one."""
    return options(TABLES)


def stand_in_ids() -> tuple[str, ...]:
    """All stand-ins, sorted."""
    return tuple(f"{STAND_INS}.{layout}" for layout in options(f"{TABLES}/{STAND_INS}"))


def is_stand_in(name: str) -> bool:
    """Whether an id is that of a stand-in, for which nothing is printed anywhere."""
    return name.startswith(f"{STAND_INS}.")


@cache
def load(name: str) -> TableLayout:
    """A table.

    Raises:
        ConfigError: there is none of that name, or its file says something wrong: one sentence with the file's name.
    """
    import yaml

    known = stand_in_ids() if is_stand_in(name) else table_ids()
    if name not in known:
        asked = re.sub(r"\d+$", lambda digits: digits[0].zfill(2), name)  # meda_table1
        raise ConfigError(f"there is no table {name!r}; {nearest(asked, known)}")
    file = f"{TABLES}/{name.replace('.', '/')}.yaml"
    text = (conf_dir() / file).read_text(encoding="utf-8")
    try:
        return parse(name, yaml.safe_load(text))
    except ConfigError as error:
        raise ConfigError(f"conf/{file}: {error}") from None


def parse(name: str, told: Any) -> TableLayout:
    """A table of its file's content; errors as of `load`."""
    if not isinstance(told, Mapping):
        raise ConfigError("a table's file holds keys; see mmkv_bench/papers/layout.py")
    own = _NAMES_OF_STAND_INS if is_stand_in(name) else _NAMES
    _known(told, (*own, *_TOP), "a stand-in" if is_stand_in(name) else "a table")
    for key in (*own, "caption", "kind", "rows", "columns"):
        if not told.get(key):
            raise ConfigError(f"it says nothing under {key}")
    for key, allowed in (("paper", PAPERS), ("kind", KINDS), ("figure", FIGURES)):
        if key in told and told[key] not in allowed:
            raise ConfigError(f"{key}={told[key]}; {nearest(str(told[key]), allowed)}")
    shared = told.get("cell") or {}
    _known(shared, KEYS, "cell")
    blocks, rows, columns, across = (_items(told.get(key), key) for key in ("blocks", "rows", "columns", "across"))
    spec = TableLayout(
        id=name,
        paper=told.get("paper", ""),
        number=told.get("number", ""),
        caption=told["caption"],
        kind=told["kind"],
        blocks=blocks,
        rows=rows,
        columns=columns,
        across=across,
        cells=(),
        together=bool(told.get("together")),
        notes=tuple(told.get("notes") or ()),
        experiments=tuple(told.get("experiments") or ()),
        stands_for=tuple(told.get("stands_for") or ()),
        stores=tuple(told.get("stores") or ()),
        figure=told.get("figure", ""),
    )
    spec = replace(spec, cells=tuple(_cells(spec, shared, told.get("readings") or {})))
    for one in (one for cell in spec.cells for one in cell.needed):
        if (one.model == STAND_IN) != is_stand_in(name):
            raise ConfigError(f"{one}: model {STAND_IN} is that of stand-ins and theirs alone; give another model")
    return spec


def _items(told: Any, what: str) -> tuple[TableItem, ...]:
    if told is None:
        return (TableItem("", {}),)
    if not isinstance(told, Sequence) or isinstance(told, str) or not told:
        raise ConfigError(f"{what} is no list of keys; write {what}: [{{...}}, ...]")
    return tuple(_item(one, what) for one in told)


def _item(told: Any, what: str) -> TableItem:
    if not isinstance(told, Mapping):
        raise ConfigError(f"{what} holds {told!r}; allowed: keys of an address")
    _known(told, (*KEYS, *_ITEM), f"an item of {what}")
    parts = {key: value for key, value in told.items() if key in KEYS}
    mean = told.get("mean") or ()
    mean = (mean,) if isinstance(mean, str) else tuple(mean)
    if mean and what != "columns":
        raise ConfigError(f"an item of {what} is a mean; only columns may be")
    return TableItem(str(told.get("label", _label(parts))), parts, told.get("only") or {}, mean, told.get("readings"))


def _label(parts: Mapping[str, Any]) -> str:
    """What stands at an item's edge where its file says nothing: the values of what it adds."""
    words = []
    for key, value in parts.items():
        if key == "with":
            words += [f"{name}={setting}" for name, setting in value.items()]
        elif key == "minus":
            words.append(f"minus {value['method']}")
        elif key in ("metric", "reading", "calibration") and len(parts) > 1:
            continue
        else:
            words.append(str(value))
    return " ".join(words)


def _cells(
    spec: TableLayout, shared: Mapping[str, Any], readings: Mapping[str, Mapping[str, Any]]
) -> Iterator[TableCell]:
    found: dict[tuple[int, int, int | None], list[TableCell]] = {}
    order = [column for column in range(len(spec.columns)) if not spec.columns[column].mean]
    order += [column for column in range(len(spec.columns)) if spec.columns[column].mean]
    for b, r, c, a in product(range(len(spec.blocks)), range(len(spec.rows)), order, range(len(spec.across))):
        block, row, column, across = spec.blocks[b], spec.rows[r], spec.columns[c], spec.across[a]
        where = f"row {row.label!r}, column {column.label!r}"
        parts = _merged([shared, block.parts, across.parts, column.parts, row.parts], where, bool(column.mean))
        if any(not _has(parts, item.only) for item in (block, row, column, across)):
            continue
        own = _address(parts, where)
        spans = own.method.unbudgeted and set(across.parts) <= {"budget"} and len(spec.across) > 1
        if spans and any(not _skipped(spec, shared, (b, r, c, before)) for before in range(a)):
            continue
        overlays = readings if row.readings is None else row.readings
        key = (b, r, None if spans else a)
        beside = found.setdefault(key, [])
        cell = TableCell(*key[:2], c, key[2], own, _parts(spec, parts, own, column, beside, where))
        cell = replace(cell, readings=_readings(cell, parts, overlays, beside, column, spec, where))
        beside.append(cell)
    every = [cell for beside in found.values() for cell in beside]
    if not every:
        raise ConfigError("it has no cell")
    yield from sorted(every, key=lambda cell: (cell.block, cell.row, cell.column, cell.across or 0))


def _skipped(spec: TableLayout, shared: Mapping[str, Any], place: tuple[int, int, int, int]) -> bool:
    b, r, c, a = place
    items = (spec.blocks[b], spec.rows[r], spec.columns[c], spec.across[a])
    parts = _merged([shared, *(item.parts for item in items)], "", True)
    return any(not _has(parts, item.only) for item in items)


def _parts(
    spec: TableLayout,
    parts: Mapping[str, Any],
    own: Address,
    column: TableItem,
    beside: Sequence[TableCell],
    where: str,
    reading: str | None = None,
) -> tuple[Address, ...]:
    """The addresses that a mean is of: other columns of its row, a group's datasets, or what its file lists."""
    if not column.mean:
        if own.metric != MEAN:
            return ()
        if not is_group(own.dataset):
            raise ConfigError(
                f"{where}: the metric is mean and the column says of what neither by `mean` nor by `group`"
            )
        return tuple(replace(own, dataset=dataset, metric=metric) for dataset, metric in members(own.dataset))
    labels = {spec.columns[cell.column].label: cell for cell in beside if not spec.columns[cell.column].mean}
    found: list[Address] = []
    for part in labels if column.mean == ("all",) else column.mean:
        if isinstance(part, Mapping):
            found.append(_address({**parts, **part}, where))
        elif part not in labels:
            raise ConfigError(f"{where}: it is a mean of {part!r}; {nearest(part, labels)}")
        elif labels[part].parts:
            raise ConfigError(f"{where}: it is a mean of {part!r}, which is a mean itself; list its parts")
        elif reading is not None and reading in labels[part].readings:
            found.append(labels[part].readings[reading][0])
        else:
            found.append(labels[part].address)
    return tuple(found)


def _readings(
    cell: TableCell,
    parts: Mapping[str, Any],
    overlays: Mapping[str, Mapping[str, Any]],
    beside: Sequence[TableCell],
    column: TableItem,
    spec: TableLayout,
    where: str,
) -> dict[str, tuple[Address, tuple[Address, ...]]]:
    found = {}
    for name, told in overlays.items():
        over = dict(told)
        if cell.address.method.unbudgeted or cell.address.dataset in SYNTHETIC or not _has(parts, over.pop("only", {})):
            continue
        laid = {**parts, **over, "with": {**(parts.get("with") or {}), **(over.get("with") or {})}}
        own = _address(laid, f"{where}, reading {name!r}")
        if own != cell.address:
            found[name] = (own, _parts(spec, laid, own, column, beside, where, name))
    return found


def _merged(all_parts: Sequence[Mapping[str, Any]], where: str, mean: bool) -> dict[str, Any]:
    """All parts of an address together.

    Raises:
        ConfigError: two of them give a key different values.
    """
    found: dict[str, Any] = {}
    for parts in all_parts:
        for key, value in parts.items():
            old = found.get(key)
            if key == "with" and old is not None:
                twice = {name for name in {*old} & {*value} if old[name] != value[name]}
                if twice:
                    raise ConfigError(f"{where}: two parts give {min(twice)} different values")
                value = {**old, **value}
            elif old is not None and old != value:
                raise ConfigError(f"{where}: two parts give {key} different values, {old} and {value}")
            found[key] = value
    if mean and not {"dataset", "group"} & {*found}:
        found |= {"dataset": "avg", "metric": MEAN}
    return found


def _address(parts: Mapping[str, Any], where: str) -> Address:
    try:
        return address(parts)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _has(parts: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    return all(parts.get(key) in (value if isinstance(value, list) else [value]) for key, value in wanted.items())


def _known(told: Mapping[str, Any], allowed: Sequence[str], what: str) -> None:
    for key in told:
        if key not in allowed:
            raise ConfigError(f"{what} has no key {key!r}; {nearest(str(key), allowed)}")
