"""Promise: SmolLM2's template, tokenizer and shape are read from its GGUF file as its publisher means them.

They need the file that `mmkv-bench fetch model smollm2_135m_q4_1` fetches, and skip without it.
"""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path

import jinja2
import pytest
from PIL import Image
from transformers import AutoTokenizer

from mmkv_bench.config.files import content
from mmkv_bench.config.schema import resolve_path
from mmkv_bench.datasets.tasks.english.utils import doc_to_text, read
from mmkv_bench.families.registry import image_tokens
from mmkv_bench.models.chat_template import rendered, tokens_of
from mmkv_bench.models.load import load_config
from mmkv_bench.models.processor import build_processor
from mmkv_bench.models.shape import config_of
from mmkv_bench.models.source import Source
from tests.each import each
from tests.families.shapes import node

NAME = "smollm2_135m_q4_1"
FILE = Path(resolve_path(str(content("model", NAME)["path"])))
pytest.importorskip("gguf", reason="the package gguf is not installed (pip install 'mmkv-bench[gguf]')")
pytestmark = pytest.mark.skipif(not FILE.is_file(), reason=f"no weights here (mmkv-bench fetch model {NAME})")


@functools.cache
def described():
    """The file's config and tokenizer, without its weights."""
    return load_config(str(FILE)), AutoTokenizer.from_pretrained(FILE.parent, gguf_file=FILE.name)


@pytest.mark.slow
def test_its_shape_ids_and_template_are_those_of_our_file_of_the_published_model():
    ours, (config, tokenizer) = node("smollm2_135m"), described()
    for name, value in ours.shape.items():
        if name not in ("generation_config", "rope_parameters", "dtype", "tie_word_embeddings", "pad_token_id"):
            assert getattr(config, name) == pytest.approx(value), name
    assert config.rope_parameters["rope_theta"] == ours.shape["rope_parameters"]["rope_theta"]
    assert {word: tokenizer.convert_tokens_to_ids(word) for word in ours.processor["special_tokens"]} == dict(
        ours.processor["special_tokens"]
    )
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    published, own = (
        environment.from_string(text)
        for text in (
            tokenizer.chat_template,
            (Path("mmkv_bench/families/templates") / f"{ours.processor['template']}.jinja").read_text(),
        )
    )
    turns = [{"role": role, "content": text} for role, text in (("system", "s"), ("user", " a\n"), ("assistant", "b"))]
    for messages in (turns, turns[1:], turns[1:2]):
        for prompt in (True, False):
            values = {"messages": messages, "add_generation_prompt": prompt}
            assert published.render(values) == own.render(values)


@pytest.mark.slow
def test_its_prompt_is_plain_transformers_prompt():
    _, tokenizer = described()
    messages = [{"role": "user", "content": doc_to_text(read(None, {"task": "english_needles"})["test"][0])}]
    text = rendered(tokenizer, messages)
    plain = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert tokenizer(text, **tokens_of(tokenizer, text))["input_ids"] == plain and len(plain) > 500


@pytest.mark.full  # of a small file, test_gguf.py shows the same
def test_its_answer_is_plain_generate(tmp_path, monkeypatch):
    from mmkv_bench.cli.main import main

    once = Source.of(node(NAME)).load()
    monkeypatch.setattr(Source, "load", lambda source: once if source.place == str(FILE) else 1 / 0)
    out = tmp_path / "rows"
    words = [f"model={NAME}", "dataset=english_needles", "method=full", "limit=1", "fidelity=off", f"out={out}"]
    words += ["dataset.generation.max_new_tokens=6"]
    assert main(["run", *words]) == 0
    from mmkv_bench.store.store import Store

    store = Store(out)
    cells = store.cells(None, ["cell", "method", "weights_file"]).to_pylist()
    assert {row["weights_file"] for row in cells} == {f"{FILE.name} (Q4_1 210, F32 61, Q8_0 1)"}
    (full,) = [row["cell"] for row in cells if row["method"] == "full"]
    (row,) = store.responses([full], ["token_ids", "prompt_tokens", "answer"]).to_pylist()
    document = read(None, {"task": "english_needles"})["test"][0]
    model, tokenizer = once.model, once.tokenizer
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": doc_to_text(document)}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    tokens = model.generate(**inputs, max_new_tokens=6, do_sample=False)[0, inputs["input_ids"].shape[1] :].tolist()
    ids = row["token_ids"] if isinstance(row["token_ids"], list) else json.loads(row["token_ids"])
    assert (row["prompt_tokens"], ids) == (inputs["input_ids"].shape[1], tokens)


@pytest.mark.slow
@each("name", ["smolvlm_256m", "smolvlm2_2_2b"])
def test_its_tokenizer_with_smolvlms_added_tokens_makes_that_familys_prompts(name):
    """SmolVLM publishes SmolLM2's tokenizer with further tokens: transformers' own processor counts images as the family does."""
    settings = node(name)
    config, special = config_of(settings.shape), {**settings.processor["special_tokens"]}
    tokenizer, words = copy.deepcopy(described()[1]), {index: word for word, index in special.items()}
    size = config.text_config.vocab_size
    tokenizer.add_tokens([words.get(i, f"<|reserved_{i}|>") for i in range(len(tokenizer), size)], special_tokens=True)
    assert {word: tokenizer.convert_tokens_to_ids(word) for word in special} == special
    ours = build_processor(config, settings.processor)
    kinds = [part for part in ("image_processor", "video_processor") if getattr(ours, part, None) is not None]
    parts = {part: getattr(ours, part) for part in kinds} | {"tokenizer": tokenizer}
    processor = type(ours)(**parts, chat_template=ours.chat_template, **settings.processor["processor"])
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which town is named?"}]}]
    text = processor.apply_chat_template(messages, add_generation_prompt=True)
    ids = processor(text=[text], images=[Image.new("RGB", (900, 700))])["input_ids"][0]
    tiles = image_tokens(config.model_type, settings.processor, 900, 700)
    assert ids.count(config.image_token_id) == tiles and tiles % settings.processor["processor"]["image_seq_len"] == 0
    markers = [index for index in ids if index >= described()[1].vocab_size and index != config.image_token_id]
    assert len(markers) == tiles // settings.processor["processor"]["image_seq_len"] * 2 + 2  # a pair a tile, both ends
    rest = tokenizer.decode([index for index in ids if index < 49152], skip_special_tokens=True)
    assert rest.split() == ["User:", "Which", "town", "is", "named?", "Assistant:"]
