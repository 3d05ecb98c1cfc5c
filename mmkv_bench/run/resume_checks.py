"""Checks before rows are added to stored cells: the same kind of machine, and prompts written the same way."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mmkv_bench.errors import ConfigError, StoreError
from mmkv_bench.store.rows import processor

if TYPE_CHECKING:
    from mmkv_bench.models.load import LoadedModel
    from mmkv_bench.store.store import Store


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
