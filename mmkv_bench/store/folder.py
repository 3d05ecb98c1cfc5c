"""The folder of a store: version mark, journals and locks, and reading rows from checksummed files."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Self

import pyarrow as pa

from mmkv_bench.errors import StoreError
from mmkv_bench.secrecy import without_secrets
from mmkv_bench.store import journal, parts, score_files
from mmkv_bench.store.files import (
    MARK,
    check_folder,
    disk_errors,
    lock_held,
    remove_stale,
    sync_folder,
    write_bytes,
    write_whole,
)
from mmkv_bench.store.journal import Journal
from mmkv_bench.store.parts import number_of_rows
from mmkv_bench.store.rows import check, known_columns, safe_name, to_table
from mmkv_bench.store.schema import SCHEMA_VERSION, SCHEMAS

log = logging.getLogger(__name__)

RETRIES = 20
EMPTY = (
    "%s is empty: its writer was killed before the first answer, or the file was emptied; the lost answers "
    "are generated again"
)


class StoreFolder:
    """The folder of a result store. The subclass `Store` adds the tables."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)
        self._latest: datetime | None = None
        """Newest commit time seen. Later commits of this process get later times."""
        self._warned: set[Path] = set()

    def check_writable(self, need_bytes: int = 64 << 20) -> None:
        """Check that rows can be written to this folder and that `need_bytes` are free.

        Raises:
            ConfigError: the folder cannot be written, or fewer bytes are free.
            StoreError: the store has another schema version.
        """
        check_folder(self.root, need_bytes)
        self.check_version()

    def prepare(self) -> None:
        """Create the store's folders and `store.json` if they are missing.

        Raises StoreError: the store has another schema version, or the disk refuses.
        """
        with disk_errors("preparing the result folder", self.root):
            for folder in ("journal", *SCHEMAS):
                (self.root / folder).mkdir(parents=True, exist_ok=True)
            if not (self.root / MARK).exists():
                mark_bytes = json.dumps({"schema_version": SCHEMA_VERSION, "checksums": True}).encode() + b"\n"
                write_bytes(self.root / MARK, mark_bytes)
        self.check_version()

    def locked(self) -> AbstractContextManager[None]:
        """Return a context manager that locks the store, for code that reads files and then removes them."""
        return lock_held(self.root / MARK)

    def publish_journal(self, path: Path) -> int:
        """Write a journal's rows as parquet files, and remove the journal. Return the number of samples.

        This process must hold the journal's lock.
        """
        content = journal.read(path)
        records = _of_this_version(path, content.records)
        if records:
            rows = [row for record in records for row in record["rows"]]
            prompts = [record["prompt"] for record in records if record.get("prompt")]
            if prompts:  # written before the answers, so that no answer is ever published without its question
                target = self.root / "prompts" / f"{path.stem}.parquet"
                write_whole(target, parts.parquet(to_table("prompts", prompts)))
            write_whole(self.root / "responses" / f"{path.stem}.parquet", parts.part(to_table("responses", rows)))
        elif not content.torn:
            log.warning(EMPTY, path)
        if content.torn:
            log.warning("%s: dropped a torn last line of %d bytes; its sample is generated again", path, content.torn)
        path.unlink()
        sync_folder(path.parent)
        return len(records)

    def next_time(self) -> datetime:
        """Return a commit time: now, or just after the latest known one, so the newest row wins if clocks differ."""
        commit_time = datetime.now(UTC)
        if self._latest is not None:
            commit_time = max(commit_time, self._latest + timedelta(microseconds=1))
        self._latest = commit_time
        return commit_time

    def rows_in_files(self, table: str) -> int:
        """Count a table's rows from the footers of its files, without rows in journals."""
        return sum(map(number_of_rows, self.files(table)))

    def check_version(self) -> None:
        """Raise StoreError if the store has another schema version, or rows but no `store.json`."""
        path = self.root / MARK
        try:
            stored_mark = json.loads(path.read_bytes())
            version = stored_mark["schema_version"]
        except FileNotFoundError:
            if any(next((self.root / table).glob("*.parquet"), None) for table in SCHEMAS):
                raise StoreError(
                    f"{self.root} has rows but no {MARK}, which is written last, so the store was fetched or "
                    "copied in part. Run the same fetch again to get the missing files, or copy the folder again"
                ) from None
            return
        except (ValueError, TypeError, KeyError, AttributeError, OSError) as problem:
            raise StoreError(f"{path} is not a result store's mark ({problem}). Use another result folder.") from None
        if version != SCHEMA_VERSION:
            parts.refuse_version(self.root, version)

    def file(self, table: str, cell: str) -> Path:
        """Return the path of a cell's own file in a table's folder."""
        return score_files.own_file(self.root, table, cell)

    def files(self, table: str) -> list[Path]:
        return score_files.table_files(self.root, table)

    def read(
        self,
        table: str,
        list_files: Callable[[], list[Path]],
        columns: Sequence[str],
        cells: Collection[str] | None,
        coded: bool = False,
        metrics: Collection[str] | None = None,
    ) -> pa.Table:
        """Return columns of a table, read from all files that `list_files` returns, in the order of their names.

        Files are read one by one, because importing `pyarrow.dataset` takes longer than most reads.

        Args:
            columns: names of columns.
            cells, metrics: if given, only rows of these cells (hashes) and metrics.
            coded: return text columns dictionary-encoded.

        Raises:
            StoreError: another schema version, a damaged file, or files that keep vanishing.
        """
        self.check_version()
        schema = parts.schema_of_columns(table, columns, coded)
        for _ in range(RETRIES):
            try:
                tables = [parts.read_file(path, schema, cells, metrics) for path in sorted(list_files())]
            except FileNotFoundError:
                continue  # a cell's scores were being replaced between the listing and the reading
            return pa.concat_tables([parts.no_rows(schema), *tables])
        raise StoreError(
            f"{table}: files keep vanishing while they are read: is another program removing them? "
            "Stop that program, then read again"
        )

    def load(
        self,
        table: str,
        cells: Iterable[str] | None,
        columns: Sequence[str] | None = None,
        coded: bool = False,
        metrics: Collection[str] | None = None,
    ) -> pa.Table:
        """Return the rows of `cells`, `samples` or `metrics` that no other file replaces (see `score_files.py`).

        Args:
            cells, metrics, coded: as for `read`.
            columns: names of columns; None returns all.
        """
        selected_columns = SCHEMAS[table].names if columns is None else known_columns(table, columns)
        column_names = list(dict.fromkeys([*selected_columns, "cell"]))
        wanted_cells = None if cells is None else set(cells)
        return score_files.current_rows(
            self.root, table, column_names, wanted_cells, partial(self.read, coded=coded), metrics
        ).select(selected_columns)

    def remove_stale_files(self) -> None:
        """Remove unfinished files of killed writers."""
        for folder in (".", "journal", *SCHEMAS):
            remove_stale(self.root / folder)

    def journals(self) -> list[Path]:
        """List the journals, whose samples are in no parquet file yet."""
        return sorted((self.root / "journal").glob("*.jsonl"))

    def pending_rows(self) -> Iterator[dict[str, Any]]:
        """Yield the response rows of all journals."""
        for path in self.journals():
            yield from self.journal_rows(path)

    def journal_rows(self, path: Path) -> list[dict[str, Any]]:
        """Return the response rows of a journal; none if it was published meanwhile."""
        return [row for record in self.records(path) for row in record["rows"]]

    def records(self, path: Path) -> Sequence[Mapping[str, Any]]:
        """Return the records of a journal; none if it was published meanwhile."""
        try:
            content = journal.read(path)
        except FileNotFoundError:
            return []
        if path not in self._warned and (content.torn or not content.records) and not journal.in_use(path):
            self._warned.add(path)
            if content.torn:
                log.warning("%s: ignored a torn last line of %d bytes (its writer was killed)", path, content.torn)
            else:
                log.warning(EMPTY, path)
        return _of_this_version(path, content.records)


