"""Tasks that lmms-eval ships, run from local folders: their prompts, their metrics, their traps."""

from __future__ import annotations

import random

import pytest

from mmkv_bench.datasets.specs import spec_from_config
from mmkv_bench.evaluation.documents import generation_settings
from mmkv_bench.evaluation.fingerprints import fingerprint
from tests.evaluation.conftest import answered_scores, ask_all, values


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """A function that writes rows with one small picture each as the data of a shipped task; returns its spec."""
    import datasets
    from PIL import Image

    def make(task: str, rows: list[dict], split: str, picture: str = "image", many: bool = False, **node):
        folder = tmp_path_factory.mktemp(task)
        pictures = [Image.new("RGB", (28, 28), (i, 0, 0)) for i in range(len(rows))]
        rows = [row | {picture: [image, image] if many else image} for row, image in zip(rows, pictures, strict=True)]
        kind = datasets.List(datasets.Image()) if many else datasets.Image()
        plain = datasets.Dataset.from_list([{k: v for k, v in row.items() if k != picture} for row in rows]).features
        data = datasets.Dataset.from_list(rows, features=datasets.Features({**plain, picture: kind}))
        (folder / "data").mkdir()
        data.to_parquet(folder / "data" / f"{split}-00000-of-00001.parquet")
        return spec_from_config("lmms_eval", {"task": task, "dataset_path": str(folder), **node})

    return make


def test_docvqa(local):
    rows = [{"question": f"q{i}", "answers": ["paris", "Paris, France"], "questionId": str(i)} for i in range(4)]
    spec = local("docvqa_val", rows, "validation")
    assert (spec.dataset, generation_settings(spec)["max_new_tokens"]) == ("docvqa_val", 32)
    request = ask_all(spec)[1]
    assert [part["type"] for part in request.messages[0]["content"]] == ["image", "text"]
    assert request.messages[0]["content"][1]["text"] == "q1\nAnswer the question using a single word or phrase."
    scores = answered_scores(spec, ["Paris", "pariz", "london", None])
    assert values(scores, "anls") == [1.0, pytest.approx(0.8), 0.0, None]
    assert answered_scores(spec, ["Paris", "pariz", "london", "paris"]).aggregate == {"anls": pytest.approx(0.7)}


def test_ocrbench_does_not_add_up_over_cells(local):
    rows = [
        {"question": "?", "answer": ["word"], "dataset": "IIIT5K", "question_type": "Regular Text Recognition"},
        {"question": "?", "answer": ["other"], "dataset": "IIIT5K", "question_type": "Regular Text Recognition"},
    ]
    spec = local("ocrbench", rows, "test")
    for _ in range(3):
        scores = answered_scores(spec, ["a Word.", "none"])
        assert values(scores, "ocrbench_accuracy") == [1.0, 0.0]
        assert scores.aggregate == {"ocrbench_accuracy": 0.001}


def test_muirbench_reads_a_leading_letter_by_its_filter(local):
    rows = [
        {"question": "?", "options": ["x", "y"], "answer": "B", "task": "t", "idx": str(i)}
        | {"image_relation": "r", "image_type": "i"}
        for i in range(3)
    ]
    spec = local("muirbench", rows, "test", picture="image_list", many=True)
    assert len(ask_all(spec)[0].images) == 2
    scores = answered_scores(spec, ["B. y", "b", "the second"])
    assert values(scores, "muirbench_score_overall") == [1.0, 1.0, 0.0]
    assert values(scores, "parse_failed") == [0.0, 0.0, 1.0]
    assert scores.aggregate == {"muirbench_score_overall": pytest.approx(2 / 3)}


def test_mmmu_draws_a_letter_for_what_it_cannot_read_which_counts_0_here(local):
    rows = [
        {
            "id": f"validation_Art_{i}",
            "question": "what is in <image 1> here?",
            "options": "['w', 'x', 'y', 'z']",
            "answer": "C",
            "question_type": "multiple-choice",
        }
        for i in range(12)
    ]
    spec = local("mmmu_val", rows, "validation", picture="image_1")
    content = ask_all(spec)[0].messages[0]["content"]
    assert [part["type"] for part in content] == ["text", "image", "text"]
    random.seed(1)
    first = answered_scores(spec, ["C", "A", *["%%"] * 10])
    random.seed(2)
    second = answered_scores(spec, ["A", "C", *["%%"] * 10])
    assert values(first, "mmmu_acc") == [1.0] + [0.0] * 11
    assert values(second, "mmmu_acc") == [0.0, 1.0] + [0.0] * 10
    assert values(first, "parse_failed") == values(second, "parse_failed") == [0.0] * 2 + [1.0] * 10
    assert first.aggregate["mmmu_acc"] == second.aggregate["mmmu_acc"]  # its draws are the samples' own
    assert first.aggregate["mmmu_acc"] > 0.15  # and lift ten unreadable answers
    assert "parse_failed" not in first.aggregate


def test_a_fingerprint_follows_the_rows_and_the_pictures_and_no_limit(local):
    def made(question: str, count: int, size: int | None = None):
        rows = [{"question": f"{question}{i}", "answers": ["a"], "questionId": str(i)} for i in range(count)]
        return local("docvqa_val", rows, "validation", **({"count": size} if size else {}))

    base = fingerprint(made("q", 3))
    assert fingerprint(made("q", 3)) == base
    assert fingerprint(made("q", 3, 1)) == base
    assert fingerprint(made("Q", 3)) != base
    assert fingerprint(made("q", 2)) != base
