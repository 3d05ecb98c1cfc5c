"""Promise: SmolLM2's template, tokenizer and shape are read from its GGUF file as its publisher means them.

They need the file that `mmkv-bench fetch model smollm2_135m_q4_1` fetches, and skip without it.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import jinja2
import pytest

from mmkv_bench.config.files import content
from mmkv_bench.config.schema import resolve_path
from mmkv_bench.models.source import Source
from tests.families.shapes import node

NAME = "smollm2_135m_q4_1"
FILE = Path(resolve_path(str(content("model", NAME)["path"])))
pytest.importorskip("gguf", reason="the package gguf is not installed (pip install 'mmkv-bench[gguf]')")
pytestmark = pytest.mark.skipif(not FILE.is_file(), reason=f"no weights here (mmkv-bench fetch model {NAME})")


@functools.cache
def loaded():
    return Source.of(node(NAME)).load()


def test_its_shape_ids_and_template_are_those_of_our_file_of_the_published_model():
    ours, config = node("smollm2_135m"), loaded().model.config
    for name, value in ours.shape.items():
        if name not in ("generation_config", "rope_parameters", "dtype", "tie_word_embeddings", "pad_token_id"):
            assert getattr(config, name) == pytest.approx(value), name
    assert config.rope_parameters["rope_theta"] == ours.shape["rope_parameters"]["rope_theta"]
    tokenizer = loaded().tokenizer
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


def test_its_prompt_is_plain_transformers_prompt_and_its_answer_plain_generate(tmp_path):
    from mmkv_bench.cli.main import main

    out = tmp_path / "rows"
    words = [f"model={NAME}", "dataset=english_needles", "method=[snapkv]", "budget=10%", "limit=1", f"out={out}"]
    assert main(["run", *words]) == 0
    from mmkv_bench.datasets.tasks.english.utils import doc_to_text, read
    from mmkv_bench.store.store import Store

    store = Store(out)
    cells = store.cells(None, ["cell", "method", "weights_file"]).to_pylist()
    assert {row["weights_file"] for row in cells} == {f"{FILE.name} (Q4_1 210, F32 61, Q8_0 1)"}
    (full,) = [row["cell"] for row in cells if row["method"] == "full"]
    (row,) = store.responses([full], ["token_ids", "prompt_tokens", "answer"]).to_pylist()
    document = read(None, {"task": "english_needles"})["test"][0]
    model, tokenizer = loaded().model, loaded().tokenizer
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": doc_to_text(document)}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    tokens = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :].tolist()
    ids = row["token_ids"] if isinstance(row["token_ids"], list) else json.loads(row["token_ids"])
    assert (row["prompt_tokens"], ids) == (inputs["input_ids"].shape[1], tokens)
