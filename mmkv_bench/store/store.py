"""The result store: rows of a run on disk, safe against kill -9 at any moment, many writers and readers at once.

Under the root: `journal/` (samples not yet in a part), `responses/` (one part per published journal), `cells/`,
`samples/` and `metrics/` (which of their files count: `layers.py`), `timings/` (one file per pass), `diagnostics/` (one per
sample and analysis), `store.json` with the schema version, and perhaps `.index/`, a cache (`index.py`). Nothing is made
before the first write.

Why no row is lost or counted twice: a sample is durable in a journal before `commit` returns; a journal is removed only
after its part is durable; a part carries its journal's name, so publishing again after a crash replaces it by the same
rows; and readers look at the journals first and at the parts after, and keep the newest row per cell and sample.
"""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from mmkv_bench.errors import ConfigError, StoreError, nearest
from mmkv_bench.store import diagnostics, journal, layers, parts, prompts, repack, scores, timings
from mmkv_bench.store.blocks import counted
from mmkv_bench.store.cell_rows import refuse_malformed, refuse_other, shown
from mmkv_bench.store.files import MARK, check_folder, disk_errors, lock_held, remove_stale, sync_folder, write_whole
from mmkv_bench.store.row_digests import digest_of_row, refuse_rewritten
from mmkv_bench.store.rows import check, safe_name, to_table
from mmkv_bench.store.schema import FAILURES, RESPONSES, SCHEMA_VERSION, SCHEMAS
from mmkv_bench.store.sealed import number_of_rows
from mmkv_bench.store.writer import Writer

log = logging.getLogger(__name__)


EMPTY = "%s is empty: its writer was killed before its first answer, or the file was emptied, and what it held is made again"


