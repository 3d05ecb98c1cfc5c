"""Where a model comes from, what identifies it, and what is refused before anything is loaded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mmkv_bench.config.compose import compose
from mmkv_bench.config.names import UNAVAILABLE, unavailable
from mmkv_bench.config.schema import Model, resolve_path
from mmkv_bench.errors import ConfigError, UnsupportedError
from mmkv_bench.families.facts import model_facts, stated
from mmkv_bench.families.facts import read as read_config
from mmkv_bench.families.registry import families
from mmkv_bench.models import processor, random_weights
from mmkv_bench.models.load import load_config, load_model
from mmkv_bench.models.shape import config_of, values_of
from mmkv_bench.models.source import Source
from mmkv_bench.plan.identity import resolve_dtype
from mmkv_bench.plan.validate import validate
from tests import cover
from tests.each import each
from tests.families.shapes import NAMES, node, small

TINY = "pkg://mmkv_bench/tiny/weights"


def random(name: str = "qwen2_5_vl_7b", **changes) -> Source:
    return Source.of(node(name, weights="random", **changes))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved narrow LLaVA-NeXT with its processor: a checkpoint folder as any other."""
    path = tmp_path_factory.mktemp("llava")
    loaded = Source.of(small("llava_v1_6_vicuna_7b", layers=2)).load()
    loaded.model.save_pretrained(path)
    loaded.processor.save_pretrained(path)
    return path


def test_the_three_kinds(folder):
    assert Source.of(node("qwen2_5_vl_7b")).kind == "hub"
    assert Source.of(node("tiny")).kind == "folder"
    assert Source.of(node("llava_v1_6_vicuna_7b", weights=str(folder))).kind == "folder"
    assert Source.of(node("hf", path=str(folder))).kind == "folder"
    assert random().kind == "random"


def test_the_fingerprint_of_random_weights_says_what_they_are():
    first = random().fingerprint()
    assert first == random().fingerprint() and first[1] is None and len(first[0]) == 16
    assert first == random(dtype="float32", attention="eager", min_pixels=3136).fingerprint(), "columns of their own"
    others = [random(layers=2), random("qwen2_5_vl_3b"), random("qwen2_vl_7b")]
    other = node("qwen2_5_vl_7b", weights="random")
    other.processor["image"]["max_pixels"] = 1003520
    others.append(Source.of(other))
    assert len({first, *(source.fingerprint() for source in others)}) == 1 + len(others)


@each("changed_rule", [random_weights, processor, "llava_video"])
def test_another_rule_for_weights_tokens_or_our_own_architecture_is_another_fingerprint(monkeypatch, changed_rule):
    names, of_all = ("qwen2_5_vl_7b", "llava_video_7b"), changed_rule != "llava_video"
    first = [random(name).fingerprint() for name in names]
    if of_all:
        monkeypatch.setattr(changed_rule, "SCHEME", changed_rule.SCHEME + 1)
    else:
        monkeypatch.setitem(families(), changed_rule, replace(families()[changed_rule], classes_version=2))
    changed = [random(name).fingerprint() != before for name, before in zip(names, first, strict=True)]
    assert changed == [of_all, True]


def test_a_folder_of_weights_has_the_folders_fingerprint(folder):
    named = Source.of(node("llava_v1_6_vicuna_7b", weights=str(folder)))
    assert named.fingerprint() == Source.of(node("hf", path=str(folder))).fingerprint()
    assert named.fingerprint()[1] is None


def test_a_saved_random_model_loads_again_as_what_it_was(folder):
    model = small("llava_v1_6_vicuna_7b", layers=2)
    expected = random_weights.build(config_of(model.shape, 2), dtype=torch.float32, device=torch.device("cpu"))
    loaded = Source.of(node("hf", path=str(folder), dtype="float32", device="cpu")).load()
    found = loaded.model.state_dict()
    assert all(torch.equal(found[key], value) for key, value in expected.state_dict().items())
    assert loaded.family.max_context == 4096 and loaded.family.image_token_ids == (32000,)


@each(
    ("name", "changes", "words"),
    [
        ("hf", {"weights": "random"}, "model=hf has no shape, so its weights cannot be random; allowed: gemma3_1b"),
        ("tiny", {"weights": "random"}, "model=tiny has no shape"),
        ("qwen2_5_vl_7b", {"layers": 2}, "model.layers=2 needs random weights"),
        ("qwen2_5_vl_7b", {"weights": "/no/such/folder"}, "model.weights=/no/such/folder is not a folder"),
        ("qwen2_5_vl_7b", {"weights": "rnadom"}, "allowed: hub, random, the folder of a checkpoint, or a GGUF file"),
        ("hf", {}, "needs model.path"),
    ],
)
def test_what_has_no_weights_is_refused(name, changes, words):
    with pytest.raises(ConfigError, match=words):
        Source.of(node(name, **changes))


def test_a_folder_of_another_architecture_is_refused(folder):
    source = Source.of(node("qwen2_5_vl_7b", weights=str(folder)))
    with pytest.raises(ConfigError, match=r"model=qwen2_5_vl_7b is a qwen2_5_vl model, but .* has a llava_next model"):
        assert source.hf_config


