"""Visual head scores: hits against naive attention rows of stock models, and where on a page an answer stands."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mmkv_bench.calibrate.artefact import load
from mmkv_bench.calibrate.measurements import SampleHits, answer_cells, head_hits, head_scores, layer_hits, visual_hits
from mmkv_bench.calibrate.samples import PromptSample, chat, page, pages, visual_tokens
from mmkv_bench.compression.allocators.head_scores import HeadScores
from mmkv_bench.config.schema import Model
from mmkv_bench.errors import CalibrationError, UnsupportedError
from mmkv_bench.families.registry import token_boxes
from mmkv_bench.models.files import folder_fingerprint
from mmkv_bench.models.load import load_model
from mmkv_bench.models.source import Source
from mmkv_bench.tiny import WEIGHTS
from mmkv_bench.tiny.pages import TASKS, make_page
from tests import cover, zoo
from tests.cli.setting import verb
from tests.each import each
from tests.families.shapes import small
from tests.generation import common
from tests.oracles import sparsemm as oracle

main = verb("calibrate")

FAMILIES = ("qwen2_5_vl", "llava_next", "internvl")
many = settings(max_examples=cover.examples(100), deadline=None, derandomize=True)


@pytest.fixture(scope="module")
def embedded():
    return load_model(Model(name="tiny", device="cpu"), str(WEIGHTS))


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


@pytest.mark.slow
@each("kind", ["lookup", "mi_walk3", "redundant_lookup"])
def test_a_page_scores_what_the_embedded_models_attention_says(embedded, kind):
    from mmkv_bench.generation.encode import encode

    sample = page(kind, "small", "train", 3)
    measured = visual_hits(embedded, sample, {})
    got = measured.hits
    assert (measured.tokens, measured.hidden) == (len(sample.answer), 0)
    prompt = encode(embedded.processor, embedded.family, "page", sample.messages, sample.images)
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
    data = head_scores([visual_hits(embedded, sample, {}) for sample in samples], {}, 2)
    assert max(max(row) for row in data["scores"]) > 2.7  # of three digits
    assert data["kv_heads"] == 2 and [len(row) for row in data["scores"]] == [4] * 4


# ---------------------------------------------------------------- places on pages


@pytest.mark.full
@each("size", ["small", "large"])
@each("kind", TASKS)
def test_the_cells_of_an_answer_show_its_characters(kind, size):
    for index in range(3):
        sample = page(kind, size, "train", index)
        document, turn, images = make_page(kind, size, "train", index)
        frames = 4 if kind.startswith("redundant") else 1
        assert (sample.messages[0]["content"][-1]["text"], sample.answer) == (turn.question, turn.answer)
        assert len(sample.images) == len(images) and len(sample.sources) == len(sample.answer)
        assert all(image.size == (28 * sample.grid[1], 28 * sample.grid[0]) for image in sample.images)
        for character, cells in zip(sample.answer, sample.sources, strict=True):
            assert len(cells) == frames == len({image for image, _, _ in cells})
            assert {chr(document.grids[image // frames, row, column]) for image, row, column in cells} == {character}


@each(("grid", "merged"), [((4, 6), (4, 6)), ((4, 6), (2, 3)), ((4, 6), (8, 6)), ((4, 6), (3, 5))])
def test_a_cells_tokens_are_those_that_overlap_it(grid, merged):
    """Against the overlap of intervals on both axes of an even grid over each image, in whole numbers."""
    boxes = even_boxes([merged, merged])
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
                assert visual_tokens([(image, row, column)], grid, boxes) == want
    if merged == grid:
        assert visual_tokens([(1, 2, 3), (0, 0, 1), (0, 0, 1)], grid, boxes) == [1, 24 + 15]
    assert visual_tokens([(0, 0, 0)], grid, [None, *boxes, None])[0] == 1, "a newline shows nothing"


def even_boxes(merged: list[tuple[int, int]]):
    """Boxes of Qwen2.5-VL's tokens, from a stand-in for its inputs: rows and columns of 2x2 patches of every image."""
    grids = torch.tensor([[1, 2 * rows, 2 * columns] for rows, columns in merged])
    visual = sum(rows * columns for rows, columns in merged)
    config = zoo.config("qwen2_5_vl")
    return token_boxes(config, None, {"image_grid_thw": grids}, [(9, 9)] * len(merged), visual)


# ---------------------------------------------------------------- other families


@pytest.fixture(scope="module")
def cropping():
    """LLaVA-1.5, which sees the middle square of a page."""
    return Source.of(small("llava_v1_5_7b", layers=2)).load()


def wide(sources, answer: str = "384") -> PromptSample:
    """A page of one row of four cells, twice as wide as high, so that LLaVA-1.5 sees cells 1 and 2 alone."""
    image = Image.new("RGB", (672, 336), (200, 90, 30))
    return PromptSample("wide", chat("A?", 1), [image], answer=answer, sources=sources, grid=(1, 4))


def test_characters_that_are_cut_away_are_left_out_and_counted(cropping):
    seen, unseen = ((0, 0, 1),), ((0, 0, 3),)
    both, all_seen = (visual_hits(cropping, wide((seen, second, seen)), {}) for second in (unseen, seen))
    assert (both.tokens, both.hidden, all_seen.tokens, all_seen.hidden) == (3, 1, 3, 0)
    data = head_scores([both, all_seen], {}, 2)
    assert data["hidden"] == {"tokens": 1, "of": 6}
    assert all(math.isfinite(score) for row in data["scores"] for score in row)
    assert set(head_scores([all_seen], {}, 2)) == {"scores", "kv_heads"}


