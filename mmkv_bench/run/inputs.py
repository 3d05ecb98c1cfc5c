"""Checks that rows of a cell have one origin: the machine and the prompts of stored rows, and the files that a run reads, looked
at again while it goes on: what changes under it belongs to no cell.

A look costs a `stat` a file. Where a file's state is another one its content is compared, so that a new time alone stops nothing;
of a large file that nobody has read whole (weights of the hub, known by their commit) another state is a change. Rows that were
written since the last good look may be answers to either content: they are made failed rows, which `retry=[error]` answers again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv_bench.checksums import Checksums
from mmkv_bench.errors import ConfigError, DataError, StoreError
from mmkv_bench.file_state import State, cache_dir, state_of
from mmkv_bench.store.rows import processor

if TYPE_CHECKING:
    from mmkv_bench.models.load import LoadedModel
    from mmkv_bench.run.generate import Commits
    from mmkv_bench.store.store import Store


EVERY_S = 1.0
SELDOM = 20  # times as long as a look took is waited before the next: a dataset may be tens of thousands of files
READ_BELOW = 1 << 26  # bytes of a file that is read to know its content


class Inputs:
    """The files behind one dataset's answers.

    Args:
        model: files of weights, configuration and processor; data: of the dataset's rows and its task's code.
        writer: where rows go.
    """

    def __init__(self, model: Iterable[Path], data: Iterable[Path], writer: Commits) -> None:
        self._writer, self._model = writer, frozenset(model)
        self._checksums = Checksums(cache_dir() / "checksums.json")
        self._known: dict[Path, tuple[State, str | None]] = {}
        for file in sorted({*self._model, *data}):
            state = state_of(file)
            digest = self._checksums.digest if state.size < READ_BELOW else self._checksums.remembered
            self._known[file] = state, digest(file)
        self._since: list[Sequence[Mapping[str, Any]]] = []
        self._next = time.monotonic() + EVERY_S
        self._stopped: ConfigError | DataError | None = None

    def committed(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Take note of a sample's rows, and look again where the last look is a while ago. Raises what `look` raises."""
        self._since.append(rows)
        if time.monotonic() >= self._next:
            self.look()

    def look(self) -> None:
        """Look at all files.

        Raises:
            ConfigError: the model's changed. DataError: the dataset's. Rows since the last look are failed rows then. Another
                look raises the same.
        """
        from mmkv_bench.run.generate import failed

        if self._stopped is not None:
            raise self._stopped
        unsure, self._since, began = self._since, [], time.monotonic()
        changed = self._changed()
        now = time.monotonic()
        self._next = now + max(EVERY_S, SELDOM * (now - began))
        if changed is None:
            return
        reason = f"{changed.name} changed while this was answered"
        for rows in unsure:
            self._writer.commit([failed(row, "error", reason) for row in rows])
        error = ConfigError if changed in self._model else DataError
        self._stopped = error(
            f"{changed} changed while the run was reading it; {len(unsure)} samples that were answered since the last look are "
            "rows with status error, all others stand; put the file back and run the same command with retry=[error], or run it "
            "as it is now for cells of their own"
        )
        raise self._stopped

    def _changed(self) -> Path | None:
        for file, (state, digest) in self._known.items():
            try:
                now = state_of(file)
                if now == state:
                    continue
                if digest is None or self._checksums.digest(file) != digest:
                    return file
                self._known[file] = now, digest
            except (OSError, ConfigError):  # it is gone, or being written
                return file
        return None


def refuse_other_machine(store: Store, cells: Collection[str], own: Mapping[str, Any], times: bool = False) -> None:
    """Compare who began these cells, of which rows are about to be added, with this process; no hash covers it.

    Args:
        own: device, cpu and versions of this process (`provenance.collect`).
        times: what is added are times, to which the kind of CPU matters in any precision.

    Raises:
        StoreError: a cell was begun on another device, in half precision on another kind of CPU, or under another lmms-eval.
    """
    columns = ("device", "cpu", "dtype", "versions")
    for row in store.cells(cells, columns).select(columns).group_by(list(columns)).aggregate([]).to_pylist():
        stored_settings, current_settings = ({"device": one["device"]} for one in (row, own))
        for side, one in ((stored_settings, row), (current_settings, own)):
            side["cpu"] = processor(one["device"], one["cpu"], row["dtype"], times)
            side["lmms-eval"] = json.loads(one["versions"]).get("lmms_eval")
        if stored_settings != current_settings:
            told = ", ".join(
                f"{name} {stored_settings[name]} (here {current_settings[name]})"
                for name in stored_settings
                if stored_settings[name] != current_settings[name]
            )
            raise StoreError(
                f"cells of this run were begun under {store.root} with {told}, and a cell that mixes them tells nothing of "
                "either: continue there, or give another folder (out=<folder>)"
            )


def refuse_other_prompts(store: Store, cells: Sequence[str], loaded: LoadedModel) -> None:
    """Compare the stored `prompt_format` of these cells with the loaded model's; no hash covers it.

    Rows that are older than the column were made of the same prompts, but for templates that take text or write the date, and
    for tokenizers that add the beginning of a text where it lacked or stood twice.

    Raises:
        ConfigError: the cells have rows of prompts that were written otherwise.
    """
    from mmkv_bench.models.chat_template import Template

    template, is_text_model = Template.of(loaded.processor), loaded.processor is loaded.tokenizer
    written_anew = (
        template.takes_text or "strftime_now" in template.source or template.add_special_tokens is is_text_model
    )
    stored = {*store.cells(cells, ["prompt_format"])["prompt_format"].to_pylist()} - {loaded.prompt_format}
    if stored - {None} or (stored and written_anew):
        raise ConfigError(
            f"{store.root} holds rows of these cells whose prompts another version of mmkv_bench wrote otherwise (the column "
            "prompt_format of the table cells tells how); they cannot be added to: give another folder (out=<folder>)"
        )
