"""Promise: what goes wrong at one sample of one method is that row's status; every other row is what it was, the tables
count the failures, and `retry` runs them again."""

from __future__ import annotations

import importlib
import io
import shutil
import struct
import zlib
from importlib.resources import files
from pathlib import Path

import pytest

from mmkv_bench.models import load
from mmkv_bench.statistics.metric_kinds import FIDELITY
from tests import cover
from tests.cli.setting import refusal
from tests.run import setting
from tests.run.setting import answers, cell_of, commits, done, go, responses

PLAIN = ("dataset=pages", "budget=16", "limit=3", "method=[snapkv]")
FAULTS = {"oom": "oom", "nans": "nan", "error": "error", "timeout": "timeout"}  # fault -> status


@pytest.fixture(scope="module")
def clean(tmp_path_factory) -> Path:
    """The same samples and the healthy methods alone."""
    root = tmp_path_factory.mktemp("clean") / "rows"
    done(root, *PLAIN)
    return root


@pytest.fixture(scope="module")
def victim(clean) -> str:
    return next(sample for (_, sample), row in responses(clean).items() if row["doc_id"] == 1)


def command(conf: Path, victim: str) -> tuple[str, ...]:
    variants = [f"variants.{fault}={{base: failing, fault: {fault}, victim: {victim}}}" for fault in FAULTS]
    poisoned = [
        "variants.nan_logits={base: poisoning, fault: nans}",
        "variants.oom_gather={base: poisoning, fault: oom}",
    ]
    return ("--config-dir", str(conf), *PLAIN, "method=[snapkv,failing]", *variants, *poisoned)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory, own_parts, victim):
    """A run in which four methods fail at one sample and two at every one, beside two that do not."""
    root = tmp_path_factory.mktemp("faulty") / "rows"
    return root, go(root, *command(own_parts, victim))


MESSAGES = {
    "oom": "OutOfMemoryError: out of memory, on purpose",
    "nans": "NonFiniteScoreError: nans gave non-finite scores",
    "error": "RuntimeError: broken, on purpose",
    "timeout": "GenerationTimeout: too slow, on purpose",
}


def test_each_fault_is_a_row_with_its_status_and_the_run_goes_on(faulty, clean, victim):
    root, outcome = faulty
    rows = responses(root)
    assert len(rows) == 9 * 3
    healthy, beside = answers(clean), answers(root)
    assert {key: beside[key] for key in healthy} == healthy
    for fault, expected in FAULTS.items():
        cell = cell_of(root, fault)
        ends = {sample: (row["status"], row["error"]) for (of, sample), row in rows.items() if of == cell}
        status, error = ends.pop(victim)
        assert status == expected and error.startswith(MESSAGES[fault]) and "\n" not in error
        assert set(ends.values()) == {("ok", None)}
    for name, status, words in (("nan_logits", "nan", "NaN logits"), ("oom_gather", "oom", "while gathering")):
        found = [row for (of, _), row in rows.items() if of == cell_of(root, name)]
        assert [row["status"] for row in found] == [status] * 3
        assert all(words in row["error"] for row in found)
    for row in rows.values():
        if row["status"] != "ok":
            assert row["answer"] is None and not row["token_ids"] and row["n_tokens"] == 0


def test_failed_rows_are_exit_code_1_and_counted(faulty):
    _, outcome = faulty
    assert outcome.code == 1
    assert (outcome.document["status"], outcome.document["failed"]) == ("failed", 4 + 6)
    assert "10 rows failed, " in outcome.out and " of them with " in outcome.out


def test_tables_show_what_is_ok_and_metrics_have_no_headline_over_failures(faulty):
    root, outcome = faulty
    lines = {
        line.split("|")[1].strip().split(" ")[0]: line for line in outcome.out.splitlines() if line.startswith("|")
    }
    for fault in FAULTS:
        assert "2/3 ok: " in lines[fault]
    assert "0/3 ok: " in lines["nan_logits"]
    assert " ok: " not in lines["full"] + lines["snapkv"] + lines["failing"]
    assert "No bold: the cells that are compared are not ok on the same samples." in outcome.out
    by_cell = {row["cell"]: row for row in setting.metrics(root) if row["metric"] == "exact_match"}
    for fault, status in FAULTS.items():
        row = by_cell[cell_of(root, fault)]
        assert (row["n"], row["n_ok"], row["value"], row["lmms_eval"]) == (3, 2, None, None)
        assert f"1 {status}" in row["lmms_eval_reason"]
        right = sum(score["value"] for score in setting.scores(root) if score["cell"] == row["cell"]
                    and score["metric"] == "exact_match" and score["status"] == "ok")  # fmt: skip
        assert row["value_failures_zero"] == pytest.approx(right / 3)