def _of_this_version(path: Path, records: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    for record in records:
        if record["schema_version"] != SCHEMA_VERSION:
            parts.refuse_version(path, record["schema_version"])
    return records


class Writer:
    """A context manager that stores samples (all cells' answers to a question), for one thread (`Store.writer`)."""

    def __init__(self, store: StoreFolder, worker: str, publish_every: int) -> None:
        self._store, self._worker, self._every = store, worker, publish_every
        self._journal: Journal | None = None
        self._samples = 0  # in the open journal
        self._process = os.getpid()
        self._folder: os.stat_result | None = None  # the store's folder at the first commit

    def commit(self, rows: Sequence[Mapping[str, Any]], prompt: Mapping[str, Any] | None = None) -> None:
        """Store the rows of ONE sample, one row per cell, or none of them. Stored rows survive kill -9 and power
        failure.

        rows: rows of `responses`. Nullable columns may be left out; schema_version, worker and committed_at are filled
        in.
        prompt: the sample's row of the table `prompts`.

        Raises StoreError: a row breaks the schema, rows of several samples, two rows of one cell, or a disk that
        refuses. The rows are then not stored, except if publishing failed: then they stay in the journal.
        """
        if os.getpid() != self._process:
            raise StoreError("a Writer belongs to the process that made it; open one in the forked process")
        commit_time = self._store.next_time()
        stamped_values = {"schema_version": SCHEMA_VERSION, "worker": self._worker, "committed_at": commit_time}
        checked_rows = [check("responses", row, stamped_values) for row in rows]
        samples = {(row["dataset"], row["sample_id"]) for row in checked_rows}
        if len(samples) != 1:
            raise StoreError(
                f"one commit takes one sample with all its cells; got {len(samples)} samples: "
                f"{sorted(samples)[:5]}; commit each sample by itself"
            )
        cells = [safe_name("cell", row["cell"]) for row in checked_rows]
        if len(set(cells)) != len(cells):
            raise StoreError(
                f"sample {checked_rows[0]['sample_id']!r}: one commit takes one row per cell; got two rows of one cell "
                f"among {sorted(cells)[:5]}"
            )
        for row in checked_rows:
            if row["error"]:
                row["error"] = without_secrets(row["error"])
            row["committed_at"] = commit_time.isoformat(timespec="microseconds")
        prompt_row = None
        if prompt is not None:
            prompt_row = check("prompts", prompt, {"schema_version": SCHEMA_VERSION, "committed_at": commit_time})
            prompt_row["committed_at"] = commit_time.isoformat(timespec="microseconds")
        try:
            self._add(checked_rows, prompt_row)
        except FileNotFoundError as problem:
            raise self._vanished(1) from problem
        if self._samples >= self._every:
            self.publish()

    def _add(self, rows: list[dict[str, Any]], prompt: dict[str, Any] | None) -> None:
        """Append a sample's rows to the journal. Raises FileNotFoundError if the result folder is gone, else
        StoreError."""
        root = self._store.root
        if self._folder is not None and not os.path.samestat(self._folder, os.stat(root)):
            raise FileNotFoundError(root)
        if self._journal is None:
            self._store.prepare()
            self._folder = os.stat(root)
        with disk_errors("committing a sample", root, gone=FileNotFoundError):
            if self._journal is None:
                self._journal = Journal(root / "journal", self._worker)
                self._samples = 0
            record = {"schema_version": SCHEMA_VERSION, "rows": rows}
            self._journal.append(record if prompt is None else record | {"prompt": prompt})
        self._samples += 1

    def publish(self) -> None:
        """Write the journal's samples as a parquet file. Without samples, do nothing.

        Raises StoreError: the disk refuses (the samples stay in the journal), or the journal is gone.
        """
        if self._journal is None or os.getpid() != self._process:
            return
        try:
            self._journal.check()
        except FileNotFoundError as problem:
            raise self._vanished(0) from problem
        with disk_errors("publishing result rows (they stay in the journal)", self._store.root):
            self._store.publish_journal(self._journal.path)
        self._journal.close()
        self._journal = None

    def _vanished(self, more: int) -> StoreError:
        """Return the error for a vanished result folder. more: number of lost samples that are not in the journal."""
        lost_samples = more
        if self._journal is not None:
            lost_samples += self._samples
            self._journal.close()
            self._journal = None
        return StoreError(
            f"{self._store.root} was removed, moved or replaced while this run wrote to it. Lost: {lost_samples} samples "
            "that were in no part yet, and the folder's content if it was removed. Find the cause, then run the same "
            "command again: it makes what is missing."
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.publish()
        except StoreError as problem:
            if kind is None:
                raise
            log.warning("%s", problem)  # the exception under way says more than this one would
        finally:
            if self._journal is not None:
                self._journal.close()
                self._journal = None
