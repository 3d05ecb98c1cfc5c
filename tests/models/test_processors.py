"""Processors from settings: the family's classes, the checkpoint's ids, an offline tokenizer that loses no text."""

from __future__ import annotations

import itertools

import pytest
import transformers as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mmkv_bench.config.schema import Model
from mmkv_bench.errors import ConfigError
from mmkv_bench.families.registry import family
from mmkv_bench.models.processor import (
    _CONSONANTS,
    _VOWELS,
    build_processor,
    build_tokenizer,
    chat_template,
    words,
)
from tests import cover
from tests.each import each
from tests.models.checkpoints import SETTINGS, small_config
from tests.models.checkpoints import processor as built


def tokenizer_of(name: str):
    return getattr(built(name), "tokenizer", built(name))


@pytest.mark.full
@each("name", SETTINGS)
def test_the_classes_are_the_familys_own(name):
    classes = family(small_config(name).model_type)
    if classes.processor is None:
        assert isinstance(built(name), tf.PreTrainedTokenizerFast)
        return
    assert type(built(name)).__name__ == classes.processor
    assert type(built(name).image_processor).__name__ == classes.image_processor
    assert type(getattr(built(name), "video_processor", None)).__name__ == (classes.video_processor or "NoneType")


@each("model_type", sorted({small_config(name).model_type for name in SETTINGS} - {"llama"}))
def test_the_classes_are_those_that_transformers_would_choose(model_type):
    """For a checkpoint of this type; a class that the library renames or replaces shows here."""
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
    from transformers.models.auto.video_processing_auto import VIDEO_PROCESSOR_MAPPING_NAMES

    classes = family(model_type)
    assert PROCESSOR_MAPPING_NAMES[model_type] == classes.processor
    assert (VIDEO_PROCESSOR_MAPPING_NAMES.get(model_type) or {}).get("torchvision") == classes.video_processor
    if model_type != "llava":  # its checkpoints name CLIPImageProcessor in preprocessor_config.json
        assert IMAGE_PROCESSOR_MAPPING_NAMES[model_type]["torchvision"] == classes.image_processor


@each("name", SETTINGS, keep=3)
def test_special_tokens_have_the_checkpoints_ids(name):
    tokenizer = tokenizer_of(name)
    for text, index in SETTINGS[name]["special_tokens"].items():
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == [index]
        assert tokenizer.decode([index]) == text and tokenizer.decode([index], skip_special_tokens=True) == ""
    vocabulary = small_config(name).get_text_config().vocab_size
    assert vocabulary <= len(tokenizer) <= vocabulary + 1  # InternVL's <video> lies beyond its embedding


@each("name", ["qwen2_5_vl", "llava", "llama"])
def test_text_survives_byte_by_byte(name):
    tokenizer = tokenizer_of(name)
    special = {*tokenizer.all_special_tokens, *SETTINGS[name]["special_tokens"]}  # hypothesis knows our constants

    @settings(max_examples=cover.examples(60), deadline=None, derandomize=True)
    @given(st.text(max_size=60))
    def check(text):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if not any(token in text for token in special):
            assert len(ids) == len(text.encode("utf-8", "surrogatepass"))
        assert tokenizer.decode(ids) == text

    check()


@pytest.mark.slow
def test_every_id_is_a_readable_word_of_its_own():
    tokenizer = tokenizer_of("qwen2_5_vl")
    taken = set(SETTINGS["qwen2_5_vl"]["special_tokens"].values())
    words = [tokenizer.decode([index]) for index in range(256, 152064) if index not in taken]
    assert len(set(words)) == len(words)
    assert all(text.startswith(" ") and text[1:].isalpha() and text.isascii() for text in words)
    assert tokenizer.decode([300, 5000]).split() == [tokenizer.decode([300]).strip(), tokenizer.decode([5000]).strip()]


def word(index: int) -> str:
    """Number `index` in digits that are syllables, two or more of them."""
    digits = [consonant + vowel for consonant in _CONSONANTS for vowel in _VOWELS]
    number = ""
    while index or len(number) < 4:
        index, digit = divmod(index, len(digits))
        number = digits[digit] + number
    return number


def test_words_are_numbers_in_syllables_and_all_differ():
    some = list(itertools.islice(words(), 200_000))
    assert len({*some}) == 200_000 and some[0] == word(0) and min(map(len, some)) == 4 < max(map(len, some))
    assert all(some[number] == word(number) for number in range(0, 200_000, 97))


@each(("name", "bos"), [("llava", 1), ("llava_next_mistral", 1), ("qwen2_5_vl", None), ("llama", None)])
def test_the_first_token_is_bos_where_the_checkpoint_adds_it(name, bos):
    ids = tokenizer_of(name)("a")["input_ids"]
    assert (ids[0] == bos and len(ids) == 2) if bos is not None else len(ids) == 1


