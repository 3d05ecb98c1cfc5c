"""Layouts of the papers' tables and figures, read from `conf/table/<id>.yaml`.

The address (`address.KEYS`) of a table cell has the keys of its block, row, column and value of `across`. The file's keys:

    paper, number, caption, kind       kind: accuracy, likelihood, efficiency or analysis
    cell: {model: ..., reading: ...}   keys of the addresses of all cells
    blocks: [{model: ...}, ...]        parts of the table, each with all rows
    rows, columns: [{method: ...}]     keys of addresses, and:
        label: text                    heading of the row or column
        only: {model: ...}             only cells whose address has these values
        mean: all | [labels]           (columns) mean of all other columns, or of the named ones; keys of an address instead of
                                       a label stand for a number without a column
        readings: {name: {...}}        (rows) replaces the table's readings
    across: [{budget: 64}, ...]        splits every column; a method without a budget has one cell for all values
    readings: {name: {...}}            further readings of the paper: keys that replace those of a cell (not for timed passes)
    together: true                     prints the columns of one budget in one cell ("PPL / ROUGE")
    figure: curves | radar | analysis  kind of picture (papers/figure.py)
    experiments: [name]                files of conf/experiment/papers, and efficiency_* of conf/experiment, that run the cells
    notes: [text]

A stand-in (`conf/table/standin/<layout>.yaml`, id `standin.<layout>`) is a layout filled by the embedded model. Instead of paper
and number it has `stands_for`, the tables with this layout, and `stores`, folders of rows below results/tiny.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from typing import Any

from mmkv_bench.config.files import TABLES, conf_dir, options
from mmkv_bench.config.files import TITLES as PAPERS
from mmkv_bench.declared import read_yaml
from mmkv_bench.errors import ConfigError, nearest
from mmkv_bench.papers.address import KEYS, MEAN, STAND_IN, SYNTHETIC, Address, address, is_group, members

STAND_INS = "standin"
"""Folder of stand-ins, and prefix of their ids."""
FIGURES = ("curves", "radar", "analysis")
KINDS = ("accuracy", "likelihood", "efficiency", "analysis")
_LISTS = ("notes", "experiments", "stands_for", "stores")
_KEYS = (
    *("caption", "kind", "cell", "blocks", "rows", "columns", "across", "readings", "together", "figure"),
    *("experiments", "notes"),
)


@dataclass(frozen=True)
class TableItem:
    """A row, column, block or value of `across`.

    parts: keys for the addresses of the item's cells. only: values that the addresses of the item's cells must have.
    mean: numbers that a column averages: labels of columns or keys of addresses; ("all",): all other columns; (): no mean.
    readings: further readings instead of the table's; None: the table's.
    """

    label: str
    parts: Mapping[str, Any]
    only: Mapping[str, Any] = field(default_factory=dict)
    mean: tuple[str | Mapping[str, Any], ...] = ()
    readings: Mapping[str, Mapping[str, Any]] | None = None


@dataclass(frozen=True)
class TableCell:
    """A cell of a layout.

    block, row, column, across: positions in the layout's lists. across: None for a method without a budget, whose cell covers
        all values of `across`.
    address: address of the number. parts: for a mean, addresses of the averaged numbers.
    readings: name of a further reading -> (address, parts); only for readings that change the address.
    """

    block: int
    row: int
    column: int
    across: int | None
    address: Address
    parts: tuple[Address, ...] = ()
    readings: Mapping[str, tuple[Address, tuple[Address, ...]]] = field(default_factory=dict)

    @property
    def needed_addresses(self) -> tuple[Address, ...]:
        """Addresses of the numbers from which the cell is computed."""
        return self.parts or (self.address,)


@dataclass(frozen=True)
class TableLayout:
    """Layout of a paper's table, or of a stand-in. cells: in the order of blocks, rows, columns and `across`."""

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
    figure: str = ""
    notes: tuple[str, ...] = ()
    experiments: tuple[str, ...] = ()
    stands_for: tuple[str, ...] = ()
    stores: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """Title, such as `MM-ShiftKV Table 1`."""
        return "Stand-in" if self.stands_for else f"{PAPERS[self.paper]} {self.number}"

    def proposes(self, cell: TableCell) -> bool:
        """Return True if a cell is of the method that the paper proposes; False for baselines and in stand-ins."""
        name = cell.address.method.name
        return not self.stands_for and (name == self.paper or name.startswith(f"{self.paper}_"))

    def labels(self, cell: TableCell) -> dict[str, str]:
        """Return `block`, `row`, `column` and `across` -> label of the cell's item; "" if `across` is None."""
        items = self.blocks[cell.block], self.rows[cell.row], self.columns[cell.column]
        across_label = "" if cell.across is None else self.across[cell.across].label
        return dict(
            zip(("block", "row", "column", "across"), (*(item.label for item in items), across_label), strict=True)
        )

    @property
    def needed_addresses(self) -> list[Address]:
        """Addresses of all numbers from which the table is computed, also under further readings."""
        readings = [parts or (at,) for cell in self.cells for at, parts in cell.readings.values()]
        return [one for each in (*(cell.needed_addresses for cell in self.cells), *readings) for one in each]


