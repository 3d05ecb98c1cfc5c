"""Visual head scores: hits against naive attention rows of stock models, and where on a page an answer stands."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmkv_bench.calibrate.samples import page, pages, token_grids, visual_tokens
from mmkv_bench.calibrate.sparsemm import head_hits, layer_hits, measure, summarise
from mmkv_bench.errors import CalibrationError, UnsupportedError
from mmkv_bench.models.load import load_model
from mmkv_bench.tiny import WEIGHTS
from mmkv_bench.tiny.pages import TASKS, make_page
from tests import zoo
from tests.generation import common
from tests.oracles import sparsemm as oracle

FAMILIES = ("qwen2_5_vl", "llava_next", "internvl")
many = settings(max_examples=100, deadline=None, derandomize=True)


@pytest.fixture(scope="module")
def embedded():
    return load_model("tiny", str(WEIGHTS), device="cpu")


# ---------------------------------------------------------------- hits


def test_hits_by_hand():
    """Two query heads on one KV head; key j points along axis j, so a query's largest entry is its largest attention."""
    key = torch.eye(6)[None]
    query = torch.zeros(2, 3, 6)
    query[0, 0, 1] = query[0, 1, 2] = query[0, 2, 4] = 1  # rows stand at tokens 3, 4, 5
    query[1, 0, 5] = 9  # the future: masked, so that row 0 of head 1 sees nothing but ties, and the first key wins
    query[1, 1, 0] = query[1, 2, 3] = 1
    assert head_hits(query, key, [[1], [2, 3], [5]]).tolist() == [1.5, 0]
    assert head_hits(query, key, [[0], [0, 1, 2, 3], [3]]).tolist() == [0.25, 2.25]
    assert head_hits(query, key, [[], [2], []]).tolist() == [1, 0]


@many
@given(
    total=st.integers(1, 40),
    rows=st.integers(1, 8),
    kv_heads=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 3]),
    seed=st.integers(0, 10**6),
)
def test_hits_equal_the_naive_count(total, rows, kv_heads, group, seed):
    rows, g = min(rows, total), torch.Generator().manual_seed(seed)
    query = torch.randn(kv_heads * group, rows, 8, generator=g)
    key = torch.randn(kv_heads, total, 8, generator=g)
    regions = [torch.randperm(total, generator=g)[: 1 + i % 4].tolist() for i in range(rows)]
    scores = torch.einsum("hnd,htd->hnt", query.double(), key.repeat_interleave(group, 0).double())
    for i in range(rows):
        scores[:, i, total - rows + i + 1 :] = float("-inf")
    assert head_hits(query, key, regions).tolist() == pytest.approx(oracle.hits(scores.softmax(-1), regions))


