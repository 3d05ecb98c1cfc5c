"""Runs of several questions a document: rows, what a retry of one question gives, the table of losses, refusals."""

from __future__ import annotations

import contextlib
import io
import math
import re
from pathlib import Path
from types import SimpleNamespace

import datasets
import pandas as pd
import pytest
from datasets import Dataset, Features, Sequence, Value
from PIL import Image

from mmkv_bench.cli.main import main
from mmkv_bench.datasets.tasks.questions import pages
from mmkv_bench.errors import DataError, StoreError
from mmkv_bench.evaluation.question_groups import QuestionGroups, check_order
from mmkv_bench.report.build import build_report
from mmkv_bench.run.dispatch import VARIABLE, Dispatcher
from mmkv_bench.store.store import Store
from mmkv_bench.tables.questions import _BY_TURN, KNOWN, LOSSES, _table, losses, paired_scores, tables_with_scores
from tests import cover
from tests.run.setting import done, go, responses
from tests.run.test_cut_prompt import MODEL

PROTOCOLS = ("query_aware", "query_agnostic", "query_first", "query_joint", "query_generic", "query_paraphrase")
COMMAND = (
    "dataset=questions_records",
    "method=snapkv",
    "budget=10%",
    f"protocol=[{','.join(PROTOCOLS)}]",
    "fidelity=on",
    "dataset.generation.max_new_tokens=3",
    *MODEL,
)
SAME = ("answer", "kept_digest", "question_number", "question_known", "prompt_hash", "entries_resident", "forced_kl")


@pytest.mark.slow
@cover.few("documents", [1, 2])
def test_a_run_of_documents_prints_their_losses_and_one_question_made_again_has_the_row_of_the_whole_run(
    documents, tmp_path
):
    questions = 4 * documents
    done(tmp_path / "whole", *COMMAND, f"limit={questions}")
    rows = responses(tmp_path / "whole")
    assert len(rows) == questions * 2 * len(PROTOCOLS) and {row["status"] for row in rows.values()} == {"ok"}
    done(tmp_path / "one", *COMMAND, f"samples=[questions_records-{questions - 2:06d}]", "stage=generate")
    again = responses(tmp_path / "one")
    assert len(again) == 2 * len(PROTOCOLS)
    for key, row in again.items():
        assert [row[name] for name in SAME] == [rows[key][name] for name in SAME]
        shared = rows[key]["question_known"] not in (None, "paraphrase") and rows[key]["budget_entries"] is not None
        assert (rows[key]["fork_rows"], row["fork_rows"]) == (4 if shared else 1, 1)

    wide = paired_scores(tmp_path / "whole")
    kl = wide[(wide["metric"] == "fidelity_kl") & (wide["method"] == "snapkv")]
    assert len(kl) == questions and (kl["same"].notna() == kl["other"].isna()).all()
    assert int(kl["same"].notna().sum()) == documents
    both = kl[kl["same"].notna()]
    assert (both["same"] == both["each"]).all(), "the known question again is compressed as anew"
    with contextlib.redirect_stderr(io.StringIO()) as refused:
        assert main(["tables", str(tmp_path / "whole"), "--questions", "--pairs"]) == 2
    assert "--questions does not work with --pairs" in refused.getvalue()
    for store in ("large", "large_protocols"):  # other protocols, and one question a document
        with pytest.raises(StoreError, match="no scores of several questions per document"):
            tables_with_scores(Path(__file__).parents[2] / "results" / "tiny" / store)
    ((table, _),) = tables_with_scores(tmp_path / "whole", metrics=["fidelity_kl"])
    (line,) = (line for line in table.grids[0].rows if line[0] == "snapkv")
    assert [cell.text for cell in line[2:]] == [
        f"{kl[name].mean():.2f}" for name in ("each", "joint", "other", "paraphrase", "generic", "agnostic")
    ]
    notes = " ".join(note.text for note in table.notes)
    assert f"in {2 * documents} of {2 * documents} pairs" in notes and "missing" not in notes