def table_ids() -> tuple[str, ...]:
    """Return the ids of all tables and figures of the papers, sorted."""
    return options(TABLES)


def stand_in_ids() -> tuple[str, ...]:
    """Return the ids of all stand-ins (filled by the embedded model), sorted."""
    return tuple(f"{STAND_INS}.{layout}" for layout in options(f"{TABLES}/{STAND_INS}"))


def is_stand_in(name: str) -> bool:
    """Return True if `name` is the id of a stand-in."""
    return name.startswith(f"{STAND_INS}.")


@cache
def load(name: str) -> TableLayout:
    """Return the layout of a table or stand-in. name: id.

    Raises:
        ConfigError: unknown id, or a mistake in the file.
    """
    names = stand_in_ids() if is_stand_in(name) else table_ids()
    if name not in names:
        raise ConfigError(f"there is no table {name!r}; {nearest(name, names)}; `mmkv-bench papers --list` lists them")
    file = f"{TABLES}/{name.replace('.', '/')}.yaml"
    text = (conf_dir() / file).read_text(encoding="utf-8")
    try:
        return parse(name, read_yaml(text))
    except ConfigError as error:
        raise ConfigError(f"conf/{file}: {error}") from None


def parse(name: str, content: Any) -> TableLayout:
    """Return the layout in a file. name: id of the table. content: parsed file.

    Raises:
        ConfigError: a mistake in the file, such as an incomplete address or contradictory keys.
    """
    if not isinstance(content, Mapping):
        raise ConfigError("a table's file must be a mapping of keys; see mmkv_bench/papers/layout.py")
    names = ("stands_for", "stores") if is_stand_in(name) else ("paper", "number")
    _check_keys(content, (*names, *_KEYS), "a stand-in" if is_stand_in(name) else "a table")
    for key in (*names, "caption", "kind", "rows", "columns"):
        if not content.get(key):
            raise ConfigError(f"the key {key} is missing or empty")
    for key, allowed in (("paper", PAPERS), ("kind", KINDS), ("figure", FIGURES)):
        if key in content and content[key] not in allowed:
            raise ConfigError(f"{key}={content[key]} is not allowed; {nearest(str(content[key]), allowed)}")
    shared_keys = content.get("cell") or {}
    _check_keys(shared_keys, KEYS, "cell")
    text_fields = {key: content.get(key, "") for key in ("paper", "number", "caption", "kind", "figure")}
    item_fields: dict[str, Any] = {
        key: _items(content.get(key), key) for key in ("blocks", "rows", "columns", "across")
    }
    list_fields: dict[str, Any] = {key: tuple(content.get(key) or ()) for key in _LISTS}
    layout = TableLayout(
        id=name, cells=(), together=bool(content.get("together")), **text_fields, **item_fields, **list_fields
    )
    layout = replace(layout, cells=tuple(_cells(layout, shared_keys, content.get("readings") or {})))
    for one in (one for cell in layout.cells for one in cell.needed_addresses):
        if (one.model == STAND_IN) != is_stand_in(name):
            raise ConfigError(
                f"{one}: only stand-in tables may use model {STAND_IN}, and they may use no other; give another model"
            )
    return layout


