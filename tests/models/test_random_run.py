"""A run with random weights from beginning to end: rows say so, are found again, and prompts beyond the context are rows."""

from __future__ import annotations

import pytest

from tests import cover
from tests.each import each
from tests.families.shapes import small
from tests.run.setting import cells, done, go, responses

NARROW = [
    "model=qwen2_5_vl_3b",
    "model.weights=random",
    "model.layers=2",
    "model.dtype=float32",
    *(f"model.shape.text_config.{key}={value}" for key, value in (("hidden_size", 64), ("intermediate_size", 96),
      ("num_attention_heads", 4), ("rope_parameters.mrope_section", "[2,3,3]"))),
    *(f"model.shape.vision_config.{key}={value}" for key, value in (("hidden_size", 32), ("intermediate_size", 48),
      ("num_heads", 2), ("out_hidden_size", 64))),
]  # fmt: skip
ASKED = ["dataset=pages_walk", "method=[full,snapkv]", "budget=32", "limit=2", "stage=generate", *NARROW]


@pytest.mark.full
def test_a_random_run_says_what_it_is_and_finds_its_rows_again(tmp_path):
    first = done(tmp_path, *ASKED)
    assert "random weights (answers mean nothing: speed and memory only)" in first.out
    assert "prints the tables again" not in first.out
    rows = responses(tmp_path)
    assert len(rows) == 4 and {row["status"] for row in rows.values()} == {"ok"}
    assert {row["weights"] for row in cells(tmp_path).values()} == {"random"}
    assert {row["dtype"] for row in cells(tmp_path).values()} == {"float32"}
    assert done(tmp_path, *ASKED).generated == 0, "the same random weights are the same model"
    assert done(tmp_path, *ASKED, "model.layers=1").generated == 2, "fewer layers are another model"


@pytest.mark.full
def test_a_prompt_beyond_the_context_is_a_row_with_an_error_and_the_run_goes_on(tmp_path):
    outcome = go(tmp_path, *ASKED, "model.shape.text_config.max_position_embeddings=100")
    assert outcome.code == 1
    found = responses(tmp_path).values()
    assert len(found) == 4 and {row["status"] for row in found} == {"error"}
    assert all("more than the model's context of 100" in row["error"] for row in found)


@pytest.mark.full
@cover.few("sharing", ["on", "off"], first=1)
def test_an_answer_ends_where_the_context_does_and_says_so(tmp_path, sharing):
    one = [word.replace("[full,snapkv]", "[snapkv]") for word in ASKED]
    asked = [*one, f"sharing={sharing}", "datasets.pages_walk.generation.max_new_tokens=12", "fidelity=off"]
    done(tmp_path / "free", *asked)
    free = responses(tmp_path / "free").values()
    longest = max(row["prompt_tokens"] for row in free)
    assert {row["n_tokens"] for row in free} == {12}
    done(tmp_path / "tight", *asked, f"model.shape.text_config.max_position_embeddings={longest + 4}")
    for row in responses(tmp_path / "tight").values():
        room = min(12, longest + 4 - row["prompt_tokens"] + 1)
        assert (row["n_tokens"], row["finish_reason"], len(row["token_ids"])) == (room, "length", room)
        assert ("context_end" in row["fallback"]) == (room < 12)


@pytest.mark.full
def test_rows_of_a_refused_prompt_count_nothing(tmp_path):
    go(tmp_path, *ASKED, "model.max_prompt_tokens=50")
    for row in responses(tmp_path).values():
        assert (
            row["status"] == "error"
            and "model.max_prompt_tokens=50; raise the limit, or lower model.max_pixels" in row["error"]
        )
        counted = ("prompt_tokens", "context_tokens", "visual_tokens", "entries_resident", "bytes_full", "bytes_device")
        assert [row[name] for name in counted] == [None] * len(counted)


def test_a_revision_of_weights_without_commits_is_refused(tmp_path):
    outcome = go(tmp_path, *ASKED, "model.revision=deadbeef")
    assert outcome.code == 2 and "model.revision=deadbeef is a commit of a hub repository" in outcome.err
    assert "these weights are random" in outcome.err


@each("images", [1, 8])
def test_llava_1_5_has_room_for_seven_images(images):
    from PIL import Image

    from mmkv_bench.errors import UnsupportedError
    from mmkv_bench.generation.encode import encode
    from mmkv_bench.models.source import Source

    loaded = Source.of(small("llava_v1_5_7b", layers=1)).load()
    parts = [{"type": "image"}] * images + [{"type": "text", "text": "which?"}]
    asked = [{"role": "user", "content": parts}]
    pictures = [Image.new("RGB", (40, 30), (9 * i, 0, 0)) for i in range(images)]
    if images == 1:
        assert encode(loaded.processor, loaded.family, "one", asked, pictures).visual_tokens == 576
        return
    with pytest.raises(UnsupportedError, match="more than the model's context of 4096"):
        encode(loaded.processor, loaded.family, "eight", asked, pictures)