class Store:
    """All rows under one folder. Reading and writing may be mixed freely by any number of processes."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)
        self._latest: datetime | None = (
            None  # newest commit time seen; later commits of this process are stamped after it
        )
        self._warned: set[Path] = set()
        self.unchecked: set[Path] = set()
        """Files read so far that carry no checksum, written by older versions: damage to their values is not noticed. A store
        that was begun with checksums has none."""
        self._checksums = False

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

    def responses(
        self, cells: Iterable[str] | None = None, columns: Iterable[str] | None = None, coded: bool = False
    ) -> pa.Table:
        """Response rows, one per cell and sample (the newest), sorted by both; all cells and columns unless given. coded:
        texts as dictionaries."""
        self._check_version()
        cells = None if cells is None else set(cells)
        asked = RESPONSES.names if columns is None else _known("responses", columns)
        needed = list(dict.fromkeys([*asked, "cell", "sample_id", "committed_at"]))
        # Journals first: one that is published between the two reads is then seen twice, not never.
        pending = [row for rows in self._pending() for row in rows if cells is None or row["cell"] in cells]
        rows = self.read("responses", lambda: self.files("responses"), needed, cells, coded)
        if pending:
            rows = pa.concat_tables([rows, to_table("responses", pending, needed).cast(rows.schema)])
        rows = parts.newest(rows)
        if rows.num_rows:
            newest = pc.max(rows["committed_at"]).as_py()
            self._latest = max(self._latest or newest, newest)
        return rows.select(asked)

    def counts(self, table: str) -> dict[str, int]:
        """Cell -> how many rows of `responses` or `samples` the files hold: at most what counts, since newer rows stand beside
        those that they replace. One column of one row group at a time is in memory."""
        self._check_version()
        found: Counter[str] = Counter()
        if table == "responses":
            found.update(row["cell"] for rows in self._pending() for row in rows)
        for path in self.files(table):
            with suppress(FileNotFoundError):
                found.update(counted(path))
        return dict(found)

    def rows_in_files(self, table: str) -> int:
        """How many rows the files of a table hold, by their footers alone; those in journals are few."""
        return sum(map(number_of_rows, self.files(table)))

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

    # Cells and scores

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
            row |= shown(row)
            row["row_digest"] = digest_of_row("cells", row)
            if row["cell"] in known:
                refuse_other(known[row["cell"]], row, self.root)
                continue
            known[row["cell"]] = row
            self.prepare()
            with disk_errors("writing a cell", self.root):
                write_whole(self.file("cells", row["cell"]), parts.parquet(to_table("cells", [row])))

    def cells(
        self, cells: Iterable[str] | None = None, columns: Sequence[str] | None = None, coded: bool = False
    ) -> pa.Table:
        """Cell rows, of all cells and all columns unless given. coded: texts as dictionaries.

        Raises StoreError where a configuration is none that a run writes, or all columns are read and a row is another than
        was written.
        """
        rows = self.load("cells", cells, columns, coded)
        refuse_malformed(rows, self.root)
        if columns is None:
            refuse_rewritten("cells", rows, self.root)
        return rows

    def forget_scores(self, samples: Mapping[str, Collection[str]]) -> None:
        """Drops the scores of samples (cell -> ids) whose answers are about to be made again, so that the new ones are
        scored wherever a run ends before. What the cells' metrics say stands until then."""
        scores.forget(self, samples)

    def write_scores(
        self, cell: str, samples: Iterable[Mapping[str, Any]], metrics: Iterable[Mapping[str, Any]]
    ) -> None:
        """Replaces the cell's sample and metric rows. After a crash in between the cell has no metrics, not old ones."""
        self._check_version()
        scores.replace(self, scores.checked_rows(cell, samples, metrics), [cell])

    def write_scores_of(self, samples: pa.Table, metrics: pa.Table) -> None:
        """Replaces the sample and metric rows of all cells that are in `samples`; columns as in the schema, without
        `schema_version`. Many cells are written in one file per table (see `together.py`).

        Raises StoreError for rows against the schema and for metrics of other cells.
        """
        self.write_scores_by([samples], lambda _: metrics)

    def write_scores_by(
        self,
        blocks: Iterable[pa.Table],
        metrics_of: Callable[[pa.Table], pa.Table],
        beside: Collection[str] = (),
    ) -> None:
        """The same of more cells than memory holds: `blocks` are their `samples` rows, those of a cell in one of them.

        metrics_of gives the `metrics` rows that are made of samples rows: of some metrics all that some cells have, and those of
        the cells `beside`, which others are held against.
        """
        self._check_version()
        scores.replace_by(self, (scores.checked("samples", rows) for rows in blocks), metrics_of, beside)

    def samples(
        self,
        cells: Iterable[str] | None = None,
        columns: Sequence[str] | None = None,
        coded: bool = False,
        metrics: Collection[str] | None = None,
    ) -> pa.Table:
        """Metric values per sample, of all scored cells, all columns and all metrics unless given. coded: texts as
        dictionaries."""
        return self.load("samples", cells, columns, coded, metrics)

    def metrics(self, cells: Iterable[str] | None = None, columns: Sequence[str] | None = None) -> pa.Table:
        """Metrics per cell, of all scored cells and all columns unless given.

        Raises StoreError where all columns are read and a row is another than was written.
        """
        rows = self.load("metrics", cells, columns)
        if columns is None:
            refuse_rewritten("metrics", rows, self.root)
        return rows

    def write_timings(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Stores the rows of one pass, in the place of an earlier one of the same cell, shape and repeat."""
        self._check_version()
        stamps = {"schema_version": SCHEMA_VERSION, "committed_at": self.next_time()}
        checked = [check("timings", row, stamps) for row in rows]
        self.prepare()
        with disk_errors("writing times", self.root):
            write_whole(timings.file_of(self.root, checked), parts.parquet(to_table("timings", checked)))

    def timings(self, cells: Iterable[str] | None = None) -> pa.Table:
        """Rows of the passes of `scenario=efficiency`, of all cells unless given: the newest of each pass."""
        self._check_version()
        wanted = None if cells is None else set(cells)
        columns = SCHEMAS["timings"].names
        return timings.newest(self.read("timings", lambda: self.files("timings"), columns, wanted))

    def write_diagnostics(self, rows: pa.Table) -> Path:
        """Stores what an analysis measured of one sample, durable when it returns; returns the file.

        Args:
            rows: its columns but those that the store stamps; of several measurements where several were made together.

        Raises:
            StoreError: other columns, a null where none may be, or rows of several samples.
        """
        self._check_version()
        stamps = {"schema_version": SCHEMA_VERSION, "committed_at": self.next_time()}
        stamped = diagnostics.stamped(rows, stamps)
        self.prepare()
        path = diagnostics.file_of(self.root, stamped)
        with disk_errors("writing diagnostics", self.root):
            write_whole(path, parts.parquet(stamped))
        return path

    def diagnostics(self, coded: bool = False) -> pa.Table:
        """Rows of `mmkv-bench diagnose`, of each measurement and sample the newest. coded: texts as dictionaries."""
        self._check_version()
        names = SCHEMAS["diagnostics"].names
        return diagnostics.newest(self.read("diagnostics", lambda: self.files("diagnostics"), names, None, coded))

    def diagnosed(self, measurements: Collection[str]) -> dict[str, set[str]]:
        """Measurement -> the ids of the samples that have rows of it."""
        self._check_version()
        names = ["measurement", "sample_id"]
        rows = self.read("diagnostics", lambda: self.files("diagnostics"), names, None)
        return diagnostics.samples_of(rows, measurements)

    def prompts(self) -> pa.Table:
        """What samples ask: the newest row per prompt, sample and model."""
        self._check_version()
        pending = [
            record["prompt"] for path in self.journals() for record in self._records(path) if record.get("prompt")
        ]
        rows = self.read(prompts.TABLE, lambda: self.files(prompts.TABLE), SCHEMAS[prompts.TABLE].names, None)
        return prompts.newest(pa.concat_tables([rows, to_table(prompts.TABLE, pending)]) if pending else rows)

    # For Writer, scores and repack

    def prepare(self) -> None:
        """Makes the folders and the version mark before the first write; refuses a store of another version."""
        with disk_errors("preparing the result folder", self.root):
            for folder in ("journal", *SCHEMAS):
                (self.root / folder).mkdir(parents=True, exist_ok=True)
            if not (self.root / MARK).exists():
                text = json.dumps({"schema_version": SCHEMA_VERSION, "checksums": True}).encode() + b"\n"
                write_whole(self.root / MARK, lambda stream: stream.write(text))
        self._check_version()

    def locked(self) -> AbstractContextManager[None]:
        """Waits until nobody else replaces files of this store: for what reads files and removes them by what it read."""
        return lock_held(self.root / MARK)

    def publish_journal(self, path: Path) -> int:
        """Turns a journal that this process holds into a part and removes it; returns its number of samples."""
        content = journal.read(path)
        if content.records:
            rows = [row for record in content.records for row in _rows(path, record)]
            asked = [record["prompt"] for record in content.records if record.get("prompt")]
            if asked:  # before the answers: none is ever published without its question
                target = self.root / prompts.TABLE / f"{path.stem}.parquet"
                write_whole(target, parts.parquet(to_table(prompts.TABLE, asked)))
            write_whole(self.root / "responses" / f"{path.stem}.parquet", parts.part(to_table("responses", rows)))
        if not content.records and not content.torn:
            log.warning(EMPTY, path)
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
        path = self.root / MARK
        try:
            mark = json.loads(path.read_bytes())
            found, self._checksums = mark["schema_version"], mark.get("checksums") is True
        except FileNotFoundError:
            if any(next((self.root / table).glob("*.parquet"), None) for table in SCHEMAS):
                raise StoreError(
                    f"{self.root} has rows and no {MARK}, which comes last: it was fetched or copied in part. Run the same "
                    "fetch again, which gets what is missing, or copy the folder again"
                ) from None
            return
        except (ValueError, TypeError, KeyError, AttributeError, OSError) as problem:
            raise StoreError(
                f"{path} is not the mark of a result store ({problem}). Use another result folder."
            ) from None
        if found != SCHEMA_VERSION:
            parts.refuse_version(self.root, found)

    def file(self, table: str, cell: str) -> Path:
        return layers.own_file(self.root, table, cell)

    def files(self, table: str) -> list[Path]:
        return layers.files(self.root, table)

    def read(
        self,
        table: str,
        list_files: Callable[[], list[Path]],
        columns: Sequence[str],
        cells: Collection[str] | None,
        coded: bool = False,
        metrics: Collection[str] | None = None,
    ) -> pa.Table:
        """`parts.load`, with a warning about files that carry no checksums."""
        with self._telling_unchecked():
            return parts.load(table, list_files, columns, cells, self.unchecked, coded, metrics)

    def read_file(self, table: str, path: Path, columns: Sequence[str], coded: bool = False) -> pa.Table:
        """The rows of one file. Raises FileNotFoundError where it is gone, StoreError where it is damaged."""
        self._check_version()
        with self._telling_unchecked():
            return parts.read_file(path, parts.of_columns(table, columns, coded), None, self.unchecked)

    def read_by_group(self, table: str, path: Path) -> Iterator[pa.Table]:
        """The same in all columns, one row group after the other: of a large file all rows fit into no memory."""
        self._check_version()
        with self._telling_unchecked():
            yield from parts.read_by_group(path, SCHEMAS[table], self.unchecked)

    @contextmanager
    def _telling_unchecked(self) -> Iterator[None]:
        warned = bool(self.unchecked)
        yield
        if self.unchecked and self._checksums:
            raise StoreError(
                f"{min(self.unchecked)} carries no checksum, and every file that this store was begun with does: another program "
                "wrote it. Restore it from a copy, or move it away: what only it holds is then made again"
            )
        if self.unchecked and not warned:
            log.warning(
                "%s holds files without checksums, written by an older version: damage to them would not be noticed. "
                "`python -m mmkv_bench pack %s` writes them with checksums.",
                self.root,
                self.root,
            )

    def load(
        self,
        table: str,
        cells: Iterable[str] | None,
        columns: Sequence[str] | None = None,
        coded: bool = False,
        metrics: Collection[str] | None = None,
    ) -> pa.Table:
        """Rows of `cells`, `samples` or `metrics` that count (see `layers.py`), of all cells and all columns unless given.
        coded: texts as dictionaries."""
        self._check_version()
        asked = SCHEMAS[table].names if columns is None else _known(table, columns)
        names = list(dict.fromkeys([*asked, "cell"]))
        wanted = None if cells is None else set(cells)
        return layers.load(self.root, table, names, wanted, partial(self.read, coded=coded), metrics).select(asked)

    def pack(self, slim: bool = False) -> int:
        """Few large files per table instead of one per cell or part: small enough to publish. Reading is the same, and what
        is written later stands beside them. See `repack.pack`."""
        self._check_version()
        self._remove_stale()
        return repack.pack(self, slim)

    def _remove_stale(self) -> None:
        for folder in (".", "journal", *SCHEMAS):
            remove_stale(self.root / folder)

    def journals(self) -> list[Path]:
        return sorted((self.root / "journal").glob("*.jsonl"))

    def journal_rows(self, path: Path, columns: Sequence[str]) -> pa.Table:
        """The rows of one journal; none where it has been published meanwhile."""
        rows = [row for rows in self._in_journal(path) for row in rows]
        return to_table("responses", rows, columns)

    def _pending(self) -> Iterable[list[dict[str, Any]]]:
        """The rows of every sample that is still in a journal."""
        for path in self.journals():
            yield from self._in_journal(path)

    def _in_journal(self, path: Path) -> Iterable[list[dict[str, Any]]]:
        return [_rows(path, record) for record in self._records(path)]

    def _records(self, path: Path) -> Sequence[Mapping[str, Any]]:
        """The records of a journal; none where it has been published meanwhile."""
        try:
            content = journal.read(path)
        except FileNotFoundError:
            return []
        if path not in self._warned and not content.records and not content.torn and not journal.in_use(path):
            self._warned.add(path)
            log.warning(EMPTY, path)
        if content.torn and path not in self._warned and not journal.in_use(path):
            self._warned.add(path)
            log.warning("%s: ignored a torn last line of %d bytes (its writer was killed)", path, content.torn)
        return content.records


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
