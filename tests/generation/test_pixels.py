"""Promise: `pixels` answers as plain `generate()` does on pictures that somebody made smaller by hand, with rows of the budget
that was asked for."""

from __future__ import annotations

from importlib.resources import files

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from mmkv_bench import attach, method
from mmkv_bench.compression.budget import Budget
from mmkv_bench.compression.compressor import full
from mmkv_bench.config.files import conf_dir
from mmkv_bench.errors import UnsupportedError
from mmkv_bench.families.facts import model_facts
from mmkv_bench.families.registry import check_smaller
from mmkv_bench.forecast.memory import QUESTION
from mmkv_bench.generation.encode import encode
from mmkv_bench.generation.engine import Engine
from mmkv_bench.generation.result import CellSpec
from mmkv_bench.generation.rules import DecodeRules
from mmkv_bench.generation.smaller_prompts import LEVELS, SmallerPrompts, answered, resampled
from mmkv_bench.models.processor import build_processor
from mmkv_bench.models.shape import config_of
from mmkv_bench.tiny.pages import make_sample

FOLDER = files("mmkv_bench") / "tiny" / "weights"
PIXELS = method("pixels")
NEW = {"max_new_tokens": 6, "do_sample": False}


def cell(budget: int | str, protocol: str = "paper") -> CellSpec:
    return CellSpec(f"{budget} {protocol}", PIXELS, Budget.parse(budget), protocol)


@pytest.fixture(scope="module")
def tiny():
    return AutoModelForImageTextToText.from_pretrained(FOLDER).eval(), AutoProcessor.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def page():
    sample = make_sample("lookup", "small", "test", 0)
    content = [*({"type": "image"} for _ in sample.images), {"type": "text", "text": sample.question}]
    return sample.images, [{"role": "user", "content": content}]


def smaller_of(processor, family, images, messages, videos=()) -> SmallerPrompts:
    def made(share: float):
        return encode(processor, family, "page", messages, images, videos, share=share)

    return SmallerPrompts(made, made(1.0), family)


def by_hand(processor, images, messages, entries: int):
    """The processor's tensors at the largest of all sizes with at most so many tokens; every size is tried."""
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    best, sizes = None, set()
    for level in range(1, LEVELS):
        size = tuple(max(1, round(side * level / LEVELS)) for side in images[0].size)
        if size in sizes:
            continue
        sizes.add(size)
        inputs = processor(
            text=[text], images=[images[0].convert("RGB").resize(size, Image.BICUBIC)], return_tensors="pt"
        )
        length = inputs["input_ids"].shape[1]
        if length <= entries and (best is None or length > best["input_ids"].shape[1]):
            best = inputs
    return best


@pytest.mark.full
def test_tokens_are_those_of_plain_generate_on_a_picture_made_smaller_by_hand(tiny, page):
    model, processor = tiny
    images, messages = page
    family = model_facts(model.config)
    smaller = smaller_of(processor, family, images, messages)
    whole = smaller.whole.length
    specs = [cell("60%"), cell("60%", "strict"), cell(whole // 2), cell(2), cell(whole)]
    apart = resampled(specs, smaller.whole, family)
    assert apart == specs[:-1], "the prompt fits the last one's budget: it is the engine's"
    rules = DecodeRules.read(model.generation_config, NEW, processor.tokenizer)
    with Engine(model, family, rules, processor.tokenizer) as engine:
        groups = list(answered(smaller, apart, lambda prompt, own: iter([engine.answer(prompt, own)])))
    found = {result.cell: result for results in groups for result in results}
    assert {*found} == {spec.cell for spec in apart}
    heads = model.config.text_config.num_key_value_heads * model.config.text_config.num_hidden_layers
    for spec in apart[:-1]:
        result, entries = found[spec.cell], spec.entries(whole)
        reference = by_hand(processor, images, messages, entries)
        length = reference["input_ids"].shape[1]
        with torch.no_grad():
            tokens = model.generate(**reference, **NEW)[0, length:].tolist()
        assert (result.status, result.token_ids) == ("ok", tokens)
        assert entries - 40 < length <= entries < whole, "the budget says something"
        assert {count for layer in result.kept for count in layer} == {length}
        assert (result.entries_resident, result.entries_asked) == (length * heads, entries * heads)
        assert (result.context_tokens, result.budget_entries, result.fallback) == (whole, entries, [])
        slot = 2 * 4 * model.config.text_config.hidden_size // model.config.text_config.num_attention_heads
        assert (result.bytes_full, result.bytes_device) == (whole * heads * slot, length * heads * slot)
        assert result.tokens_from_compressed == result.n_tokens
    over = found[apart[-1].cell]
    assert over.fallback == ["pixels_over_budget"] and over.entries_resident > over.entries_asked == 2 * heads


MODELS = {
    "internvl3_2b": (448 * 3, 448 * 2),
    "qwen2_5_vl_7b": (840, 1120),
    "llava_v1_6_vicuna_7b": (900, 700),
    "smolvlm_256m": (900, 700),
}


def processed(name: str):
    """The processor and the family of a model, of true settings."""
    from omegaconf import OmegaConf

    node = OmegaConf.to_container(OmegaConf.load(conf_dir() / "model" / f"{name}.yaml"))
    config = config_of(node["shape"])
    return build_processor(config, node["processor"]), model_facts(config)


def asked(kind: str) -> list[dict]:
    return [{"role": "user", "content": [{"type": kind}, {"type": "text", "text": QUESTION}]}]


@pytest.mark.full
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name != "internvl3_2b")) for name in MODELS]
)
def test_prompts_of_each_kind_of_processor_are_the_largest_within_the_budget(name):
    made = [smaller_of(*processed(name), [Image.new("RGB", MODELS[name])], asked("image"))]
    if name == "internvl3_2b":  # of a video: fewer frames
        frames = [Image.new("RGB", (448, 448), (8 * place, 0, 0)) for place in range(6)]
        made.append(smaller_of(*processed(name), (), asked("video"), [frames]))
    for smaller in made:
        lengths = set()
        for share in ("75%", "40%", 8):
            spec = cell(share)
            level, entries = smaller.within(spec), spec.entries(smaller.whole.length)
            length = smaller.at(level).length
            lengths.add(length)
            assert length <= entries or (level == 1 and share != "75%")
            assert smaller.at(level + 1).length > entries
        assert len(lengths) > 1


def test_what_cannot_show_smaller_pictures_is_refused_in_one_sentence(tiny):
    model, _ = tiny
    with pytest.raises(UnsupportedError, match="compresses no cache"), attach(model, "pixels", 8):
        pass
    with pytest.raises(UnsupportedError, match="pixels evicts nothing"):
        PIXELS.check_only_evicts("masked")
    from omegaconf import OmegaConf

    node = OmegaConf.load(conf_dir() / "model" / "llava_v1_5_7b.yaml")
    with pytest.raises(UnsupportedError, match="cannot get fewer tokens"):
        check_smaller(model_facts(config_of(OmegaConf.to_container(node["shape"]))).rules)
    assert PIXELS.resamples and not full().resamples
