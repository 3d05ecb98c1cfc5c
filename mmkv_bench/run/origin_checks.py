"""Checks that all rows of a cell have one origin. Stored rows must come from the same machine and prompts, and the files that
a run reads must not change while it runs.

A check costs one `stat` per file. If a file's state changed, its content is compared, because a new modification time alone is
harmless. Large files whose content was never hashed (weights of the hub, identified by their commit) count as changed. After a
change, rows written since the last good check may come from either content. They become failed rows, which `retry=[error]`
answers again.
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
CHECK_FACTOR = (
    20  # wait this many times a check's duration before the next: a dataset may be tens of thousands of files
)
READ_BELOW = 1 << 26  # files with fewer bytes are read to know their content


class Inputs:
    """The files on which one dataset's answers depend, with checks that they do not change during a run.

    Args:
        model: files of weights, configuration and processor.
        data: files of the dataset's rows and its task's code.
        writer: destination of rows.
    """

    def __init__(self, model: Iterable[Path], data: Iterable[Path], writer: Writer) -> None:
        self._writer, self._model = writer, frozenset(model)
        self._checksums = Checksums(cache_dir() / "checksums.json")
        self._known: dict[Path, tuple[State, str | None]] = {}
        for file in sorted({*self._model, *data}):
            state = state_of(file)
            digest = self._checksums.digest if state.size < READ_BELOW else self._checksums.cached_digest
            self._known[file] = state, digest(file)
        self._since: list[Sequence[Mapping[str, Any]]] = []
        self._next = time.monotonic() + EVERY_S
        self._stopped: ConfigError | DataError | None = None

    def committed(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Remember the rows of a committed sample, and check the files if the last check is old. Raises the errors of `look`."""
        self._since.append(rows)
        if time.monotonic() >= self._next:
            self.look()

    def look(self) -> None:
        """Check that no file has changed since this object was made.

        If one has, the rows since the last check become failed rows, and this and all later checks raise an error.

        Raises:
            ConfigError: a file of the model changed.
            DataError: a file of the dataset changed.
        """
        from mmkv_bench.run.generate import failed

        if self._stopped is not None:
            raise self._stopped
        uncertain_rows, self._since, check_start = self._since, [], time.monotonic()
        changed_file = self._changed()
        check_end = time.monotonic()
        self._next = check_end + max(EVERY_S, CHECK_FACTOR * (check_end - check_start))
        if changed_file is None:
            return
        reason = f"{changed_file.name} changed while this was answered"
        for rows in uncertain_rows:
            self._writer.commit([failed(row, "error", reason) for row in rows])
        error_class = ConfigError if changed_file in self._model else DataError
        self._stopped = error_class(
            f"{changed_file} changed while the run was reading it; {len(uncertain_rows)} samples answered since the last check "
            "are rows with status error, all others are valid; restore the file and run the same command with "
            "retry=[error], or run it with the new file, which makes new cells"
        )
        raise self._stopped

    def _changed(self) -> Path | None:
        for file, (state, digest) in self._known.items():
            try:
                present_state = state_of(file)
                if present_state == state:
                    continue
                if digest is None or self._checksums.digest(file) != digest:
                    return file
                self._known[file] = present_state, digest
            except (OSError, ConfigError):  # the file is gone, or being written
                return file
        return None


def refuse_other_machine(store: Store, cells: Collection[str], own: Mapping[str, Any], times: bool = False) -> None:
    """Refuse to add rows to cells that were begun on another kind of machine, because no hash covers the machine.

    Args:
        own: device, cpu and versions of this process (`provenance.collect`).
        times: whether times will be added, which depend on the CPU model in any precision.

    Raises:
        StoreError: a cell was begun on another device, in half precision on another kind of CPU, or under another lmms-eval.
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
                f"cells of this run were begun under {store.root} with {', '.join(differences)}, and one cell must not mix "
                "them: continue on that machine, or give another folder (out=<folder>)"
            )


def refuse_other_prompts(store: Store, cells: Sequence[str], loaded: LoadedModel) -> None:
    """Refuse to add rows to cells whose stored `prompt_format` differs from the loaded model's.

    No hash covers the format.

    Rows from before this column existed are accepted, unless older versions made other prompts for this model: with chat
    templates that take text or write the date, and with tokenizers whose begin-of-text token was missing or doubled.

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
