"""Rows of one store hold answers to one kind of prompt: what another version of the renderer made is not added to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mmkv_bench.errors import ConfigError

if TYPE_CHECKING:
    from mmkv_bench.models.load import LoadedModel
    from mmkv_bench.store.store import Store


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
