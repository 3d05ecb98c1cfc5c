"""Promise: stretches of documentation are those that were drawn, with their sources and licences, 1,024 and 512 tokens long."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from mmkv_bench.config.files import content
from mmkv_bench.config.schema import resolve_path
from mmkv_bench.datasets.tasks.documentation import utils
from mmkv_bench.generation.encode import reference_tokens

FILE = Path(resolve_path(str(content("model", "smollm2_135m_q4_1")["path"])))


def rows() -> list[dict]:
    return list(utils.read(None, {})["test"])


def test_stretches_are_of_many_projects_and_every_project_has_its_licence():
    stretches = rows()
    assert len({row["document"] for row in stretches}) == len(stretches) == 40
    assert len({row["project"] for row in stretches[:19]}) == len({row["project"] for row in stretches}) == 19
    texts = "".join(row["context"] + row["continuation"] for row in stretches)
    assert hashlib.sha256(texts.encode()).hexdigest()[:16] == "1fbadf35f83c19c5"
    licences = (Path(utils.__file__).parent / "LICENCES.txt").read_text()
    for row in stretches:
        assert f"=== {row['project']} {row['version']}: {row['file']} ({row['licence']})" in licences
        assert len(row["sha256"]) == 64 and row["context"].endswith("\n")


def test_the_score_asks_whether_the_document_goes_on_so():
    score = lambda answer: utils.process_results({"continuation": "a b c"}, [answer])["begins_alike"]  # noqa: E731
    assert [score(" a b"), score("a c"), score("")] == [1, 0, 0]


@pytest.mark.full
@pytest.mark.skipif(not FILE.is_file(), reason="no weights here (mmkv-bench fetch model smollm2_135m_q4_1)")
def test_a_prompt_is_the_stretch_alone_and_its_tokens_are_counted_with_the_models_tokenizer():
    pytest.importorskip("gguf", reason="the package gguf is not installed (pip install 'mmkv-bench[gguf]')")
    from transformers import AutoTokenizer

    from mmkv_bench.models.processor import chat_template

    tokenizer = AutoTokenizer.from_pretrained(str(FILE.parent), gguf_file=FILE.name)
    tokenizer.chat_template = chat_template("plain")
    for row in rows():
        messages = utils.doc_to_messages(row)
        assert len(tokenizer(row["context"])["input_ids"]) == 1024
        tokens = reference_tokens(tokenizer, messages, row["continuation"], continuation=True)
        assert len(tokens) == 512 and tokenizer.decode(tokens) == row["continuation"]
