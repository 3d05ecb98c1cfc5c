"""Every fixture through its task's real code: prompts made, media decoded, and answers scored as known beforehand."""

from __future__ import annotations

import dataclasses
import io
import math
import shutil
from collections.abc import Iterator
from importlib.util import find_spec

import numpy as np
import pytest

from mmkv_bench.config.files import content
from mmkv_bench.datasets import fixtures
from mmkv_bench.datasets.specs import TaskSpec, spec_from_config
from mmkv_bench.errors import ConfigError
from mmkv_bench.evaluation.documents import documents
from mmkv_bench.evaluation.scoring import score
from tests import cover
from tests.each import each
from tests.evaluation.conftest import answered, ask_all, values
from tools.fixtures import Known, make
from tools.fixtures import known as known_answers

SLOW = {"textcaps", "vatex"}  # scored by Java programs, half a minute each
GRADED = {
    "docvqa",
    "infovqa",
    "textvqa",
    "synthdog",
    "textcaps",
    "vatex",
}  # metrics with values between 0 and full marks


def node_of(name: str) -> dict:
    """The file of conf/dataset."""
    return content("dataset", name)


SCORED = [name for name in fixtures.names() if name not in SLOW and node_of(name)["about"]["judge"] != "needed"]


def spec_of(name: str) -> TaskSpec:
    """The dataset as its file in conf/dataset has it, on its fixture."""
    return spec_from_config(name, node_of(name), {"source": "fixture", "root": None})


def cells(known: list[Known], count: int) -> Iterator[list[str]]:
    """Answers to all documents, as few times as it takes to give each known answer once."""
    waiting: dict[int, list[str]] = {}
    for entry in known:
        answers = waiting.setdefault(entry.doc_id, [])
        if entry.answer not in answers:
            answers.append(entry.answer)
    for number in range(max(map(len, waiting.values()))):
        yield [(waiting.get(doc, [""]) * (number + 1))[number] for doc in range(count)]


@cover.few("name", fixtures.names(), keep=14)
def test_the_task_reads_it_and_its_media_can_be_decoded(name):
    spec = spec_of(name)
    assert spec.fixture
    assert spec.dataset == f"{name}_fixture"
    requests = ask_all(spec)
    assert len(requests) >= 2
    assert [request.error for request in requests] == [None] * len(requests)
    assert len({request.prompt_hash for request in requests}) >= 2
    for request in requests:
        parts = [part["type"] for message in request.messages for part in message["content"]]
        assert parts.count("image") == len(request.images)
        assert parts.count("video") == len(request.videos)
        assert all(image.mode == "RGB" and min(image.size) >= 28 for image in request.images)
        for video in request.videos:
            path = video["video"] if isinstance(video, dict) else video
            assert frames_of(path) >= 4


def frames_of(path: str) -> int:
    import av

    with av.open(path) as container:
        return sum(1 for _ in container.decode(video=0))


@pytest.mark.full
@each("name", fixtures.names())
def test_it_is_the_same_on_every_call(name, tmp_path):
    make(name, tmp_path)
    files = [path for path in fixtures.folder(name).rglob("*") if path.is_file()]
    assert files
    for file in files:
        assert (tmp_path / file.relative_to(fixtures.folder(name))).read_bytes() == file.read_bytes(), file.name


NEEDS_JAVA = pytest.mark.skipif(
    shutil.which("java") is None, reason="caption metrics are Java programs, and there is no Java here"
)


@cover.few("name", SCORED, keep=16, first=1)
def test_known_answers_score_what_is_known(name):
    if name == "nextqa_oe" and find_spec("pywsd") is None:
        pytest.skip("its scorer needs pywsd and WordNet's data, which are not ours to install")
    check(name)


def names_by_sample(scores) -> dict[str, set[str]]:
    """sample id -> the metrics that it has rows of."""
    found: dict[str, set[str]] = {}
    for row in scores.samples:
        found.setdefault(row.sample_id, set()).add(row.metric)
    return found