def _items(content: Any, what: str) -> tuple[TableItem, ...]:
    if content is None:
        return (TableItem("", {}),)
    if not isinstance(content, list) or not content or not all(isinstance(one, Mapping) for one in content):
        raise ConfigError(f"{what} is not a list of mappings; write {what}: [{{...}}, ...]")
    items = []
    for one in content:
        _check_keys(one, (*KEYS, "label", "only", "mean", "readings"), f"an item of {what}")
        selection, mean_labels = {key: value for key, value in one.items() if key in KEYS}, one.get("mean") or ()
        if mean_labels and what != "columns":
            raise ConfigError(f"an item of {what} has the key mean, which only columns may have; remove it")
        mean_labels = (mean_labels,) if isinstance(mean_labels, str) else tuple(mean_labels)
        label = str(one.get("label", _label(selection)))
        items.append(TableItem(label, selection, one.get("only") or {}, mean_labels, one.get("readings")))
    return tuple(items)


def _label(parts: Mapping[str, Any]) -> str:
    """Return the label of an item whose file gives none. parts: as in `TableItem`."""
    label_parts = []
    for key, value in parts.items():
        if key == "with":
            label_parts += [f"{name}={setting}" for name, setting in value.items()]
        elif key == "minus":
            label_parts.append(f"minus {value['method']}")
        elif key not in ("metric", "reading", "calibration") or len(parts) == 1:
            label_parts.append(str(value))
    return " ".join(label_parts)


def _cells(
    layout: TableLayout, shared: Mapping[str, Any], readings: Mapping[str, Mapping[str, Any]]
) -> Iterator[TableCell]:
    cells_by_row: dict[tuple[int, int, int | None], list[TableCell]] = {}
    columns = sorted(range(len(layout.columns)), key=lambda c: bool(layout.columns[c].mean))  # means last
    for b, r, c, a in product(range(len(layout.blocks)), range(len(layout.rows)), columns, range(len(layout.across))):
        row, column, across = layout.rows[r], layout.columns[c], layout.across[a]
        items = (layout.blocks[b], across, column, row)
        try:
            keys = _merge_keys([shared, *(item.parts for item in items)], bool(column.mean))
            if not all(_has(keys, item.only) for item in items):
                continue
            cell_address = address(keys)
            spans_columns = cell_address.method.unbudgeted and {*across.parts} <= {"budget"} and len(layout.across) > 1
            row_cells = cells_by_row.setdefault((b, r, None if spans_columns else a), [])
            if spans_columns and any(cell.column == c for cell in row_cells):
                continue
            cell = TableCell(
                b,
                r,
                c,
                None if spans_columns else a,
                cell_address,
                _parts(layout, keys, cell_address, column, row_cells),
            )
            overlays = readings if row.readings is None else row.readings
            row_cells.append(replace(cell, readings=_readings(layout, cell, keys, overlays, row_cells)))
        except ConfigError as error:
            raise ConfigError(f"row {row.label!r}, column {column.label!r}: {error}") from None
    cells = [cell for row_cells in cells_by_row.values() for cell in row_cells]
    if not cells:
        raise ConfigError("the table has no cell; check the keys `only` of its items")
    yield from sorted(cells, key=lambda cell: (cell.block, cell.row, cell.column, cell.across or 0))


