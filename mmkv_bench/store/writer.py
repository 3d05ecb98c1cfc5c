"""The writer of response rows: a sample at a time, durable when `commit` returns."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, Self

from mmkv_bench.errors import StoreError
from mmkv_bench.secrecy import without_secrets
from mmkv_bench.store.files import disk_errors
from mmkv_bench.store.folder import StoreFolder
from mmkv_bench.store.journal import Journal
from mmkv_bench.store.rows import check, safe_name
from mmkv_bench.store.schema import SCHEMA_VERSION

log = logging.getLogger(__name__)


class Writer:
    """Made by `Store.writer`; a context manager, for one thread of one process."""

    def __init__(self, store: StoreFolder, worker: str, publish_every: int) -> None:
        self._store, self._worker, self._every = store, worker, publish_every
        self._journal: Journal | None = None
        self._samples = 0  # in the open journal
        self._process = os.getpid()
        self._folder: os.stat_result | None = None  # the store's, as it was at the first commit

    def commit(self, rows: Sequence[Mapping[str, Any]], prompt: Mapping[str, Any] | None = None) -> None:
        """Store ONE sample with all its cells, or nothing; when this returns, it survives kill -9 and power failure.

        prompt: the sample's row of the table `prompts`, stored with them. Columns that may be null can be left out;
        schema_version, worker and committed_at are filled in here.
        Raises StoreError: a row against the schema, rows of several samples, two rows of one cell, a disk that refuses.
        The rows are then not stored, unless the message says that publishing failed: those stay in the journal, which
        readers and later runs see.
        """
        if os.getpid() != self._process:
            raise StoreError("a Writer belongs to the process that made it; open one in the forked process")
        time = self._store.next_time()
        stamps = {"schema_version": SCHEMA_VERSION, "worker": self._worker, "committed_at": time}
        checked = [check("responses", row, stamps) for row in rows]
        samples = {(row["dataset"], row["sample_id"]) for row in checked}
        if len(samples) != 1:
            raise StoreError(
                f"one commit is one sample with all its cells; got {len(samples)} samples: {sorted(samples)[:5]}"
            )
        cells = [safe_name("cell", row["cell"]) for row in checked]
        if len(set(cells)) != len(cells):
            raise StoreError(
                f"sample {checked[0]['sample_id']!r}: two rows of one cell in one commit: {sorted(cells)[:5]}"
            )
        for row in checked:
            if row["error"]:
                row["error"] = without_secrets(row["error"])
            row["committed_at"] = time.isoformat(timespec="microseconds")
        question = None
        if prompt is not None:
            question = check("prompts", prompt, {"schema_version": SCHEMA_VERSION, "committed_at": time})
            question["committed_at"] = time.isoformat(timespec="microseconds")
        try:
            self._add(checked, question)
        except FileNotFoundError as problem:
            raise self._vanished(1) from problem
        if self._samples >= self._every:
            self.publish()

    def _add(self, rows: list[dict[str, Any]], prompt: dict[str, Any] | None) -> None:
        """Raises FileNotFoundError where the folder that was written to is there no more, StoreError for other faults."""
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
        """Turn the journal into a parquet part. Without unpublished samples it does nothing.

        Raises StoreError when the disk refuses; the samples then stay in the journal. Its message says so when the journal
        itself is gone.
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
        """The error for a result folder that somebody took away; `more`: samples lost besides those in the journal."""
        lost = more
        if self._journal is not None:
            lost += self._samples
            self._journal.close()
            self._journal = None
        return StoreError(
            f"{self._store.root} was removed, moved or replaced while this run wrote to it. Lost: {lost} samples that were "
            "in no part yet (fewer where `pack` took them over after a long silence, as it does where there are no locks), and "
            "what the folder held if it was removed. Find out what took it away and run the same command "
            "again: it makes what is missing."
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