def test_a_folder_of_another_checkpoint_of_the_family_is_refused(folder):
    source = Source.of(node("llava_v1_6_vicuna_7b", weights=str(folder)))
    with pytest.raises(
        ConfigError, match=r"is not llava_v1_6_vicuna_7b: it has num_hidden_layers 2 for 32, hidden_size"
    ):
        assert source.hf_config


def test_weights_of_a_class_that_transformers_lacks_are_refused(tmp_path):
    values = {"model_type": "qwen2", "architectures": ["LlavaQwenForCausalLM"], "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(UnsupportedError, match="has weights for LlavaQwenForCausalLM, a class that transformers does"):
        load_config(str(tmp_path))


def test_a_truncated_weights_file_is_one_sentence(folder, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match="cannot be loaded") as refused:
        load_model(Model(name="cut", device="cpu"), str(tmp_path))
    assert "\n" not in str(refused.value)


# ---------------------------------------------------------------------- limits
@pytest.mark.full
def test_pixel_limits_reach_the_processor_of_models_that_have_them():
    limits = {"min_pixels": 100 * 28 * 28, "max_pixels": 400 * 28 * 28, "video_max_pixels": 64 * 28 * 28}
    processor = Source.of(small("qwen2_5_vl_7b", **limits)).load().processor
    assert dict(processor.image_processor.size) == {"shortest_edge": 78400, "longest_edge": 313600}
    assert processor.video_processor.size["longest_edge"] == 50176
    from PIL import Image

    for side, tokens in ((56, range(100, 130)), (2000, range(370, 401))):
        made = processor(
            text=["<|vision_start|><|image_pad|><|vision_end|>"],
            images=[Image.new("RGB", (side, side))],
            return_tensors="pt",
        )
        assert int((made["input_ids"] == 151655).sum()) in tokens


@pytest.mark.full
def test_a_limit_on_a_video_as_a_whole_grows_with_its_frames():
    processor = Source.of(small("qwen3_vl_8b", video_max_pixels=65536, frames=8)).load().processor
    assert processor.video_processor.size["longest_edge"] == 8 * 65536


@pytest.mark.full
@each("name", ["llava_v1_5_7b", "llava_onevision_7b", "internvl3_8b", "llama_3_8b"])
@each("key", ["max_pixels", "min_pixels", "video_max_pixels"])
def test_pixel_limits_of_models_without_them_are_refused(name, key):
    with pytest.raises(ConfigError, match=f"model.{key} has no effect on"):
        Source.of(small(name, **{key: 50176})).load()


def test_limits_that_exclude_each_other_are_refused():
    with pytest.raises(ConfigError, match="at least 20000000 and at most 12845056 pixels exclude each other"):
        Source.of(small("qwen2_5_vl_7b", min_pixels=20_000_000)).load()


# ---------------------------------------------------------------------- names
@cover.few("name", NAMES, keep=5)
def test_every_shaped_model_composes_with_every_kind_of_weights(name, folder):
    for words in ([], ["model.weights=random"], ["model.weights=random", "model.layers=2"]):
        validate(compose([f"model={name}", *words]))


def test_the_path_of_the_embedded_model_is_its_own():
    assert compose([]).model.path == TINY and Source.of(compose([]).model).path.endswith("weights")


@each("name", [*UNAVAILABLE, "longva", "LongVILA", "qwen-vl", "InternVL-v1.5-7B", "llava_onevision_1_5"])
def test_asking_for_a_model_that_cannot_run_says_why_and_what_it_needs(name):
    with pytest.raises(ConfigError) as refused:
        compose([f"model={name}"])
    sentence = str(refused.value)
    assert sentence.startswith(f"model={name} cannot be run: ") and "it would need" in sentence
    assert "\n" not in sentence and "unknown" not in sentence
    assert all(model in NAMES for model in unavailable(name).instead), "what is offered instead exists"


def test_other_names_are_unknown():
    assert unavailable("qwen2_5_vl_7b") is None and unavailable("tiny") is None and unavailable("") is None
    with pytest.raises(ConfigError, match=r"unknown model 'qwen2_5_vl_8b'; did you mean .*'qwen2_5_vl_7b'"):
        compose(["model=qwen2_5_vl_8b"])


@pytest.mark.full
def test_what_a_config_states_is_what_transformers_makes_of_it():
    """Every shape of `conf/model` and the embedded model say all that planning asks; what leaves something to a default, or
    is not supported, is left to transformers."""
    for name in NAMES:
        for layers in (None, 2):
            shape = node(name).shape
            read = stated(values_of(shape, layers))
            config = config_of(shape, layers)
            assert model_facts(read) == model_facts(config), name
            assert resolve_dtype("auto", read, None) == resolve_dtype("auto", config, None), name
    tiny = resolve_path(TINY)
    assert model_facts(read_config(tiny)) == model_facts(load_config(tiny))
    values = json.loads((Path(tiny) / "config.json").read_text())
    text = values["text_config"]
    for less in (
        {key: value for key, value in values.items() if key != "image_token_id"},
        values | {"text_config": {key: value for key, value in text.items() if key != "num_key_value_heads"}},
        values | {"text_config": text | {"layer_types": ["full_attention", "sliding_attention"] * 2}},
        values | {"model_type": "bert"},
        values | {"architectures": ["OfTheirOwn"]},
        text,
    ):
        assert stated(less) is None