def _parts(
    layout: TableLayout,
    keys: Mapping[str, Any],
    at: Address,
    column: TableItem,
    row: Sequence[TableCell],
    reading: str = "",
) -> tuple[Address, ...]:
    """Return the addresses whose numbers a cell averages; () if the cell is no mean.

    Args:
        keys, at: keys and address of the cell.
        column: column of the cell.
        row: cells of the same row; a mean over columns averages their numbers.
        reading: name of another version of the methods' rules (`paper` or `released`); "": the version of the table.
    """
    if not column.mean:
        if at.metric != MEAN:
            return ()
        if not is_group(at.dataset):
            raise ConfigError("metric=mean needs the key `mean` or `group`")
        return tuple(replace(at, dataset=dataset, metric=metric) for dataset, metric in members(at.dataset))
    by_label = {layout.columns[cell.column].label: cell for cell in row if not layout.columns[cell.column].mean}
    addresses: list[Address] = []
    for part in by_label if column.mean == ("all",) else column.mean:
        if isinstance(part, Mapping):
            addresses.append(address({**keys, **part}))
        elif part not in by_label:
            raise ConfigError(f"mean of {part!r}: there is no such column; {nearest(part, by_label)}")
        elif by_label[part].parts:
            raise ConfigError(f"mean of {part!r}: this column is a mean itself; list its parts instead")
        else:
            addresses.append(by_label[part].readings.get(reading, (by_label[part].address,))[0])
    return tuple(addresses)


def _readings(
    layout: TableLayout,
    cell: TableCell,
    keys: Mapping[str, Any],
    overlays: Mapping[str, Mapping[str, Any]],
    row: Sequence[TableCell],
) -> dict[str, tuple[Address, tuple[Address, ...]]]:
    readings = {}
    for name, overlay in overlays.items():
        changed_keys = dict(overlay)
        is_timed = cell.address.dataset in SYNTHETIC
        if cell.address.method.unbudgeted or is_timed or not _has(keys, changed_keys.pop("only", {})):
            continue
        merged_keys = {**keys, **changed_keys, "with": {**(keys.get("with") or {}), **(changed_keys.get("with") or {})}}
        try:
            reading_address = address(merged_keys)
        except ConfigError as error:
            raise ConfigError(f"reading {name!r}: {error}") from None
        if reading_address != cell.address:
            readings[name] = (
                reading_address,
                _parts(layout, merged_keys, reading_address, layout.columns[cell.column], row, name),
            )
    return readings


def _merge_keys(all_parts: Sequence[Mapping[str, Any]], mean: bool) -> dict[str, Any]:
    """Merge the keys that table, block, row, column and `across` give for a cell.

    mean: True for a cell of a mean, which has the data set `avg` and the metric `mean` if no data set is given.

    Raises:
        ConfigError: a key has two values.
    """
    merged_keys: dict[str, Any] = {}
    for parts in all_parts:
        for key, value in parts.items():
            earlier_value = merged_keys.get(key)
            if key == "with" and earlier_value is not None:
                contradicted_keys = {name for name in {*earlier_value} & {*value} if earlier_value[name] != value[name]}
                if contradicted_keys:
                    raise ConfigError(f"two parts give {min(contradicted_keys)} different values; give one")
                value = {**earlier_value, **value}
            elif earlier_value is not None and earlier_value != value:
                raise ConfigError(f"two parts give {key} different values, {earlier_value} and {value}; give one")
            merged_keys[key] = value
    if mean and not {"dataset", "group"} & {*merged_keys}:
        merged_keys |= {"dataset": "avg", "metric": MEAN}
    return merged_keys


def _has(parts: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    return all(parts.get(key) in (value if isinstance(value, list) else [value]) for key, value in wanted.items())


def _check_keys(content: Mapping[str, Any], allowed: Sequence[str], what: str) -> None:
    for key in content:
        if key not in allowed:
            raise ConfigError(f"{what} has no key {key!r}; {nearest(str(key), allowed)}")