@pytest.mark.slow
@each("name", ["favor_bench", "chartqa", "vstar", "videomme"])
def test_a_sample_that_failed_is_missed_in_the_scores_of_its_subset_too(name):
    spec = spec_of(name)
    requests = ask_all(spec)
    texts = next(cells(known_answers(name), len(requests)))
    whole = names_by_sample(score(spec, answered(requests, texts)))
    for failed in ([0], [len(requests) - 1], range(len(requests))):
        answers = answered(requests, [None if i in failed else text for i, text in enumerate(texts)])
        found = score(spec, answers)
        assert names_by_sample(found) == whole
        lost = {requests[i].sample_id for i in failed}
        assert all((row.value is None) == (row.sample_id in lost) for row in found.samples)


@pytest.mark.full
@NEEDS_JAVA
def test_known_captions_score_what_is_known_and_corpus_scores_are_lmms_evals():
    from mmkv_bench.statistics.metric_kinds import aggregate_of

    kinds = ("Bleu_1", "Bleu_2", "Bleu_3", "Bleu_4", "METEOR", "ROUGE_L", "CIDEr")
    headline = tuple(f"textcaps_{kind}" for kind in ("Bleu_4", "METEOR", "CIDEr"))  # each takes lmms-eval some seconds
    scores = check("textcaps", metrics=headline)
    assert {row.metric for row in scores.samples} == {f"textcaps_{kind}" for kind in kinds}
    assert set(scores.aggregate) == set(headline)
    assert set(scores.unaggregated) == {f"textcaps_{kind}" for kind in kinds} - set(headline)
    for metric, corpus in scores.aggregate.items():
        parts = [row.parts for row in scores.samples if row.metric == metric]
        mean, pooled = np.mean(values(scores, metric)), aggregate_of(metric)
        assert (parts[0] is None) == (pooled is None)
        assert corpus == pytest.approx(mean if pooled is None else pooled(np.array(parts)), abs=1e-9)
        assert pooled is None or abs(mean - corpus) > 1e-3  # a mean over sentences is something else


@pytest.mark.full
@NEEDS_JAVA
def test_cider_of_a_sample_does_not_depend_on_how_many_samples_its_cell_has():
    node = node_of("vatex") | {"metrics": ["vatex_CIDEr"]}
    spec = spec_from_config("vatex", node, {"source": "fixture", "root": None})
    requests = ask_all(spec)
    texts = [
        "The red circle goes right.",
        "A blue box goes up and back.",
        "a green disc",
        "a yellow spot stays put",
        "",
    ]
    whole = score(spec, answered(requests, texts))
    begun = score(spec, answered(requests[:2], texts[:2]), limit=2)
    assert values(begun, "vatex_CIDEr") == pytest.approx(values(whole, "vatex_CIDEr")[:2], abs=1e-12)
    assert 0.0 < values(begun, "vatex_CIDEr")[1] < 10.0
    assert whole.aggregate["vatex_CIDEr"] == pytest.approx(np.mean(values(whole, "vatex_CIDEr")), abs=1e-9)
    assert "vatex_CIDEr" not in begun.aggregate and "whole dataset" in begun.unaggregated["vatex_CIDEr"]
    assert begun.reason is None


@pytest.mark.full
@NEEDS_JAVA
def test_captions_are_scored_where_one_has_no_answer_over_the_references_of_all_and_line_ends_move_none():
    from pycocoevalcap.cider.cider import Cider

    spec, known = spec_of("vatex"), known_answers("vatex")
    requests = ask_all(spec)
    texts = [*next(cells(known, len(requests)))[:4], None]
    torn = [texts[0], texts[1].replace(" ", "\u2028"), texts[2].replace(" ", "\r"), texts[3], None]
    scores = score(spec, answered(requests, torn))
    assert (scores.aggregate, scores.unaggregated) == (None, {})
    assert scores.reason == "1 of 5 samples have no answer: 1 oom"
    found = {(row.sample_id, row.metric): row for row in scores.samples}
    for entry in known:
        assert found[requests[entry.doc_id].sample_id, entry.metric].value == pytest.approx(entry.value, abs=1e-6), (
            entry
        )
    failed = found[requests[4].sample_id, "vatex_Bleu_4"]
    assert (failed.value, failed.status) == (None, "oom")
    assert (failed.parts[0], failed.parts[1]) == (0.0, 5.0)  # words of an empty answer, of the shortest reference
    assert sum(found[requests[4].sample_id, "vatex_METEOR"].parts[4:]) == 0.0
    references = [row["enCap"] for row in documents(spec, None).bare["test"]]
    plain = {i: [text.lower().rstrip(".") for text in own] for i, own in enumerate(references)}
    given = {i: [(text or "").lower().rstrip(".")] for i, text in enumerate(texts)}
    _, slow = Cider().compute_score(plain, given)
    assert values(scores, "vatex_CIDEr") == [*map(pytest.approx, slow[:4]), None]


