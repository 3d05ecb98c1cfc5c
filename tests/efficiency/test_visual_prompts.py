"""Promise: prompts of pictures and of videos have exactly the tokens that were asked for, as many of them visual as fit, through
the model's own processor; they are measured as prompts of text are, the vision tower as a phase of its own."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from mmkv_bench.config.compose import compose
from mmkv_bench.efficiency.measure import Bench
from mmkv_bench.efficiency.plan import plan_passes
from mmkv_bench.efficiency.prompts import LEAST_TEXT, visual_prompt
from mmkv_bench.efficiency.sizing import Rules
from mmkv_bench.errors import MMKVError
from mmkv_bench.families.facts import model_facts
from mmkv_bench.families.registry import image_tokens, video_tokens
from mmkv_bench.generation.result import CellSpec
from mmkv_bench.generation.unshared_generation import generate_alone
from mmkv_bench.models.load import LoadedModel
from mmkv_bench.models.processor import build_processor
from mmkv_bench.models.shape import config_of
from mmkv_bench.models.source import Source
from mmkv_bench.plan.validate import validate
from mmkv_bench.store.store import Store
from tests.each import each
from tests.run.setting import done, go

FAMILIES = {  # how many of a prompt's tokens a family's pictures can be, whatever the rest
    "qwen2_vl_7b": 0.95,
    "qwen2_5_vl_3b": 0.95,
    "qwen3_vl_8b": 0.95,
    "llava_v1_6_mistral_7b": 0.7,
    "llava_onevision_7b": 0.8,
    "llava_video_7b": 0.8,
    "internvl3_2b": 0.85,
}
SOME = ("qwen2_5_vl_3b", "internvl3_2b")
LENGTH = 3100


@functools.cache
def model(name: str):
    return compose([f"model={name}"]).model


@functools.cache
def shown(name: str) -> LoadedModel:
    """A model without weights: its processor alone makes prompts."""
    settings = model(name)
    config = config_of(settings.shape)
    processor = build_processor(config, settings.processor)
    tokenizer = getattr(processor, "tokenizer", processor)
    return LoadedModel(name, None, processor, tokenizer, model_facts(config, tokenizer), torch.device("cpu"), "float32")


def check(name: str, kind: str, share: float) -> None:
    loaded = shown(name)
    prompt = visual_prompt(loaded, kind, LENGTH)
    ids, visual = prompt.input_ids[0], prompt.types[0] > 0
    assert prompt.length == LENGTH == prompt.types.shape[1]
    assert share * LENGTH < prompt.visual_tokens <= LENGTH - LEAST_TEXT
    assert not visual[-LEAST_TEXT:].any() and prompt.encode_s > 0
    for tensor in prompt.inputs.values():
        assert tensor.device.type == "cpu" and (
            tensor.ndim != 2 or tensor.shape[0] > 1 or tensor.shape[1] in (LENGTH, 2, 3)
        )
    alike = visual_prompt(loaded, kind, LENGTH)
    assert torch.equal(alike.input_ids, prompt.input_ids)
    assert all(torch.equal(alike.inputs[key], value) for key, value in prompt.inputs.items())
    asked = loaded.processor.apply_chat_template(
        [{"role": "user", "content": "Z"}], tokenize=False, add_generation_prompt=True
    )
    tail = asked.rpartition("Z")[2]
    assert loaded.tokenizer.decode(ids).endswith(tail) and len(tail) > 0


@pytest.mark.full
@each("name", sorted(FAMILIES))
@each("kind", ["image", "video"])
def test_every_family_makes_prompts_of_the_exact_length_that_are_visual_as_far_as_they_can(name, kind):
    if not (kind == "video" and name == "llava_v1_6_mistral_7b"):  # takes no videos
        check(name, kind, FAMILIES[name] if kind == "image" else 0.6)


@pytest.mark.slow
def test_pictures_fill_a_prompt_of_the_exact_length():
    check("qwen2_5_vl_3b", "image", 0.95)


def rules(name: str, frames: int | None = None) -> Rules:
    return Rules(model(name).shape["model_type"], model(name).processor, frames=frames)


@each("name", SOME)
def test_no_further_picture_fits_and_none_is_too_much(name):
    check_pictures(name)


@each("name", SOME)
def test_a_video_has_the_frames_that_were_asked_for_where_they_fit_and_as_many_as_fill_it_elsewhere(name):
    check_video(name)


@pytest.mark.full
@each("name", sorted(set(FAMILIES) - set(SOME)))
def test_sizes_fill_a_prompt_in_every_family(name):
    check_pictures(name)
    if name != "llava_v1_6_mistral_7b":  # takes no videos
        check_video(name)


def check_pictures(name: str) -> None:
    of, beside = rules(name), 4
    smallest = min(
        image_tokens(of.model_type, of.settings, edge * c, edge * r, 2)
        for edge in (28, 336, 384, 448)
        for c, r in [(1, 1), (2, 1), (1, 2), (2, 2)]
    )
    for room in (100, 1500, 4000, 33000):
        sizes = of.pictures(room, beside)
        used = sum(image_tokens(of.model_type, of.settings, *size, len(sizes)) + beside for size in sizes)
        assert used <= room
        if len(sizes) > 1 and not name.startswith("qwen"):
            assert room - used < smallest + beside, room
        if name.startswith("qwen"):
            assert used >= 0.95 * room, room


def check_video(name: str) -> None:
    for room in (1500, 6000, 33000):
        asked, free = rules(name, 8).video(room), rules(name).video(room)
        used = [
            video_tokens(rules(name).model_type, rules(name).settings, frames, *size) for frames, size in (asked, free)
        ]
        assert asked[0] <= 8 and max(used) <= room
        assert used[1] >= 0.75 * room or name == "qwen3_vl_8b", (room, free)  # whose video has 12,288 tokens at most
    assert rules(name).video(0) is None


ASKED = ["scenario=efficiency", "budget=24", "repeats=1", "new_tokens=4"]


@pytest.mark.full
def test_pictures_are_measured_like_text_with_the_tower_as_a_phase_of_its_own(tmp_path):
    asked = [*ASKED, "method=[snapkv,mmshift]", "lengths=200", "prompts=[text,image]"]
    outcome = done(tmp_path, *asked)
    rows = Store(tmp_path).timings().to_pylist()
    assert {(row["prompts"], row["dataset"]) for row in rows} == {("text", "made_up_text"), ("image", "made_up_image")}
    for row in rows:
        assert row["prompt_tokens"] == 200 and (100 < row["visual_tokens"] < 200) == (row["prompts"] == "image")
    passes: dict = {}
    for row in rows:
        if row["prompts"] == "image":
            passes.setdefault((row["cell"], row["repeat"]), {})[row["phase"]] = row
        else:
            assert row["phase"] != "vision"
    assert len(passes) == 3 * 2
    for (_, repeat), phases in passes.items():
        if repeat is None:
            peaks = {name: row["peak_allocated"] for name, row in phases.items()}
            assert 0 < peaks["vision"] <= peaks["prefill"] <= peaks["total"]
            continue
        seconds = {name: row["seconds"] for name, row in phases.items()}
        parts = sum(seconds[name] for name in ("vision", "prefill", "score", "select", "reduce", "first_token"))
        assert seconds["vision"] > 0 and math.isclose(parts, seconds["ttft"], rel_tol=1e-9)
    lines = outcome.document["efficiency"]
    assert sum(line["tpot_ratio_low"] == line["tpot_ratio_high"] == 1 for line in lines) == 2, "one full for each kind"
    assert all((line["vision_median"] is not None) == (line["prompts"] == "image") for line in lines)
    assert "200 prompt tokens (image: " in outcome.out and "200 prompt tokens, batch 1" in outcome.out
    assert "peak MiB by phase" in outcome.out and "resident set" in outcome.out
    assert done(tmp_path, *asked).document["ran"] == 0


def answers_as_stock(loaded: LoadedModel, kind: str, length: int, *words: str) -> None:
    prompt, bench = visual_prompt(loaded, kind, length), Bench(loaded, 5, "sdpa")
    config = composed(f"prompts={kind}", "protocol=[paper,strict]", f"lengths={length}", *words)
    for cell in plan_passes(config).cells:
        spec = CellSpec(cell.cell, cell.compressor, cell.budget, cell.protocol)
        never = loaded.model.config.get_text_config().vocab_size  # an end that no token is
        stock = generate_alone(
            loaded.model, prompt.inputs, spec.compressor, spec.budget, spec.protocol, token_types=prompt.types,
            max_new_tokens=5, eos_token_id=never, pad_token_id=0, identity=prompt.identity,
        )  # fmt: skip
        assert bench.measure_times([prompt], spec).answers == stock.sequences[:, length:].tolist(), cell.label


@pytest.mark.full
def test_a_timed_pass_over_pictures_answers_as_stock_generate_does():
    loaded = Source.of(compose(["model.device=cpu"]).model).load()
    answers_as_stock(loaded, "image", 180, "method=[full,snapkv,mmshift,kivi]")


@pytest.mark.full
def test_a_timed_pass_over_a_video_answers_as_stock_generate_does():
    random = ["model=qwen2_5_vl_3b", "model.weights=random", "model.layers=1", "model.dtype=float32"]
    loaded = Source.of(compose([*random, "model.device=cpu"]).model).load()
    answers_as_stock(loaded, "video", 400, *random, "method=[full,snapkv,mmshift]")


def composed(*words: str):
    config = compose([*ASKED, "model.device=cpu", *words])
    validate(config)
    return config


def test_cells_of_text_are_those_that_they_were_before_there_were_pictures():
    text = plan_passes(composed("method=snapkv", "lengths=64")).cells
    both = plan_passes(composed("method=snapkv", "lengths=64", "prompts=[image,text]")).cells
    assert {cell.cell for cell in text} < {cell.cell for cell in both} and len(both) == 2 * len(text)
    assert {(cell.dataset, cell.dataset_fingerprint) for cell in text} == {("made_up_text", "scheme 1")}


@pytest.mark.slow
@each(
    "words, said",
    [
        (["prompts=picture"], "prompts=picture is unknown"),
        (["method=look_m"], "method look_m needs visual tokens, but prompts=text has none"),
        (["method=look_m", "prompts=[image,text]"], "choose one, or leave the method out"),
        (
            ["model=llava_v1_5_7b", "model.weights=random", "prompts=video"],
            "LLaVA-1.5 takes no videos; allowed: text",
        ),
        (
            ["model=llama_3_8b", "model.weights=random", "prompts=image"],
            "takes no images; allowed: text; choose one",
        ),
    ],
)
def test_prompts_that_cannot_be_are_refused_in_one_sentence(words, said):
    with pytest.raises(MMKVError) as caught:
        plan_passes(composed(*words))
    assert said in str(caught.value)


def test_a_length_that_holds_no_picture_is_refused_before_any_pass(tmp_path):
    outcome = go(tmp_path, *ASKED, "method=snapkv", "lengths=16", "prompts=image")
    assert outcome.code == 2 and "lengths=16 is too short for any image of tiny" in outcome.document["error"]
    assert Store(tmp_path).timings().num_rows == 0
