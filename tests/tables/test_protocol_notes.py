"""Notes on the share of answers that scores test, and on methods that knew data beforehand."""

from __future__ import annotations

import json

import pytest

from mmkv_bench.config.files import conf_dir
from mmkv_bench.tables.build import build
from mmkv_bench.tables.stored_rows import load
from tests.each import each
from tests.tables.examples import Example, markdown

EOS, DOT = 1, 2


def table_of(answers: list[list[int]], protocol: str = "paper", finish: str = "eos", tmp_path=None) -> str:
    """A table of full, which answers as given, and of snapkv at 64; through a store on disk where there is a folder."""
    example = Example()
    scores = [1.0] * len(answers)
    example.add("full", None, scores, protocol=protocol)
    example.add("snapkv", 64, scores, protocol=protocol)
    for row, ids in zip(example.responses, answers, strict=False):  # those of full come first
        row |= {"token_ids": ids, "n_tokens": len(ids), "finish_reason": finish, "tokens_from_compressed": 0}
    return markdown(build(example.rows() if tmp_path is None else load(example.write(tmp_path))))


@pytest.mark.slow
@each(
    ("answers", "share"),
    [
        ([[5, 6, DOT, EOS], [7, 8, DOT, EOS], [9, 6, DOT, EOS]], 50),  # two letters and a dot: chain
        ([[5, 6, 7, EOS], [8, 6, 9, EOS]], 33),  # three digits: lookup
        ([[5, EOS], [6, EOS]], 100),  # a letter
        ([[5, EOS], [6, 7, 8, 9, EOS]], 62),  # mean of 1 and 1/4
        ([[EOS], [6, 7, 8, 9, EOS]], 62),  # an empty answer is what the prefill says
        ([[5, 6, 7, EOS]] * 2, 33),  # all the same: nobody knows what is an ending
    ],
)
def test_the_share_of_the_answers_that_no_method_can_change_is_printed_and_marks_the_task_from_half_on(
    answers: list[list[int]], share: int, tmp_path
) -> None:
    for text in (table_of(answers), table_of(answers, tmp_path=tmp_path)):
        assert f"{share}% of the answer tokens cannot be affected" in text
        assert (
            ("answers mostly free;" in text.splitlines()[0]) == (share >= 50) == ("- Answers are mostly free. " in text)
        )


def test_an_answer_that_was_cut_short_has_no_end_token_to_leave_out() -> None:
    assert "50% of the answer tokens" in table_of([[5, 6], [7, 8]], finish="length")


def test_under_other_protocols_no_token_is_free_and_strict_says_what_is() -> None:
    answers = [[5, EOS], [6, EOS]]
    agnostic, strict = table_of(answers, "query_agnostic"), table_of(answers, "strict")
    assert "of the answer tokens" not in agnostic + strict
    assert "mostly free" not in agnostic + strict
    assert "what they took up from evicted entries stays" in strict
    assert "evicted entries" not in agnostic


def test_a_table_of_full_alone_has_nothing_to_test() -> None:
    example = Example()
    example.add("full", None, [1.0, 1.0])
    assert "answer tokens" not in markdown(build(example.rows()))


def test_calibrated_lines_are_marked_and_say_what_they_have_seen() -> None:
    committed = json.loads((conf_dir() / "calibration" / "tiny" / "sparsemm.json").read_text())
    known, told, lost = committed["checksum"][:16], "a" * 16, "b" * 16
    example = Example()
    example.add("full", None, [1.0, 1])
    example.add("snapkv", 64, [1.0, 1], parameters={"window": 8})
    example.add("sparsemm", 64, [1.0, 1], parameters={"calibration": {"sparsemm": known}})
    example.add("mmshift_sparsemm", 64, [1.0, 1], parameters={"calibration": {"sparsemm": known}}, tuned=True)
    example.add("prefixkv_online", 64, [1.0, 1], parameters={"calibration": "auto", "mode": "online"})
    config = json.dumps({"calibrations": {told: {"dataset": "essays", "samples": 7}}})
    example.add("prefixkv", 64, [1.0, 1], parameters={"calibration": {"prefixkv": told}}, config=config)
    example.add("hybridkv", 64, [1.0, 1], parameters={"calibration": {"hybridkv": lost}})
    text = markdown(build(example.rows()))
    marked = {
        line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ") and "calibrated" in line
    }
    assert marked == {
        "sparsemm (calibrated)",
        "mmshift_sparsemm (calibrated, tuned)",
        "prefixkv (calibrated)",
        "hybridkv (calibrated)",
    }
    assert (
        f"- Calibrated: mmshift_sparsemm, sparsemm by sparsemm {known} (250 samples: {committed['dataset']}). Other methods have "
        "not seen these data." in text
    )
    assert f"- Calibrated: prefixkv by prefixkv {told} (7 samples: essays). Other" in text
    assert f"- Calibrated: hybridkv by hybridkv {lost} (unknown samples). Other" in text