def test_failed_rows_count_as_done_and_the_exit_code_stays(faulty, own_parts, victim):
    root, _ = faulty
    before = setting.tree(root)
    again = go(root, *command(own_parts, victim))
    assert (again.code, again.generated, again.document["failed"]) == (1, 0, 10)
    assert "Nothing to do" in again.out and "10 rows failed" in again.out
    assert setting.tree(root) == before


@pytest.fixture
def mended(own_parts):
    """The faults that do not happen any more."""
    faults = importlib.import_module("mmkv_bench.compression.scorers.failing").MENDED
    yield faults
    faults.clear()


@pytest.mark.full
def test_retry_runs_exactly_those_statuses_again(faulty, own_parts, victim, mended, tmp_path):
    root = shutil.copytree(faulty[0], tmp_path / "rows")
    before = commits(root)
    mended.update(FAULTS)
    again = go(root, *command(own_parts, victim), "retry=[oom,nan]")
    assert again.generated == 3  # the poisoned cells fail at every sample, and again
    changed = {key for key, stamp in commits(root).items() if stamp != before[key]}
    expected = {(cell_of(root, fault), victim) for fault in ("oom", "nans")}
    poisoned = {cell_of(root, name) for name in ("nan_logits", "oom_gather")}
    assert changed == expected | {key for key in before if key[0] in poisoned}
    ends = {key: row["status"] for key, row in responses(root).items()}
    assert {ends[key] for key in expected} == {"ok"}
    assert (again.code, again.document["failed"]) == (1, 2 + 6)
    values = {row["cell"]: row for row in setting.metrics(root) if row["metric"] == "exact_match"}
    assert values[cell_of(root, "oom")]["value"] is not None
    assert values[cell_of(root, "error")]["value"] is None
    like = {sample: row["token_ids"] for (of, sample), row in responses(root).items() if of == cell_of(root, "failing")}
    assert {responses(root)[key]["n_tokens"] > 0 for key in expected} == {True}
    assert all(responses(root)[key]["token_ids"] == like[victim] for key in expected)  # the same method, mended


@pytest.mark.full
def test_a_run_without_failures_after_a_retry_ends_with_0(tmp_path, own_parts, victim, mended):
    one = ("--config-dir", str(own_parts), *PLAIN, f"variants.oom={{base: failing, fault: oom, victim: {victim}}}")
    assert go(tmp_path, *one).code == 1
    assert [row["status"] for row in responses(tmp_path).values()].count("oom") == 1
    mended.add("oom")
    mended = go(tmp_path, *one, "retry=oom")
    assert (mended.code, mended.generated, mended.document["failed"]) == (0, 1, 0)
    assert "ok:" not in mended.out


# ---------------------------------------------------------------------- pictures
UTILS = """
def picture(doc):
    return [doc["image"]]

def question(doc):
    return doc["question"]

def match(doc, results):
    return {"match": float(results[0] == doc["answer"])}
"""

TASK = """
task: scans
dataset_path: nobody/nothing
test_split: test
output_type: generate_until
doc_to_visual: !function utils.picture
doc_to_text: !function utils.question
doc_to_target: answer
process_results: !function utils.match
metric_list: [{metric: match, aggregation: mean, higher_is_better: true}]
"""


def scans(root: Path, damaged: int, impossible: int, huge: int | None = None) -> tuple[str, ...]:
    """Overrides of a task of one's own: four small pages, one of them damaged, one of a shape that the model's
    processor does not take, and one of more pixels than Pillow reads."""
    import datasets
    from PIL import Image

    from mmkv_bench.tiny.pages import make_sample

    samples = [make_sample("lookup", "small", "dev", index) for index in range(4)]
    pictures = [png(sample.images[0]) for sample in samples]
    pictures[damaged] = pictures[damaged][: len(pictures[damaged]) // 2]
    pictures[impossible] = png(Image.new("RGB", (2, 600)))
    if huge is not None:
        chunks = (b"IHDR" + struct.pack(">IIBBBBB", 20000, 20000, 8, 2, 0, 0, 0), b"IDAT")
        parts = [struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk)) for chunk in chunks]
        pictures[huge] = b"\x89PNG\r\n\x1a\n" + b"".join(parts)
    columns = {
        "image": [{"bytes": picture, "path": None} for picture in pictures],
        "question": [sample.question for sample in samples],
        "answer": [sample.answer for sample in samples],
    }
    texts = dict.fromkeys(("question", "answer"), datasets.Value("string"))
    data = datasets.Dataset.from_dict(columns, features=datasets.Features({"image": datasets.Image(), **texts}))
    (root / "data").mkdir(parents=True)
    data.to_parquet(root / "data" / "test-00000-of-00001.parquet")
    (root / "utils.py").write_text(UTILS)
    (root / "scans.yaml").write_text(TASK)
    node = {"task": "scans", "include_path": root, "dataset_path": root, "generation": "{max_new_tokens: 8}"}
    return ("dataset=lmms_eval", *(f"datasets.lmms_eval.{key}={value}" for key, value in node.items()))