def check(name: str, **changed):
    """Score the known answers; returns the scores of the first round. changed: fields of the task's spec."""
    from mmkv_bench.statistics.metric_kinds import aggregate_of, upstream

    spec, known = dataclasses.replace(spec_of(name), **changed), known_answers(name)
    requests = ask_all(spec)
    first = None
    for texts in cells(known, len(requests)):
        scores = score(spec, answered(requests, texts))
        first = first or scores
        found = {(row.sample_id, row.metric): row.value for row in scores.samples}
        for entry in known:
            if texts[entry.doc_id] == entry.answer:
                value = found[requests[entry.doc_id].sample_id, entry.metric]
                assert value == pytest.approx(entry.value, abs=1e-6), entry
        unread = sum(value for (_, metric), value in found.items() if metric == "parse_failed")
        for metric, aggregate in scores.aggregate.items():
            own = values(scores, metric)
            if own and not unread and aggregate_of(metric) is None:
                mean = math.fsum(own) / len(own)
                assert upstream(metric).as_ours(aggregate, len(own)) == pytest.approx(mean, abs=1e-5), metric
    return first


@each("name", fixtures.names())
def test_its_known_answers_cover_full_marks_nothing_and_what_lies_between(name):
    by_metric: dict[str, set[float]] = {}
    for entry in known_answers(name):
        by_metric.setdefault(entry.metric, set()).add(entry.value)
    headline = [found for metric, found in by_metric.items() if metric != "parse_failed"]
    assert any(0.0 in found for found in headline)
    assert any(max(found) > 0.9 for found in headline)
    if name in GRADED:
        assert any(any(0.0 < value < 0.9 * max(found) for value in found) for found in headline)


def test_an_image_that_does_not_decode_is_a_request_with_an_error_and_the_others_go_on(tmp_path):
    import pyarrow.parquet as pq

    folder = tmp_path / "docvqa"
    shutil.copytree(fixtures.folder("docvqa"), folder)
    file = next(folder.rglob("*.parquet"))
    table = pq.read_table(file)
    rows = table.to_pylist()
    rows[2]["image"]["bytes"] = rows[2]["image"]["bytes"][:200] + b"\0" * 300
    pq.write_table(type(table).from_pylist(rows, schema=table.schema), file)
    spec = spec_from_config("docvqa", node_of("docvqa"), {"source": "upstream", "root": str(tmp_path)})
    assert not spec.fixture
    requests = ask_all(spec)
    assert [request.error is None for request in requests] == [True, True, False, True, True, True]
    assert requests[2].sample_id in requests[2].error
    scores = score(spec, answered(requests, ["mary olsen", "4 may 1973", None, "Westport", "Total", "$6.40"]))
    assert values(scores, "anls") == [1.0, 1.0, None, 1.0, 1.0, 1.0]
    assert scores.reason == "1 of 6 samples have no answer: 1 oom"


def test_a_dataset_without_a_fixture_is_refused_with_names():
    with pytest.raises(ConfigError, match="docvqa"):
        fixtures.folder("docvq")


def test_pictures_are_files_that_a_hub_repository_could_hold():
    import pyarrow.parquet as pq
    from PIL import Image

    rows = pq.read_table(next(fixtures.folder("ocrbench").rglob("*.parquet"))).to_pylist()
    assert all(Image.open(io.BytesIO(row["image"]["bytes"])).format == "PNG" for row in rows)