def test_a_word_mark_of_its_own_shows_no_character():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.BPE({"<unk>": 0, "\u2581": 1, "3": 2, "8": 3, "4": 4}, [], unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer, sources = PreTrainedTokenizerFast(tokenizer_object=words), (((0, 0, 1),), ((0, 0, 2),), ((0, 0, 3),))
    assert tokenizer("384", return_offsets_mapping=True)["offset_mapping"][:2] == [(0, 1), (0, 1)], (
        "so the trap is there"
    )
    assert answer_cells(tokenizer, wide(sources)) == ([1, 2, 3, 4], [[], [(0, 0, 1)], [(0, 0, 2)], [(0, 0, 3)]])


def test_a_character_that_is_also_shown_elsewhere_is_not_hidden(cropping):
    twice = ((0, 0, 0), (0, 0, 2))
    assert visual_hits(cropping, wide((twice, twice, twice)), {}).hidden == 0


def test_pages_that_show_no_answer_at_all_are_refused(cropping):
    unseen = ((0, 0, 0),)
    lost = visual_hits(cropping, wide((unseen, unseen, unseen)), {})
    assert lost.hidden == lost.tokens > 0 and not any(map(any, lost.hits))
    with pytest.raises(CalibrationError, match="no visual token shows any of the .* answer tokens of 2 pages"):
        head_scores([lost, lost], {}, 2)
    one_seen = SampleHits(lost.hits, tokens=1, hidden=0)
    assert head_scores([lost, one_seen], {}, 2)["hidden"] == {"tokens": lost.tokens, "of": lost.tokens + 1}


@cover.few("name", ["llava_v1_5_7b", "llava_v1_6_mistral_7b", "internvl3_2b"])
def test_the_left_half_of_a_page_scores_what_the_models_own_attention_says(name):
    """Its tokens by hand: 24 or 16 columns of the whole, and in LLaVA-NeXT 48 rows of 48 columns and a newline behind."""
    from mmkv_bench.generation.encode import encode

    made, left = Source.of(small(name, layers=2)).load(), ((0, 0, 0),)
    noise = torch.randint(0, 255, (448, 448, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(4)).numpy()
    sources, images = (left, left, left), [Image.fromarray(noise)]
    sample = PromptSample("half", chat("A?", 1), images, answer="384", sources=sources, grid=(1, 2))
    prompt = encode(made.processor, made.family, "half", sample.messages, sample.images)
    side = 16 if name == "internvl3_2b" else 24
    half = [row * side + column for row in range(side) for column in range(side // 2)]
    if name == "llava_v1_6_mistral_7b":
        half += [side * side + row * 49 + column for row in range(48) for column in range(24)]
    visual = prompt.types[0].nonzero().flatten()
    region = visual[half].tolist()
    ids = made.tokenizer("384", add_special_tokens=False)["input_ids"]
    longer = dict(prompt.inputs, input_ids=torch.cat([prompt.input_ids, torch.tensor([ids[:-1]])], 1))
    longer = {key: value for key, value in longer.items() if key in ("input_ids", "pixel_values", "image_sizes")}
    rows = stock_attention(made.model, longer, 3)
    measured = visual_hits(made, sample, {})
    assert measured.hits == [pytest.approx(oracle.hits(layer, [region] * 3)) for layer in rows]
    assert any(map(any, measured.hits)), "no head hits, so nothing is compared"


COMMANDED = (
    "internvl3_2b",
    "llava_onevision_7b",
    "llava_v1_5_7b",
    "llava_v1_6_mistral_7b",
    "llava_v1_6_vicuna_7b",
    "llava_video_7b",
)


@pytest.mark.full
@cover.few("name", COMMANDED)
def test_the_command_measures_every_family_and_the_method_takes_what_it_writes(name, tmp_path, capsys):
    """A narrow model, saved and measured as any checkpoint."""
    saved, file = tmp_path / "model", tmp_path / "artefact.json"
    made = Source.of(small(name, layers=2)).load()
    made.model.save_pretrained(saved)
    made.processor.save_pretrained(saved)
    kinds = ["lookup"] if name == "llava_v1_6_vicuna_7b" else ["lookup", "mi_lookup"]  # four pages exceed its context
    words = ["sparsemm", "--path", str(saved), "--name", "mine", "--dtype", "float32", "--samples", "2"]
    assert main([*words, "--kinds", ",".join(kinds), "--out", str(file)]) == 0, capsys.readouterr().err
    data = load("sparsemm", str(file), "mine", folder_fingerprint(saved)).data
    assert data["kv_heads"] == made.family.num_kv_heads
    assert [len(row) for row in data["scores"]] == [made.family.num_query_heads] * 2
    assert all(math.isfinite(score) and score >= 0 for row in data["scores"] for score in row)
    caps = HeadScores(calibration=data).model_caps(64, 1000, 2, data["kv_heads"])
    assert sum(map(sum, caps)) == 64 * 2 * data["kv_heads"] or not any(map(any, data["scores"]))


@pytest.mark.slow
def test_a_model_without_images_is_refused():
    with pytest.raises(UnsupportedError, match="takes no images; choose a model of a family that does"):
        visual_hits(Source.of(small("llama_3_8b", layers=1)).load(), page("lookup", "small", "train", 0), {})


def test_calibration_reads_no_test_pages():
    for split in ("test", "test_typeface"):
        with pytest.raises(CalibrationError, match="cannot be calibrated on; "):
            pages(TASKS, "small", split, 3)
    with pytest.raises(CalibrationError, match="samples=0 must be 1 or more"):
        pages(TASKS, "small", "train", 0)
    assert [place[0] for place in pages(("a", "b"), "small", "train", 5)] == ["a", "b", "a", "b", "a"]
    assert [place[3] for place in pages(("a", "b"), "small", "train", 5)] == [0, 0, 1, 1, 2]
