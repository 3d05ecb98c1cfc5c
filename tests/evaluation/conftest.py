"""Pages in a cache of these tests; tasks of our own in lmms-eval's YAML format, with answers and no model."""

from __future__ import annotations

import json

import pytest

from mmkv_bench.datasets.specs import TaskSpec, spec_from_config
from mmkv_bench.evaluation.generating import generate
from mmkv_bench.evaluation.samples import Answer
from mmkv_bench.evaluation.scoring import score


@pytest.fixture(scope="package", autouse=True)
def _cache(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    base = tmp_path_factory.getbasetemp()  # the same for tests/datasets, which shares this fixture
    patch.setenv("MMKV_BENCH_CACHE", str(base / "cache"))
    patch.setenv("HF_DATASETS_CACHE", str(base / "datasets"))
    yield
    patch.undo()


def pages(task: str = "pages_walk", size: str = "small", split: str = "test") -> TaskSpec:
    """A pages dataset as the shipped configuration names it."""
    node = {"task": task, "size": size, "split": split, "count": 500, "generation": {"max_new_tokens": 24}}
    return spec_from_config(task, node | {"metrics": ["exact_match"]})


def ask_all(spec: TaskSpec, limit: int | None = None, text: str = "") -> list:
    """All requests of a dataset, answered with one text."""
    asked = []
    generate(spec, lambda request: asked.append(request) or text, limit)
    return asked


def answered(requests, texts) -> dict[str, Answer]:
    """Stored answers: texts[i] to request i, None for a sample that ran out of memory."""
    return {
        request.sample_id: Answer(text, "oom" if text is None else "ok", request.doc_id, request.prompt_hash)
        for request, text in zip(requests, texts, strict=True)
    }


def values(scores, metric: str) -> list[float | None]:
    """One metric of all samples, in order."""
    return [row.value for row in scores.samples if row.metric == metric]


UTILS = '''
import random
import sys

MEMORY = []


def question(doc):
    return doc["question"]


def exiting_question(doc):
    sys.exit("the videos are not there")


def accuracy(doc, results):
    return {"acc": float(results[0] == doc["answer"]), "remark": "not a metric"}


def drawn(doc, results):
    return {"acc": random.random()}


def two_metrics(doc, results):
    return {"acc": float(results[0] == doc["answer"]), "own_CIDEr": 2.0}


def guessing(doc, results):
    letters = [letter for letter in "abcd" if results[0].endswith(letter)]
    return {"acc": float((letters[0] if letters else random.choice("abcd")) == doc["answer"])}


def shuffling(doc, results):
    letters = random.sample("abcd", 4)
    return {"acc": float(results[0] in letters and results[0] == doc["answer"])}


def raising(doc, results):
    if doc["answer"] == "b":
        raise ArithmeticError("cannot score b")
    return {"acc": 1.0}


try:
    from a_package_that_nobody_has import lemmas
except ImportError:
    pass


def lacking(doc, results):
    return {"acc": float(lemmas(results[0]) == lemmas(doc["answer"]))}


def exiting(doc, results):
    sys.exit("no API key")


def with_score(doc, results):
    return {"acc": {"score": int(results[0] == doc["answer"]), "pred": results[0]}}


def with_pair(doc, results):
    return {"mmmu_acc": {"answer": doc["answer"], "parsed_pred": results[0]}}


def matches(items):
    return sum(item["answer"] == item["parsed_pred"] for item in items) / len(items)


def caption(doc, results):
    return {"cider": {"reference": doc["answer"], "prediction": results[0]}}


def corpus(items):
    return float(len(items))


def complete(items):
    assert len(items) == 4, "aggregated without all samples"
    return 1.0


def remembering(items):
    MEMORY.extend(items)
    open("submission.json", "w").write("{}")
    return float(sum(MEMORY))


def judged(doc, results):
    from lmms_eval.llm_judge import Request, ServerConfig, get_server

    server = get_server("openai", ServerConfig(model_name="some-model"))
    asked = Request(messages=[{"role": "user", "content": results[0]}])
    return {"acc": float(server.evaluate(asked).content.split(" ")[0])}


def asking(doc, results):
    from mmkv_bench.judging.client import ask

    first = ask(f"Is {results[0]!r} right?", readable=lambda text: text in ("yes", "no"), example="yes")
    sure = ask(f"Are you sure that it is {first}?")
    return {"acc": float(first == "yes" and bool(sure))}


def asking_beside(doc, results):
    from mmkv_bench.judging.client import JudgeError

    try:
        return asking(doc, results) | {"length": float(len(results[0]))}
    except JudgeError:
        return {"length": float(len(results[0]))}


def insatiable(doc, results):
    from mmkv_bench.judging.client import ask

    text = "more"
    while True:
        text += ask(text)


def asking_elsewhere(doc, results):
    import requests

    return {"acc": float(requests.post(API_URL, json={}, timeout=1).json())}


API_URL = "https://judge.example/v1/chat/completions"


class Shout:
    def apply(self, resps, docs):
        return [[text.upper() for text in row] for row in resps]


class FirstIsFor:
    """Keeps an answer only where it stands beside its own document."""

    def apply(self, resps, docs):
        return [row[0] if row[0] == doc["answer"] else "misplaced" for row, doc in zip(resps, docs)]
'''

ANSWERS = ("a", "b", "c", "d")


@pytest.fixture
def own_task(tmp_path):
    """A function that writes a task of four text questions and returns its TaskSpec. Keywords go into its YAML."""

    def make(name: str = "own", aggregation: str = "mean", metric: str = "acc", **yaml) -> TaskSpec:
        rows = [{"question": f"which letter is number {i}?", "answer": a} for i, a in enumerate(ANSWERS)]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / "utils.py").write_text(UTILS)
        fields = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": "{data_files: {test: rows.jsonl}}",
            "test_split": "test",
            "output_type": "generate_until",
            "doc_to_text": "!function utils.question",
            "doc_to_target": "answer",
            "process_results": "!function utils.accuracy",
            "metric_list": f"[{{metric: {metric}, aggregation: {aggregation}, higher_is_better: true}}]",
        } | yaml
        (tmp_path / f"{name}.yaml").write_text("".join(f"{key}: {value}\n" for key, value in fields.items()))
        node = {"task": name, "include_path": str(tmp_path)}
        return spec_from_config("lmms_eval", node)

    return make


def answered_scores(spec: TaskSpec, texts, limit: int | None = None, judge=None):
    """Ask the first questions of a task, answer them with the texts, score."""
    return score(spec, answered(ask_all(spec, len(texts)), texts), limit, judge)