@pytest.mark.slow
def test_a_process_that_is_handed_samples_answers_every_question_of_a_document(tmp_path, monkeypatch):
    """A sample is handed out once, and the first question already asks who answers the others."""
    with Dispatcher().connect() as end:
        monkeypatch.setenv(VARIABLE, str(end.fileno()))
        done(tmp_path, "dataset=pages_questions", "method=snapkv", "budget=64", "protocol=query_agnostic", "limit=8")
    rows = responses(tmp_path).values()
    assert sorted(row["fork_rows"] for row in rows) == [1] * 8 + [4] * 8 and {row["status"] for row in rows} == {"ok"}


@pytest.mark.slow
def test_a_conversation_has_a_row_for_each_turn_whichever_question_is_made_again_and_its_table_tells_turns(tmp_path):
    words = ("dataset=pages_questions", "method=[snapkv,streamingllm]", "budget=64", "protocol=[query_aware,turns]")
    done(tmp_path / "whole", *words, "limit=8", "fidelity=off")
    rows = responses(tmp_path / "whole")
    assert len(rows) == 8 * 3 * 2 and {row["status"] for row in rows.values()} == {"ok"}
    known = [rows[key]["question_known"] for key in sorted(rows) if rows[key]["question_known"]]
    assert {text.count(",") for text in known} == {0, 1, 2, 3} and {text[0] for text in known} == {"0", "1"}
    done(tmp_path / "one", *words, "limit=8", "fidelity=off", "samples=[pages_questions-000006]", "stage=generate")
    again = responses(tmp_path / "one")
    assert len(again) == 3 * 2
    for key, row in again.items():
        assert [row[name] for name in SAME] == [rows[key][name] for name in SAME]
    wide = paired_scores(tmp_path / "whole")
    assert set(wide["place"]) == {1, 2, 3, 4} and (wide["turns"] == wide["each"])[wide["place"] == 1].all()
    ((table, _),) = tables_with_scores(tmp_path / "whole")
    build_report([tmp_path / "whole"], tmp_path / "report", 1)
    page = (tmp_path / "report" / "questions.html").read_text()
    assert table.title in page and all(f">{cell.text}</td>" in page for row in table.grids[0].cells for cell in row)
    assert 'href="questions.html"' in (tmp_path / "report" / "index.html").read_text()
    assert len([*(tmp_path / "report" / "figures").glob("places-0-*.js")]) == 2, "a chart for each method"
    assert table.grids[-1].header == ["method", "budget", "turn 1", "turn 2", "turn 3", "turn 4"]
    for words_, why in (
        (("method=pyramidkv",), "pyramidkv gives some layers or heads more entries"),
        (("method=snapkv", "decode=compiled"), "protocol=turns decodes eagerly"),
    ):
        refused = go(tmp_path / "no", *words[:1], *words_, "budget=64", "protocol=turns", "limit=4")
        assert refused.code == 2 and re.search(why, refused.err), refused.err


def test_missing_scores_are_counted_below_the_table():
    line = pd.DataFrame(
        [
            {"model": "m", "dataset": "d", "metric": "exact_match", "method": "snapkv", "reading": "",
             "budget": "20%", "seed": "", "cluster": f"d{n // 2}", "sample_id": f"s{n}", "each": 1.0,
             "joint": math.nan if n < 3 else 1.0,
             "other": 0.0 if n % 2 else math.nan, "same": math.nan if n % 2 or n == 4 else 1.0,
             "paraphrase": math.nan, "generic": math.nan, "agnostic": math.nan, "turns": math.nan, "place": 1}
            for n in range(24)
        ]
    )  # fmt: skip
    (note,) = (note.text for note in _table(("m", "d", "exact_match"), line).notes if "missing" in note.text)
    assert note.startswith("4 scores are missing")
    other = line.assign(method="keydiff", turns=line["each"].where(line["joint"].notna()))
    (note,) = (
        note.text
        for note in _table(("m", "d", "exact_match"), pd.concat([line, other])).notes
        if "missing" in note.text
    )
    assert note.startswith("11 scores are missing"), "of a mode that a method has no score of, none is missing"


