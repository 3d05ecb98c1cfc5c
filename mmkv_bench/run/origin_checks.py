"""Checks that all rows of a cell (one method at one budget) were made in the same way.

Stored rows must come from the same kind of machine and the same prompt format. The files that a run reads must not
change during the run. Rows written between the last good check and the check that finds a change become failed rows,
which `retry=[error]` answers again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv_bench.errors import ConfigError, DataError, StoreError
from mmkv_bench.file_state import Checksums, State, cache_dir, state_of
from mmkv_bench.store.rows import processor

if TYPE_CHECKING:
    from mmkv_bench.models.load import LoadedModel
    from mmkv_bench.store.folder import Writer
    from mmkv_bench.store.store import Store


EVERY_S = 1.0
CHECK_FACTOR = 20  # least pause between checks, in durations of a check: a dataset may be tens of thousands of files
READ_BELOW = 1 << 26  # files with fewer bytes are read to know their content


class Inputs:
    """Checks that the files on which one dataset's answers depend do not change during a run.

    A check costs one `stat` per file. If the size, time or inode of a file differs, the checksum is compared. Files of
    `READ_BELOW` bytes or more without a cached checksum then count as changed.

    Args:
        model: files of weights, configuration and processor.
        data: files of the dataset's rows and its task's code.
        writer: writer of the rows.
    """

    def __init__(self, model: Iterable[Path], data: Iterable[Path], writer: Writer) -> None:
        self._writer, self._model = writer, frozenset(model)
        self._checksums = Checksums(cache_dir() / "checksums.json")
        self._file_states: dict[Path, tuple[State, str | None]] = {}
        for file in sorted({*self._model, *data}):
            state = state_of(file)
            digest = self._checksums.digest if state.size < READ_BELOW else self._checksums.cached_digest
            self._file_states[file] = state, digest(file)
        self._rows_since_check: list[Sequence[Mapping[str, Any]]] = []
        self._next = time.monotonic() + EVERY_S
        self._stopped: ConfigError | DataError | None = None

    def add_rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Remember the committed rows of a sample, and call `check` when a check is due."""
        self._rows_since_check.append(rows)
        if time.monotonic() >= self._next:
            self.check()

    def check(self) -> None:
        """Check that no file has changed since this object was made. After a change, the rows since the last check
        become failed rows, and every call raises.

        Raises:
            ConfigError: a file of the model changed.
            DataError: a file of the dataset changed.
        """
        from mmkv_bench.run.generate import failure_row

        if self._stopped is not None:
            raise self._stopped
        uncertain_rows, self._rows_since_check, check_start = self._rows_since_check, [], time.monotonic()
        changed_file = self._changed()
        check_end = time.monotonic()
        self._next = check_end + max(EVERY_S, CHECK_FACTOR * (check_end - check_start))
        if changed_file is None:
            return
        reason = f"{changed_file.name} changed while this was answered"
        for rows in uncertain_rows:
            self._writer.commit([failure_row(row, "error", reason) for row in rows])
        error_class = ConfigError if changed_file in self._model else DataError
        self._stopped = error_class(
            f"{changed_file} changed while the run was reading it; {len(uncertain_rows)} samples answered since the last check "
            "are rows with status error, all others are valid; restore the file and run the same command with "
            "retry=[error], or run it with the new file, which makes new cells"
        )
        raise self._stopped

    def _changed(self) -> Path | None:
        for file, (state, digest) in self._file_states.items():
            try:
                present_state = state_of(file)
                if present_state == state:
                    continue
                if digest is None or self._checksums.digest(file) != digest:
                    return file
                self._file_states[file] = present_state, digest
            except (OSError, ConfigError):  # the file is gone, or being written
                return file
        return None


def refuse_other_machine(store: Store, cells: Collection[str], own: Mapping[str, Any], times: bool = False) -> None:
    """Refuse to add rows to cells that have rows of another kind of machine, because no hash covers the machine.

    Args:
        cells: hashes of the cells.
        own: device, cpu and versions of this process (`provenance.collect`).
        times: whether the new rows have times, which depend on the CPU model in every precision.

    Raises:
        StoreError: a cell has rows of another device, another kind of CPU (in half precision), or another lmms-eval.
    """
    columns = ("device", "cpu", "dtype", "versions")
    for row in store.cells(cells, columns).select(columns).group_by(list(columns)).aggregate([]).to_pylist():
        stored_facts, own_facts = (
            {
                "device": one["device"],
                "cpu": processor(one["device"], one["cpu"], row["dtype"], times),
                "lmms-eval": json.loads(one["versions"]).get("lmms_eval"),
            }
            for one in (row, own)
        )
        if differences := [
            f"{name} {value} (now {own_facts[name]})"
            for name, value in stored_facts.items()
            if value != own_facts[name]
        ]:
            raise StoreError(
                f"cells of this run were begun under {store.root} with {', '.join(differences)}, but a cell's rows must "
                "agree in these: continue where the cells were begun, or give another folder (out=<folder>)"
            )


def refuse_other_prompts(store: Store, cells: Sequence[str], loaded: LoadedModel) -> None:
    """Refuse to add rows to cells whose stored `prompt_format` differs from the loaded model's. No hash covers the
    format.

    Rows without a format come from older versions. They are refused only for models whose prompts those versions wrote
    differently: chat templates that take text or write the date, and tokenizers whose begin-of-text token was missing
    or doubled.

    Raises:
        ConfigError: the cells have rows with another prompt format.
    """
    from mmkv_bench.models.chat_template import Template

    template, is_text_model = Template.of(loaded.processor), loaded.processor is loaded.tokenizer
    written_anew = (
        template.takes_text or "strftime_now" in template.source or template.add_special_tokens is is_text_model
    )
    stored_formats = {*store.cells(cells, ["prompt_format"])["prompt_format"].to_pylist()} - {loaded.prompt_format}
    if stored_formats - {None} or (stored_formats and written_anew):
        raise ConfigError(
            f"{store.root} has rows of these cells whose prompts were written differently by another version of "
            "mmkv_bench (column prompt_format of the table cells), so no rows can be added; give another folder "
            "(out=<folder>)"
        )
