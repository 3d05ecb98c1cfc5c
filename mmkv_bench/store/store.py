"""The result store: rows of a run on disk, safe against kill -9 at any moment, many writers and readers at once.

Under the root: `journal/` (samples not yet in a part), `responses/` (one part per published journal), `cells/`,
`samples/` and `metrics/` (one file per cell; one per table once packed), and `store.json` with the schema version.
Nothing is made before the first write.

Why no row is lost or counted twice: a sample is durable in a journal before `commit` returns; a journal is removed only
after its part is durable; a part carries its journal's name, so publishing again after a crash replaces it by the same
rows; and readers look at the journals first and at the parts after, and keep the newest row per cell and sample.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from mmkv_bench.errors import ConfigError, StoreError, nearest
from mmkv_bench.secrecy import REDACTED, without_secrets
from mmkv_bench.store import journal, parts, repack, together
from mmkv_bench.store.files import Staged, check_folder, disk_errors, remove_stale, sync_folder, write_whole
from mmkv_bench.store.identity import canonical_json
from mmkv_bench.store.packing import is_packed
from mmkv_bench.store.redaction import redact
from mmkv_bench.store.rows import check, safe_name, to_table
from mmkv_bench.store.schema import CELL_COLUMNS, FAILURES, RESPONSES, SCHEMA_VERSION, SCHEMAS
from mmkv_bench.store.writer import Writer

log = logging.getLogger(__name__)

_MARK = "store.json"


class Store:
    """All rows under one folder. Reading and writing may be mixed freely by any number of processes."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)
        self._latest: datetime | None = (
            None  # newest commit time seen; later commits of this process are stamped after it
        )
        self._warned: set[Path] = set()
        self.unchecked: set[Path] = set()
        """Files read so far that carry no checksum, written by older versions: damage to their values is not noticed."""

    # Before work

    def check_writable(self, need_bytes: int = 64 << 20) -> None:
        """Raises ConfigError unless rows can be written here; StoreError if the store is of another schema version."""
        check_folder(self.root, need_bytes)
        self._check_version()

    def recover(self) -> int:
        """Publishes the journals of processes that are gone; returns how many samples they held.

        Optional housekeeping at the start of a run: unpublished journals are read by everybody anyway. Safe while other
        processes write, publish or recover.
        """
        self._check_version()
        samples = 0
        with disk_errors("recovering result rows", self.root):
            self._remove_stale()
            for path in self.journals():
                lock = journal.claim(path)
                if lock is None:
                    continue
                try:
                    samples += self.publish_journal(path)
                finally:
                    os.close(lock)
        return samples

    # Responses

    def writer(self, worker: str, publish_every: int = 256) -> Writer:
        """A context manager with a journal of its own; `worker` names it (letters, digits, '.', '_', '-').

        A part is published every `publish_every` samples and at the end.
        """
        return Writer(self, safe_name("worker", worker), publish_every)

    def done(self, cells: Iterable[str], retry: Collection[str] = ()) -> dict[str, set[str]]:
        """Per cell, the ids of the samples that have a row; rows with a status in `retry` do not count.

        Raises ConfigError when `retry` names anything but a failure status.
        """
        for status in retry:
            if status not in FAILURES:
                raise ConfigError(f"retry={status!r} is not a failure status; {nearest(str(status), FAILURES)}")
        done: dict[str, set[str]] = {cell: set() for cell in cells}
        rows = self.responses(done, ("cell", "sample_id", "status"))
        for cell, sample, status in zip(*(rows[name].to_pylist() for name in rows.column_names), strict=True):
            if status not in retry:
                done[cell].add(sample)
        return done

    def responses(self, cells: Iterable[str] | None = None, columns: Iterable[str] | None = None) -> pa.Table:
        """Response rows, one per cell and sample (the newest), sorted by both; all cells and columns unless given."""
        self._check_version()
        cells = None if cells is None else set(cells)
        asked = RESPONSES.names if columns is None else _known("responses", columns)
        needed = list(dict.fromkeys([*asked, "cell", "sample_id", "committed_at"]))
        # Journals first: one that is published between the two reads is then seen twice, not never.
        pending = [row for rows in self._pending() for row in rows if cells is None or row["cell"] in cells]
        published = self._read("responses", lambda: self.files("responses"), needed, cells)
        rows = parts.newest(pa.concat_tables([published, to_table("responses", pending, needed)]))
        if rows.num_rows:
            newest = pc.max(rows["committed_at"]).as_py()
            self._latest = max(self._latest or newest, newest)
        return rows.select(asked)

    def journal_damage(self) -> dict[str, int]:
        """Journals of dead writers that end in a torn line: file name -> bytes dropped, of no acknowledged sample."""
        damage = {}
        for path in self.journals():
            try:
                torn = journal.read(path).torn
            except FileNotFoundError:
                continue
            if torn and not journal.in_use(path):
                damage[path.name] = torn
        return damage

    # Cells and scores: one file per cell

    def write_cells(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Stores cells that are not stored yet; a cell that is keeps its first row.

        Secrets in `config`, `model`, `parameters` and `generation` are redacted; the cell's hash, which the caller made,
        covers what they are. Raises StoreError when a stored cell of the same hash differs in a column
        that the hash covers.
        """
        self._check_version()
        stamps = {"schema_version": SCHEMA_VERSION, "created_at": datetime.now(UTC)}
        checked = [check("cells", row, stamps) for row in rows]
        known = {row["cell"]: row for row in self.load("cells", [row["cell"] for row in checked]).to_pylist()}
        for row in checked:
            row |= _hidden(row)
            if row["cell"] in known:
                _refuse_other(known[row["cell"]], row, self.root)
                continue
            known[row["cell"]] = row
            self.prepare()
            with disk_errors("writing a cell", self.root):
                write_whole(self.file("cells", row["cell"]), parts.parquet(to_table("cells", [row])))

    def cells(self, cells: Iterable[str] | None = None) -> pa.Table:
        """Cell rows, of all cells unless given."""
        return self.load("cells", cells)

    def forget_scores(self, samples: Mapping[str, Collection[str]]) -> None:
        """Drops the scores of samples (cell -> ids) whose answers are about to be made again, so that the new ones are
        scored wherever a run ends before. What the cells' metrics say stands until then."""
        for cell, ids in samples.items():
            stored = self.samples([cell])
            kept = stored.filter(pc.invert(pc.is_in(stored["sample_id"], pa.array(sorted(ids), pa.string()))))
            if kept.num_rows < stored.num_rows:
                rows = (table.drop_columns(["schema_version"]).to_pylist() for table in (kept, self.metrics([cell])))
                self.write_scores(cell, *rows)

    def write_scores(
        self, cell: str, samples: Iterable[Mapping[str, Any]], metrics: Iterable[Mapping[str, Any]]
    ) -> None:
        """Replaces the cell's sample and metric rows. After a crash in between the cell has no metrics, not old ones."""
        self._check_version()
        stamps = {"schema_version": SCHEMA_VERSION}
        tables = {}
        for table, rows, key in (("samples", samples, ("sample_id", "metric")), ("metrics", metrics, ("metric",))):
            checked = [check(table, row, stamps) for row in rows]
            seen: set[tuple[str, ...]] = set()
            for row in checked:
                if row["cell"] != cell:
                    raise StoreError(f"{table}: column 'cell' is {row['cell']!r} in the scores of cell {cell!r}")
                identity = tuple(row[name] for name in key)
                if identity in seen:
                    raise StoreError(
                        f"{table}: two rows of cell {cell!r} with the same {' and '.join(key)}: {identity}"
                    )
                seen.add(identity)
            tables[table] = to_table(table, checked)
        if self._held_together(pa.array([cell])):  # which would count before the cell's own files
            self._write_together(tables, {cell})
            return
        self.prepare()
        with disk_errors("writing scores", self.root):
            staged: list[Staged] = []
            try:
                for table, rows in tables.items():
                    staged.append(Staged(self.file(table, cell), parts.parquet(rows)))
                self.file("metrics", cell).unlink(missing_ok=True)
                sync_folder(self.root / "metrics")
                for file in staged:
                    file.place()
            finally:
                for file in staged:
                    file.drop()

    def write_scores_of(self, samples: pa.Table, metrics: pa.Table) -> None:
        """Replaces the sample and metric rows of all cells that are in `samples`; columns as in the schema, without
        `schema_version`. Many cells are written in one file per table (see `together.py`).

        Raises StoreError for rows against the schema and for metrics of other cells.
        """
        self._check_version()
        tables = {"samples": together.checked("samples", samples), "metrics": together.checked("metrics", metrics)}
        cells = tables["samples"]["cell"].unique()
        if not pc.all(pc.is_in(tables["metrics"]["cell"], value_set=cells), min_count=0).as_py():
            raise StoreError("metrics: rows of a cell that has no samples")
        if len(cells) <= together.APART and not self._held_together(cells):
            for cell in cells.to_pylist():
                rows = (tables[name].filter(pc.equal(tables[name]["cell"], cell)) for name in ("samples", "metrics"))
                self.write_scores(cell, *(own.drop_columns(["schema_version"]).to_pylist() for own in rows))
            return
        self._write_together(tables, set(cells.to_pylist()))

    def _write_together(self, tables: Mapping[str, pa.Table], cells: set[str]) -> None:
        """cells: all whose rows are replaced; where one has no row left, those of the others are written again."""
        self.prepare(unpack=False)
        with disk_errors("writing scores", self.root):
            if cells - set(tables["samples"]["cell"].unique().to_pylist()):
                others = together.files(self.root, "samples")
                held = {
                    cell
                    for path in others
                    for cell in self._read_one("samples", path, ["cell"], None)["cell"].to_pylist()
                }
                kept = {name: self.load(name, held - cells) for name in tables}
                tables = {name: pa.concat_tables([kept[name], rows]) for name, rows in tables.items()}
                cells = cells | held
            together.write(self.root, tables, cells)

    def samples(self, cells: Iterable[str] | None = None, columns: Sequence[str] | None = None) -> pa.Table:
        """Metric values per sample, of all scored cells and all columns unless given."""
        return self.load("samples", cells, columns)

    def metrics(self, cells: Iterable[str] | None = None, columns: Sequence[str] | None = None) -> pa.Table:
        """Metrics per cell, of all scored cells and all columns unless given."""
        return self.load("metrics", cells, columns)

    # For Writer and repack

    def prepare(self, unpack: bool = True) -> None:
        """Makes the folders and the version mark before the first write; refuses a store of another version."""
        with disk_errors("preparing the result folder", self.root):
            for folder in ("journal", *SCHEMAS):
                (self.root / folder).mkdir(parents=True, exist_ok=True)
            if not (self.root / _MARK).exists():
                text = json.dumps({"schema_version": SCHEMA_VERSION}).encode() + b"\n"
                write_whole(self.root / _MARK, lambda stream: stream.write(text))
        self._check_version()
        if unpack:
            self.unpack()

    def publish_journal(self, path: Path) -> int:
        """Turns a journal that this process holds into a part and removes it; returns its number of samples."""
        content = journal.read(path)
        if content.records:
            rows = [row for record in content.records for row in _rows(path, record)]
            write_whole(self.root / "responses" / f"{path.stem}.parquet", parts.parquet(to_table("responses", rows)))
        if content.torn:
            log.warning("%s: dropped a torn last line of %d bytes; its sample is generated again", path, content.torn)
        path.unlink()
        sync_folder(path.parent)
        return len(content.records)

    def next_time(self) -> datetime:
        """Now, but after every commit this process has seen: the newest row wins also where clocks disagree."""
        now = datetime.now(UTC)
        if self._latest is not None:
            now = max(now, self._latest + timedelta(microseconds=1))
        self._latest = now
        return now

    # Inside

    def _check_version(self) -> None:
        path = self.root / _MARK
        try:
            found = json.loads(path.read_bytes())["schema_version"]
        except FileNotFoundError:
            return
        except (ValueError, TypeError, KeyError, OSError) as problem:
            raise StoreError(
                f"{path} is not the mark of a result store ({problem}). Use another result folder."
            ) from None
        if found != SCHEMA_VERSION:
            parts.refuse_version(self.root, found)

    def file(self, table: str, cell: str) -> Path:
        return self.root / table / f"{safe_name('cell', cell)}.parquet"

    def files(self, table: str) -> list[Path]:
        return [path for path in (self.root / table).glob("*.parquet") if not path.name.startswith(".")]

    def _read(self, table: str, list_files: Callable[[], list[Path]], *which: Any) -> pa.Table:
        warned = bool(self.unchecked)
        rows = parts.load(table, list_files, *which, unchecked=self.unchecked)
        if self.unchecked and not warned:
            log.warning(
                "%s holds files without checksums, written by an older version: damage to them would not be noticed. "
                "`python -m mmkv_bench.store.pack %s` writes them with checksums.",
                self.root,
                self.root,
            )
        return rows

    def load(self, table: str, cells: Iterable[str] | None, columns: Sequence[str] | None = None) -> pa.Table:
        """What is written together counts before a cell's own file, that before a packed one, and the first packed file that
        has the cell before later ones."""
        self._check_version()
        cells = None if cells is None else set(cells)
        asked = SCHEMAS[table].names if columns is None else _known(table, columns)
        names = list(dict.fromkeys([*asked, "cell"]))
        while True:
            newer, packed = together.files(self.root, table), self.packed(table)
            found = [self._read_one(table, path, names, cells) for path in newer]
            found.append(self._read(table, lambda: self._own_files(table, cells), names))
            found += [self._read_one(table, path, names, cells) for path in packed]
            if (together.files(self.root, table), self.packed(table)) == (newer, packed):
                break  # otherwise somebody packed, unpacked or wrote meanwhile
        rows = found[0]
        for others in found[1:]:
            known = pc.is_in(others["cell"], value_set=rows["cell"].unique())
            rows = pa.concat_tables([rows, others.filter(pc.invert(known))])
        return rows.select(asked)

    def _read_one(self, table: str, path: Path, names: Sequence[str], cells: Collection[str] | None) -> pa.Table:
        """The rows of a file, none where it is gone."""
        return self._read(table, lambda: [path] if path.exists() else [], names, cells)

    def _held_together(self, cells: pa.Array) -> bool:
        """Whether a file of many cells holds one of these."""
        found = [self._read_one("samples", path, ["cell"], None) for path in together.files(self.root, "samples")]
        return any(pc.any(pc.is_in(rows["cell"], value_set=cells)).as_py() for rows in found)

    def _own_files(self, table: str, cells: set[str] | None) -> list[Path]:
        if cells is None:
            return [path for path in self.files(table) if not is_packed(path) and not together.is_together(path)]
        return [path for path in (self.file(table, cell) for cell in cells) if path.exists()]

    def packed(self, table: str) -> list[Path]:
        return sorted(path for path in self.files(table) if is_packed(path))

    def unpack(self) -> None:
        """One file per cell again, as writing needs it. Whatever is interrupted, no row is missing or double."""
        if any(self.packed(table) for table in ("cells", "samples", "metrics")):
            repack.unpack(self)

    def pack(self, slim: bool = False) -> int:
        """Few large files per table instead of one per cell or part: small enough to publish. Reading is the same; the
        next write unpacks. See `repack.pack`."""
        self._check_version()
        self._remove_stale()
        return repack.pack(self, slim)

    def _remove_stale(self) -> None:
        for folder in (".", "journal", *SCHEMAS):
            remove_stale(self.root / folder)

    def journals(self) -> list[Path]:
        return sorted((self.root / "journal").glob("*.jsonl"))

    def _pending(self) -> Iterable[list[dict[str, Any]]]:
        """The rows of every sample that is still in a journal."""
        for path in self.journals():
            try:
                content = journal.read(path)
            except FileNotFoundError:
                continue
            if content.torn and path not in self._warned and not journal.in_use(path):
                self._warned.add(path)
                log.warning("%s: ignored a torn last line of %d bytes (its writer was killed)", path, content.torn)
            yield from (_rows(path, record) for record in content.records)


def _known(table: str, columns: Iterable[str]) -> list[str]:
    names = list(columns)
    for name in names:
        if name not in SCHEMAS[table].names:
            raise StoreError(f"{table}: unknown column {name!r}; {nearest(str(name), SCHEMAS[table].names)}")
    return names


def _rows(path: Path, record: Mapping[str, Any]) -> list[dict[str, Any]]:
    if record["schema_version"] != SCHEMA_VERSION:
        parts.refuse_version(path, record["schema_version"])
    return record["rows"]


def _hidden(row: Mapping[str, Any]) -> dict[str, str]:
    """The columns that hold what a user wrote, without secrets; those that have none stay as they are, to the letter."""
    shown = {"config": canonical_json(redact(json.loads(row["config"]))), "model": without_secrets(row["model"])}
    for name in ("parameters", "generation"):
        value = json.loads(row[name])
        if (hidden := without_secrets(value)) != value:
            shown[name] = canonical_json(hidden)
    return shown


def _refuse_other(stored: Mapping[str, Any], row: Mapping[str, Any], root: Path) -> None:
    for column in CELL_COLUMNS:
        old, new = stored[column.name], row[column.name]
        if REDACTED in f"{old}{new}":  # in one of them, which need not have known the same secrets
            continue
        if column.identity and (json.loads(old) != json.loads(new) if column.json else old != new):
            raise StoreError(
                f"cell {row['cell']} under {root} was stored with {column.name} {old!r}; now it is {new!r}. "
                "Rows of the two must not mix: use another result folder, or go back to what it was."
            )