def test_scores_that_pair_with_no_others_have_no_table_of_losses():
    """A store of conversations alone has one column of scores, so there is nothing to subtract from."""
    line = {"model": "m", "dataset": "d", "metric": "exact_match", "method": "snapkv", "reading": "", "budget": "20%"}
    rows = [
        line | {"seed": "", "cluster": f"d{n // 2}", "sample_id": f"s{n}", "place": 1 + n % 2, "turns": n % 3 / 2}
        for n in range(8)
    ]
    alone = pd.DataFrame(rows).reindex(columns=[*rows[0], *(set(KNOWN) - {"turns"}), "same"])
    for frame, headings in ((alone, ["", _BY_TURN]), (alone.assign(each=1.0), ["", "losses", _BY_TURN])):
        table = _table(("m", "d", "exact_match"), frame)
        notes = " ".join(note.text for note in table.notes)
        assert [grid.heading for grid in table.grids] == headings
        assert ("Losses" in notes) == ("No intervals" in notes) == ("losses" in headings)


def test_losses_are_means_over_documents_with_a_sign_that_says_worse():
    rows = [
        {"cluster": f"d{document}", "each": 1.0, "joint": 0.5, "other": 0.25 * (question > 0), "generic": math.nan}
        for document in range(12)
        for question in range(document % 3 + 1)
    ]
    line = pd.DataFrame(rows).assign(paraphrase=math.nan, agnostic=0.0, turns=math.nan)
    found = losses(line, "made", "exact_match")
    assert set(found) == {"room", "unknown", "agnostic"} and set(LOSSES) > set(found)
    assert found["room"][0] == 0.5 and found["agnostic"][0] == 1.0 and found["room"][2] == 12
    per_document = [0.5 - 0.25 * (size - 1) / size for size in (1, 2, 3)]
    mean, interval, _ = found["unknown"]
    assert mean == pytest.approx(sum(per_document) / 3) and interval.low < mean < interval.high
    assert losses(line, "made", "fidelity_kl")["room"][0] == -0.5
    assert losses(line[line["cluster"] < "d2"], "made", "exact_match")["room"][1].low is None


@pytest.mark.slow
def test_what_has_no_further_questions_is_refused_in_one_sentence(tmp_path):
    for words, said in (
        (
            ("dataset=pages", "protocol=query_first"),
            "but pages_small has one; choose dataset=questions_records",
        ),
        (
            ("dataset=questions_records", "limit=6", *MODEL),
            "limit=6 ends within a document of questions_records.*limit=4 or limit=8",
        ),
        (("dataset=questions_records", "limit=3", *MODEL), "which has 4 questions; give limit=4"),
        (("dataset=questions_records", "limit=4", "sharing=off", "protocol=query_joint", *MODEL), "write sharing=on"),
        (
            ("dataset=questions_records", "limit=4", "method=oracle", "protocol=query_first", *MODEL),
            "oracle scores by the answer",
        ),
        (
            ("dataset=questions_records", "dataset.questions_key=nothing", "limit=4", *MODEL),
            "questions_key='nothing' is not a field",
        ),
        (
            ("dataset=pages_questions", "limit=4", "protocol=query_paraphrase"),
            "scores by each question in other words, but pages_questions has no such field",
        ),
    ):
        outcome = go(tmp_path, *words)
        assert outcome.code == 2 and re.search(said, outcome.err), (words, outcome.err)


def test_the_questions_of_a_page_ask_for_other_keys_of_one_picture_that_is_drawn_the_same_each_time():
    rows = pages.rows("dev")
    assert len(rows) == 400
    for begin in range(0, 400, 4):
        asked = {row["questions"][row["question_number"]] for row in rows[begin : begin + 4]}
        assert len(asked) == 4 and {row["document"] for row in rows[begin : begin + 4]} == {rows[begin]["document"]}
    first = pages.image("dev", 0)
    assert pages.image("dev", 1).tobytes() != first.tobytes() == pages.image("dev", 0).tobytes()
    assert pages.image("test", 0).tobytes() != first.tobytes()