def stock_attention(model, inputs, tail: int) -> list[torch.Tensor]:
    """Attention of the last `tail` rows of every layer, as the stock model reports it."""
    before = model.get_decoder().config._attn_implementation
    zoo.set_attention(model, "eager")
    try:
        with torch.no_grad():
            attentions = model(**inputs, output_attentions=True, use_cache=False).attentions
    finally:
        zoo.set_attention(model, before)
    return [layer[0, :, -tail:].double() for layer in attentions]


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_of_a_model_score_what_its_own_attention_says(family):
    model, prompt = zoo.model(family), common.encoded(family)
    answer = torch.tensor(zoo.text(7, 3))
    g, length = torch.Generator().manual_seed(1), prompt.length
    regions = [torch.randperm(length, generator=g)[: length // 3].tolist() for _ in answer]
    ids = prompt.input_ids[0].tolist() + answer[:-1].tolist()
    rows = stock_attention(model, zoo.with_ids(family, zoo.prompt(family), torch.tensor([ids])), len(answer))
    want = [oracle.hits(layer, regions) for layer in rows]
    got = layer_hits(model, prompt.inputs, prompt.types, answer, regions)
    assert torch.tensor(got, dtype=torch.float64).allclose(torch.tensor(want, dtype=torch.float64), atol=1e-12)
    assert sum(map(sum, got)) > 0 and len({score for row in got for score in row}) > 3


@pytest.mark.parametrize("kind", ["lookup", "mi_walk3", "redundant_lookup"])
def test_a_page_scores_what_the_embedded_models_attention_says(embedded, kind):
    from mmkv_bench.generation.encode import encode

    sample = page(kind, "small", "train", 3)
    got = measure(embedded, sample, {})
    prompt = encode(embedded.processor, embedded.family, "page", sample.messages(), sample.images)
    ids = embedded.tokenizer(sample.answer, add_special_tokens=False)["input_ids"]
    first, side = int(prompt.types[0].nonzero()[0]), sample.grid[0] * sample.grid[1] + 2  # an image and its two markers
    regions = [
        [first + image * side + row * sample.grid[1] + column for image, row, column in cells]
        for cells in sample.sources
    ]
    inputs = dict(prompt.inputs)
    inputs["input_ids"] = torch.cat([prompt.input_ids, torch.tensor([ids[:-1]])], 1)
    types = inputs["mm_token_type_ids"]
    inputs["mm_token_type_ids"] = torch.cat([types, types.new_zeros(1, len(ids) - 1)], 1)
    rows = stock_attention(embedded.model, inputs, len(ids))
    assert got == [pytest.approx(oracle.hits(layer, regions)) for layer in rows]


def test_the_embedded_model_reads_with_its_visual_heads(embedded):
    """If pages told wrong places, no head could hit nearly every character."""
    samples = [page("lookup", "small", "train", index) for index in range(4)]
    data = summarise([measure(embedded, sample, {}) for sample in samples], {}, 2)
    assert max(max(row) for row in data["scores"]) > 2.7  # of three digits
    assert data["kv_heads"] == 2 and [len(row) for row in data["scores"]] == [4] * 4


# ---------------------------------------------------------------- places on pages


@pytest.mark.parametrize("size", ["small", "large"])
@pytest.mark.parametrize("kind", TASKS)
def test_the_cells_of_an_answer_show_its_characters(kind, size):
    for index in range(3):
        sample = page(kind, size, "train", index)
        document, turn, images = make_page(kind, size, "train", index)
        frames = 4 if kind.startswith("redundant") else 1
        assert (sample.question, sample.answer) == (turn.question, turn.answer)
        assert len(sample.images) == len(images) and len(sample.sources) == len(sample.answer)
        assert all(image.size == (28 * sample.grid[1], 28 * sample.grid[0]) for image in sample.images)
        for character, cells in zip(sample.answer, sample.sources, strict=True):
            assert len(cells) == frames == len({image for image, _, _ in cells})
            assert {chr(document.grids[image // frames, row, column]) for image, row, column in cells} == {character}


@pytest.mark.parametrize(("grid", "merged"), [((4, 6), (4, 6)), ((4, 6), (2, 3)), ((4, 6), (8, 6)), ((4, 6), (3, 5))])
def test_a_cells_tokens_are_those_that_overlap_it(grid, merged):
    """Against the overlap of intervals on both axes, in fractions of the image."""
    for image in (0, 1):
        for row in range(grid[0]):
            for column in range(grid[1]):
                want = [
                    image * merged[0] * merged[1] + y * merged[1] + x
                    for y in range(merged[0])
                    for x in range(merged[1])
                    if y * grid[0] < (row + 1) * merged[0]
                    and (y + 1) * grid[0] > row * merged[0]
                    and x * grid[1] < (column + 1) * merged[1]
                    and (x + 1) * grid[1] > column * merged[1]
                ]
                assert visual_tokens([(image, row, column)], grid, [merged, merged]) == want
    if merged == grid:
        assert visual_tokens([(1, 2, 3), (0, 0, 1), (0, 0, 1)], grid, [merged, merged]) == [1, 24 + 15]


def test_families_without_a_grid_are_refused():
    model, prompt = zoo.model("llava_next"), common.encoded("llava_next")
    with pytest.raises(UnsupportedError, match="LlavaNext.* are no even grid over each image.*Qwen-VL families"):
        token_grids(prompt.inputs, model, prompt.visual_tokens)
    model, prompt = zoo.model("qwen2_5_vl"), common.encoded("qwen2_5_vl")
    assert token_grids(prompt.inputs, model, prompt.visual_tokens) == [(4, 4), (2, 2)]


def test_calibration_reads_no_test_pages():
    for split in ("test", "test_typeface"):
        with pytest.raises(CalibrationError, match="cannot be calibrated on; "):
            pages(TASKS, "small", split, 3)
    with pytest.raises(CalibrationError, match="samples=0 measures nothing"):
        pages(TASKS, "small", "train", 0)
    assert [place[0] for place in pages(("a", "b"), "small", "train", 5)] == ["a", "b", "a", "b", "a"]
    assert [place[3] for place in pages(("a", "b"), "small", "train", 5)] == [0, 0, 1, 1, 2]
