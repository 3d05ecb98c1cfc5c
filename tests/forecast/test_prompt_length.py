"""Promise: a prompt's length is that of stored prompts, else what the shape of the data tells, else assumed and marked."""

from __future__ import annotations

import pytest

from mmkv_bench.config.compose import compose
from mmkv_bench.forecast.prompt_length import PromptLength, expected_length, stored_lengths
from mmkv_bench.plan.planner import outline
from mmkv_bench.store.store import Store
from tests import cover
from tests.each import each


@pytest.mark.slow
@each(
    ("words", "length"),
    [
        (("dataset=pages_walk",), PromptLength(268, "pages", 256)),
        (("dataset=pages_walk", "page_size=large"), PromptLength(588, "pages", 576)),
        (("dataset=pages_redundant",), PromptLength(274, "pages", 256)),
        (("dataset=pages_walk", "model=qwen2_5_vl_7b"), PromptLength(256 + 64, "pages", 256)),
        (("dataset=pages_walk", "model=llama_3_8b"), PromptLength(2048, "assumed")),
        (("dataset=docvqa", "model=llava_v1_5_7b"), PromptLength(576 + 64, "picture", 576)),
        (("dataset=docvqa", "model=qwen2_5_vl_7b"), PromptLength(2048, "assumed")),  # whose pictures keep their size
        (("dataset=videomme", "model=llava_v1_5_7b"), PromptLength(2048, "assumed")),
        (("dataset=lengths_needles_16k", "model=qwen2_5_vl_7b"), PromptLength(16_000 + 64, "dataset", 0)),
        (("dataset=lengths_needles_16k", "model=llama_3_8b"), PromptLength(8192, "dataset", 0)),  # its whole context
        (("dataset=english_passages_4k", "model=llama_3_8b"), PromptLength((1200 + 2700) // 2 + 64, "dataset", 0)),
        (("dataset=documentation", "model=llama_3_8b"), PromptLength(1024 + 64, "dataset", 0)),
        (
            ("dataset=stream_facts",),
            PromptLength(2048, "assumed"),
        ),  # its file states the embedded model's tokens of pictures
    ],
)
def test_the_shape_of_the_data_tells_a_length_or_it_is_assumed(words, length, tmp_path):
    plan = outline(compose([*words, f"out={tmp_path}/rows"]))
    assert expected_length(plan, plan.parts[0]) == length


@cover.few("dataset, store", [("[pages_walk,pages_lookup]", "ablations"), ("[pages_walk,pages_redundant]", "methods")])
def test_stored_prompts_have_the_lengths_that_pages_are_expected_to_have(dataset, store):
    """Committed rows of all methods, not of the plan's cells alone; none for other settings of images."""
    words = (f"dataset={dataset}", "budget=7", f"out=results/tiny/{store}")
    plan = outline(compose([*words]))
    store = Store(plan.out)
    assert {cell.cell for cell in plan.cells if cell.budget is not None}.isdisjoint(store.cells()["cell"].to_pylist())
    lengths = stored_lengths(plan, store)
    assert [length.source for length in lengths.values()] == ["stored", "stored"]
    for part in plan.parts:
        stored, expected = lengths[part.dataset], expected_length(plan, part)
        assert (stored.tokens, stored.visual) == (expected.tokens, expected.visual)
    other = outline(compose([*words, "model.max_pixels=50176"]))
    assert stored_lengths(other, store) == {}