@pytest.mark.slow
def test_the_embedded_model_reads_all_questions_of_pages(tmp_path):
    done(
        tmp_path,
        "dataset=pages_questions",
        "method=full",
        "protocol=[query_aware,query_first,query_generic]",
        "limit=4",
    )
    rows = responses(tmp_path)
    assert len(rows) == 12 and {row["question_number"] for row in rows.values()} == {0, 1, 2, 3}
    scores = Store(tmp_path).samples(columns=["value"]).to_pydict()["value"]
    assert sum(scores) >= 10


@pytest.mark.slow
def test_questions_about_one_picture_are_one_document_wherever_they_stand(tmp_path):
    """In a folder of DocVQA's form, no question next to the other of its page; what is known hangs on no limit."""
    colours = [30, 90, 30, 200, 90, 30]
    pictures = [Image.new("RGB", (56, 56), (level, 60, 60)) for level in colours]
    texts = [{"question": f"what is {n}?", "answers": ["a"], "ucsf_document_id": f"d{n}"} for n in range(len(colours))]
    features = Features({**Dataset.from_list(texts).features, "image": datasets.Image()})
    made = Dataset.from_list(
        [row | {"image": one} for row, one in zip(texts, pictures, strict=True)], features=features
    )
    (tmp_path / "data").mkdir()
    made.to_parquet(tmp_path / "data" / "validation-00000.parquet")
    words = (
        "dataset=docvqa",
        f"dataset.dataset_path={tmp_path / 'data'}",
        "method=snapkv",
        "budget=10%",
        "fidelity=off",
    )
    words += ("dataset.generation.max_new_tokens=2",)
    three = "protocol=[query_first,query_joint,query_aware]"
    done(tmp_path / "whole", *words, three, "limit=6")
    rows = responses(tmp_path / "whole")
    cells = Store(tmp_path / "whole").cells().to_pydict()
    protocols = dict(zip(cells["cell"], cells["protocol"], strict=True))
    known = {
        (row["sample_id"][-1], row["question_number"], row["question_known"])
        for row in rows.values()
        if protocols[row["cell"]] == "query_joint"
    }
    assert known == {
        ("0", 0, "0,1,2"),
        ("2", 1, "0,1,2"),
        ("5", 2, "0,1,2"),
        ("1", 0, "0,1"),
        ("4", 1, "0,1"),
        ("3", 0, "0"),
    }
    assert {(row["status"], row["error"]) for row in rows.values()} == {("ok", None)}
    assert {row["fork_rows"] for row in rows.values() if row["question_known"] == "0,1,2"} == {1, 3}, "full, snapkv"
    done(tmp_path / "two", *words, three, "limit=2")
    again = responses(tmp_path / "two")
    assert {row["fork_rows"] for row in again.values()} == {1}, "no question behind the limit is answered"
    for key, row in again.items():
        assert [row[name] for name in SAME] == [rows[key][name] for name in SAME]
    refused = go(tmp_path / "no", *words, "protocol=query_generic", "limit=2")
    assert refused.code == 2 and "has no such field; leave the protocol out" in refused.err


def test_questions_that_stand_before_a_picture_and_empty_lists_are_refused():
    """The text behind the picture is equal, so both would be answered from the first one's prompt."""

    def messages(number: int) -> list[dict]:
        asked = ("Which shape is it?", "Which colour is it?")[number]
        text = [{"type": "text", "text": part} for part in (asked, "Answer.")]
        return [{"role": "user", "content": [text[0], {"type": "image"}, text[1]]}]

    rows = Dataset.from_list([{"page": "p", "asked": [], "question_number": 0}] * 2)
    rows = rows.cast_column("asked", Sequence(Value("string")))
    spec = SimpleNamespace(dataset="own", name="own", questions_key="page", sample_id=lambda number: f"own-{number}")
    groups = QuestionGroups(spec, rows, rows)
    for number in (0, 1):
        ref = SimpleNamespace(doc_id=number, sample_id=f"own-{number}", cluster="p")
        with pytest.raises(
            DataError, match="own-0 and own-1 have one value of page.*but different text before its end"
        ):
            groups.of(ref, messages(number), "", messages)
    spec.questions_key = "asked"
    with pytest.raises(DataError, match="asked lists no question for a document of own; give each"):
        check_order(spec, rows, [SimpleNamespace(cluster="p")] * 2)