@pytest.mark.full
@each("name", ["qwen2_5_vl", "llava_next", "llava_onevision", "internvl", "idefics3", "smolvlm", "llama"])
def test_a_saved_processor_is_loaded_as_a_checkpoints(name, tmp_path):
    small_config(name).save_pretrained(tmp_path)
    built(name).save_pretrained(tmp_path)
    loaded = (tf.AutoTokenizer if name == "llama" else tf.AutoProcessor).from_pretrained(tmp_path)
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Why?"}]}]
    if name == "llama":
        messages[0]["content"] = "Why?"
    text = built(name).apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == text
    media = {} if name == "llama" else {"images": [Image.new("RGB", (90, 60), (1, 2, 3))]}
    ours, theirs = (p(text=[text], return_tensors="pt", **media) for p in (built(name), loaded))
    assert ours.keys() == theirs.keys() and all(bool((ours[key] == theirs[key]).all()) for key in ours)


PROMPTS = {
    "qwen2_vl": "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n<|vision_start|><|image_pad|>"
    "<|vision_end|>Why?<|im_end|>\n<|im_start|>assistant\n",
    "qwen3_vl": "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Why?<|im_end|>\n<|im_start|>assistant\n",
    "llava": "USER: <image>\nWhy? ASSISTANT:",
    "llava_next_mistral": "[INST] <image>\nWhy? [/INST]",
    "llava_onevision": "<|im_start|>user\n<image>\nWhy?<|im_end|>\n<|im_start|>assistant\n",
    "smolvlm": "<|im_start|>User:<image>Why?<end_of_utterance>\nAssistant:",
    "internvl": "<|im_start|>user\n<IMG_CONTEXT>\nWhy?<|im_end|>\n<|im_start|>assistant\n",
}


@each("name", PROMPTS)
def test_prompts_have_the_documented_form(name):
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Why?"}]}]
    assert built(name).apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == PROMPTS[name]


def test_a_text_models_prompt_has_the_documented_form():
    messages = [{"role": "user", "content": [{"type": "text", "text": "Why?"}]}]
    assert built("llama").apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nWhy?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def changed(name: str, **parts):
    return {key: value for key, value in (SETTINGS[name] | parts).items() if value is not ...}


@each(
    ("name", "parts", "why"),
    [
        ("llava", {"templates": "vicuna"}, "did you mean 'template'"),
        ("llava", {"template": "vicunia"}, "did you mean 'vicuna'"),
        ("llava", {"template": ...}, "template is missing"),
        ("llava", {"image": ...}, "image is missing"),
        ("llava", {"video": {}}, "video has no meaning for a llava model"),
        ("llama", {"image": {}}, "image has no meaning for a llama model"),
        ("qwen2_5_vl", {"video": {"fps": 2}}, r"model\.frames"),
        (
            "llava",
            {"special_tokens": {"<s>": 1}},
            r"\['</s>', '<pad>', '<unk>'\] of model.processor.tokenizer have no id",
        ),
        ("llava", {"special_tokens": {"<image>": 32064, "<s>": 1}}, "outside 0..32063"),
        ("llava", {"special_tokens": {"<image>": 3, "<s>": 3}}, "an id twice"),
        ("llava", {"tokenizer": {"cls_token": "<s>"}}, "no setting"),
        ("llava", {"tokenizer": {"add_bos_token": True}}, "needs bos_token"),
        (
            "qwen2_5_vl",
            {"special_tokens": SETTINGS["qwen2_5_vl"]["special_tokens"] | {"<|image_pad|>": 7}},
            "is 151655",
        ),
    ],
)
def test_wrong_settings_are_refused(name, parts, why):
    with pytest.raises(ConfigError, match=why):
        build_processor(small_config(name), changed(name, **parts))


def test_a_package_that_a_processor_needs_is_named(monkeypatch, tmp_path):
    from mmkv_bench.models.load import load_model

    config = small_config("smolvlm")
    tf.AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    built("smolvlm").save_pretrained(tmp_path)
    monkeypatch.setattr("transformers.models.smolvlm.processing_smolvlm.num2words", None)
    for load in (
        lambda: load_model(Model(name="x"), str(tmp_path)),
        lambda: build_processor(config, SETTINGS["smolvlm"]),
    ):
        with pytest.raises(
            ConfigError, match="`num2words` is required .* Install it with `pip install num2words`"
        ) as raised:
            load()
        assert "\n" not in str(raised.value) and "hub id" not in str(raised.value)


def test_an_unknown_image_class_is_a_short_sentence(tmp_path):
    from mmkv_bench.models.load import load_model

    tf.AutoModelForImageTextToText.from_config(small_config("idefics3")).save_pretrained(tmp_path)
    built("idefics3").save_pretrained(tmp_path)
    file = tmp_path / "processor_config.json"
    file.write_text(file.read_text().replace("Idefics3ImageProcessor", "NoSuchImageProcessor"))
    with pytest.raises(ConfigError, match=r"cannot be loaded \(.* \.\.\.\); give a folder") as raised:
        load_model(Model(name="x"), str(tmp_path))
    assert len(str(raised.value)) < 500
    file.unlink()
    with pytest.raises(ConfigError, match=r"cannot be loaded \(Can't load image processor"):
        load_model(Model(name="x"), str(tmp_path))


def test_a_vocabulary_without_room_for_bytes_is_refused():
    with pytest.raises(ConfigError, match="no room for 256 bytes"):
        build_tokenizer(200, {"<s>": 0}, {}, chat_template("vicuna"))