def png(image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.full
@cover.few(("damaged", "impossible", "huge"), [(2, 0, 3), (0, 1, 3), (2, 1, 0)], first=2)
def test_a_picture_that_cannot_be_read_or_used_is_that_samples_error_in_every_cell(tmp_path, damaged, impossible, huge):
    task, root = scans(tmp_path / "task", damaged, impossible, huge), tmp_path / "rows"
    outcome = go(root, *task, "method=snapkv", "budget=16")
    assert outcome.code == 1
    assert outcome.document["generated"] == {"scans": 4}
    assert "scans: 4 samples x 2 cells" in outcome.out
    rows = {number: [row for row in responses(root).values() if row["doc_id"] == number] for number in range(4)}
    assert [len(cells) for cells in rows.values()] == [2] * 4
    for number, cells in rows.items():
        for row in cells:
            assert row["status"] == ("error" if number in (damaged, impossible, huge) else "ok")
    for row in rows[damaged] + rows[huge]:
        assert row["error"].startswith("DataError: ") and row["sample_id"] in row["error"]
    assert all("DecompressionBomb" in row["error"] for row in rows[huge])
    assert all(row["error"].startswith("ValueError: ") for row in rows[impossible])
    assert outcome.out.count("1/4 ok: ") == 2
    assert [row["value"] for row in setting.metrics(root) if row["metric"] not in FIDELITY] == [None, None]
    assert go(root, *task, "method=snapkv", "budget=16").generated == 0
    again = go(root, *task, "method=snapkv", "budget=16", "retry=error")
    assert (again.generated, again.document["failed"]) == (3, 6)


@pytest.mark.full
def test_without_sharing_faults_are_the_same_rows_and_the_run_continues(tmp_path, own_parts, victim):
    task = scans(tmp_path / "task", damaged=2, impossible=0)
    method = (
        "--config-dir",
        str(own_parts),
        "method=failing",
        "methods.failing.fault=oom",
        "methods.failing.victim='1'",
    )
    command = (*task, *method, "budget=16", "sharing=off")
    assert go(tmp_path / "rows", *command, "limit=3").code == 1
    assert go(tmp_path / "rows", *command).generated == 1  # the rows that failed were measured this run's way too
    rows = sorted(responses(tmp_path / "rows").values(), key=lambda row: row["doc_id"])
    ends = {row["doc_id"]: set() for row in rows}
    for row in rows:
        ends[row["doc_id"]].add(row["status"])
    assert ends == {0: {"error"}, 1: {"ok", "oom"}, 2: {"error"}, 3: {"ok"}}
    assert {row["measured"] for row in rows} == {"own"}


@pytest.mark.full
def test_without_sharing_an_interrupted_sample_keeps_the_cells_that_had_ended(tmp_path, own_parts, victim, mended):
    methods = ("method=[snapkv,failing]", "methods.failing.fault=interrupt", f"methods.failing.victim={victim}")
    command = ("--config-dir", str(own_parts), *PLAIN[:2], "limit=2", *methods, "sharing=off", "fidelity=off")
    root = tmp_path / "rows"
    assert go(root, *command).code == 130
    kept = commits(root)
    assert [sample for _, sample in kept].count(victim) == 2  # full and snapkv, of three cells
    mended.add("interrupt")
    assert done(root, *command).generated == 1
    after = commits(root)
    assert len(after) == 6 and {key: after[key] for key in kept} == kept


@pytest.mark.slow
def test_a_chat_template_without_end_is_refused_when_the_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(load, "TEMPLATE_S", 0.5)
    model = shutil.copytree(files("mmkv_bench") / "tiny" / "weights", tmp_path / "model")
    (model / "chat_template.jinja").write_text(
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    )
    words = ("dataset=pages", "limit=1", "method=[]", "variants.a={base: snapkv}", "budget=16", "timeout_s=0.2")
    outcome = go(tmp_path / "rows", f"model.path={model}", *words)
    assert outcome.code == 2 and "does not render a message of one word within 0.5 seconds" in outcome.err
    assert not responses(tmp_path / "rows")


@pytest.mark.full
def test_what_no_row_could_be_generated_with_is_refused_before_any_work(tmp_path):
    for given in ("do_sample=true", "num_beams=3", "max_new_tokns=3"):
        refused = go(tmp_path / "rows", "dataset=pages", f"datasets.pages.generation.{given}")
        assert refused.code == 2 and refused.document["status"] == "error"
        assert given.split("=")[0] in refused.err and refusal(refused.err).count("\n") == 1
    assert not (tmp_path / "rows").exists()
