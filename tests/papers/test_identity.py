"""Promise: no row that was made with anything else than an address says is evidence for what is printed there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from mmkv_bench.papers import evidence
from mmkv_bench.papers.evidence import Evidence
from mmkv_bench.papers.layout import TableLayout, load
from mmkv_bench.store.schema import COLUMNS
from tests import cover
from tests.papers import forgeries
from tests.papers.forgeries import draw, filled, forged, scored, timed
from tests.papers.genuine import genuine
from tests.papers.roles import CONTEXT, FREE, IDENTITY, ROLES, columns
from tests.papers.words import text
from tests.tables.examples import cell_row

FULL, METHOD = 0, 1


def test_every_column_has_one_role_and_what_a_cells_hash_covers_is_never_free():
    assert {*ROLES} == {*COLUMNS}
    for table, own in COLUMNS.items():
        declared = [name for role in (IDENTITY, CONTEXT, FREE) for name in columns(table, role)]
        assert sorted(declared) == sorted(column.name for column in own), table
    hashed = {column.name for column in COLUMNS["cells"] if column.identity}
    assert hashed - {*columns("cells", IDENTITY)} == {"torch", "transformers"}, (
        "newer libraries are another run of the same"
    )
    assert not hashed & {*columns("cells", FREE)}
    forgeable = {*forgeries.COLUMNS, *forgeries.APART, *forgeries.TIMES}
    assert {*columns("cells", IDENTITY)} <= forgeable, "a column without a wrong value is not tested"


@pytest.mark.slow
def test_what_answers_say_of_what_was_kept_stands_beside_their_number(tmp_path):
    """More entries than asked are no evidence; fallbacks and a paper's own excess are told."""
    over, fell = {"entries_asked": 100, "entries_resident": 101}, {"fallback": ["window_reduced"]}
    spec, evidence = scored(tmp_path / "over", answer=over)
    (_, cell) = filled(spec, evidence)
    assert cell.measured.mismatches == ("200 of 200 answers kept more entries than asked",) and "agrees" not in text(
        cell
    )
    spec, evidence = scored(tmp_path / "fell", answer=fell | {"question_text_before_cut": 2})
    (_, cell) = filled(spec, evidence)
    assert text(cell).endswith("agrees †") and not cell.measured.mismatches
    told = {"fallback window_reduced in 200 of 200 answers", "question text before a cut in 200 of 200 answers"}
    assert told < {*cell.measured.unstated}
    assert [one.measured.unstated for one in filled(spec, evidence)[:1]] == [cell.measured.unstated[:-2]]


def words(spec: TableLayout, evidence: Evidence) -> list[str]:
    return [text(one) for one in filled(spec, evidence)]


def agreeing(
    spec: TableLayout, evidence: Evidence, table: Mapping[str, tuple[Any, ...]], rows: tuple[int, ...]
) -> list[str]:
    """Which of the wrong values in a row leave the word `agrees` in its cell, or of `full` in the one that needs it."""
    found = []
    for column, values in table.items():
        for value in values:
            for row in rows:
                cells = words(spec, forged(evidence, row, column, value))
                found += [f"{column}={value} of {row}: {cell}" for cell in cells[row:] if "agrees" in cell]
    return found


def some(table: Mapping[str, tuple[Any, ...]], share: int) -> dict[str, tuple[Any, ...]]:
    """Of every column the first value, and one in `share` of its further values."""
    return {column: (*values[:1], *cover.turn(values[1:], 0, share)) for column, values in table.items()}


@pytest.mark.slow
@cover.shares(3)
def test_a_wrong_value_of_any_identity_column_is_no_evidence(tmp_path, share):
    spec, evidence = scored(tmp_path)
    honest = words(spec, evidence)
    assert [cell.endswith("agrees †") for cell in honest] == [True, True], "the commit of the weights is stated nowhere"
    assert agreeing(spec, evidence, some(forgeries.COLUMNS, share), (METHOD,)) == []
    first = {column: values[:1] for column, values in forgeries.COLUMNS.items()}
    assert agreeing(spec, evidence, {**first, "reading": (), "budget_kind": (), "parameters": ()}, (FULL,)) == []
    for column, values in forgeries.APART.items():
        full, method = words(spec, forged(evidence, FULL, column, values[0]))
        assert full.endswith("agrees †") and "full was run with other" in method, "what nothing states both must share"


def test_data_of_a_folder_count_only_where_nothing_else_is_to_be_had_or_their_fingerprint_is_stated():
    root = json.dumps({"data": {"source": "upstream", "root": "/data"}})
    for table, dataset, said in (("mmshift_table01", "ocrbench", 1), ("hybridkv_table01", "milebench_mmcoqa", 0)):
        at = next(one.address for one in load(table).cells if one.address.dataset == dataset)
        row = cell_row("c", "full", **genuine(at.model, dataset, "full", config=root))
        row["generation"] = json.dumps(json.loads(row["generation"]) | {"max_new_tokens": at.max_new_tokens or 512})
        found = evidence.contradictions(at, evidence.facts_of(row))
        assert found == ("source folder, the table has hub",) * said


@pytest.mark.slow
@cover.shares(3)
def test_a_ratio_is_of_two_times_of_one_device_that_nothing_disturbed(tmp_path, share):
    spec, evidence = timed(tmp_path / "gpu")
    assert words(spec, evidence)[METHOD] == "10.88 / 21.75, ratio 0.713 / 0.713 agrees †"
    table = some({column: values for column, values in forgeries.TIMES.items() if column != "cpu"}, share)
    assert agreeing(spec, evidence, table, (FULL, METHOD)) == []
    assert "full was run with other device" in words(spec, forged(evidence, FULL, "device", "NVIDIA A100"))[METHOD]
    spec, evidence = timed(tmp_path / "cpu", device="cpu")
    assert "agrees" in words(spec, evidence)[METHOD]
    assert "other cpu" in words(spec, forged(evidence, FULL, "cpu", "another processor"))[METHOD]
    disturbed = timed(tmp_path / "disturbed", disturbed=("clock held down",))
    assert words(*disturbed)[METHOD].endswith("not comparable: disturbed by clock held down *")


@pytest.mark.slow
def test_answers_to_other_prompts_by_another_judge_or_to_too_many_questions_are_no_evidence(tmp_path):
    spec, evidence = scored(tmp_path / "prompts", answer={"prompt_hash": "q"})
    assert "full has other prompts" in words(spec, evidence)[METHOD]
    many = words(*scored(tmp_path / "many", right=(200, 162), n=300))
    assert all("300 answers, the data set has 200 *" in cell for cell in many)
    assert "full has other scorer" in words(*scored(tmp_path / "judged", judge="another-judge"))[METHOD]


@pytest.mark.full
def test_of_a_thousand_forged_rows_none_agrees(tmp_path):
    """Seeded: one to three wrong values in a row, of names, settings, versions or scores beyond the margin (1 point)."""
    rng = np.random.default_rng(20261125)
    bases = [scored(tmp_path / "a"), scored(tmp_path / "b", right=(136, 111)), scored(tmp_path / "c", right=(130, 105))]
    times, agreed = timed(tmp_path / "t"), []
    for number in range(1000):
        spec, evidence = times if number % 5 == 4 else bases[rng.choice(3, p=(0.8, 0.1, 0.1))]
        honest, row, told = evidence is bases[0][1] or evidence is times[1], int(rng.integers(2)), []
        table = forgeries.TIMES if evidence is times[1] else forgeries.COLUMNS
        skipped = (
            {"cpu"} if evidence is times[1] else {"reading", "budget_kind", "parameters"} if row == FULL else set()
        )
        changed = evidence
        for _ in range(int(rng.integers(1, 4)) if honest else 0):
            column, value = draw(rng, {name: values for name, values in table.items() if name not in skipped})
            changed = forged(changed, row, column, value)
            told.append(f"{column}={value}")
        agreed += [f"{number}: {told}: {cell}" for cell in words(spec, changed)[row:] if "agrees" in cell]
    assert agreed == []


@pytest.mark.slow
def test_trials_halves_and_newer_libraries_leave_one_number_with_a_true_reason(tmp_path):
    whole, trial, other = tmp_path / "whole", tmp_path / "trial", tmp_path / "other"
    spec, evidence = scored(whole)
    honest = words(spec, evidence)
    scored(trial, right=(50, 50), n=50)  # its first 50 answers, as the whole run gave them
    assert words(spec, Evidence.of([trial]))[FULL].startswith("part (50 of 200): 100.00 / 66.50, +33.50 [")
    assert words(spec, Evidence.of([trial, whole])) == honest == words(spec, Evidence.of([whole, trial]))
    scored(other, right=(0, 0), n=50)
    conflict = filled(spec, Evidence.of([whole, other]))[FULL].measured
    assert (conflict.state, conflict.why) == ("ambiguous", "two stores hold the same cell with other scores")
    newer = [tmp_path / "newer trial", tmp_path / "newer run"]
    scored(newer[0], right=(50, 50), n=50, torch="2.16")
    assert words(spec, Evidence.of([whole, newer[0]])) == honest, "a trial under newer libraries hides no whole run"
    scored(newer[1], torch="2.17")
    assert words(spec, Evidence.of([whole, *newer])) == honest, "a re-run leaves finished cells finished"
    one = words(*scored(tmp_path / "one", right=(1, 0), n=1))[FULL]
    assert one.startswith("part (1 of 200): ") and one.endswith(" undecided †")
    late = words(*scored(tmp_path / "late", seed=7))[METHOD]
    assert late == "- / 54.00 not run: there are rows of seed 7, the table has 0"


def test_a_number_of_some_of_the_answers_is_no_evidence(tmp_path):
    """All 200 answers are there and 50 are scored, of which as large a share is right."""
    spec, evidence = scored(tmp_path / "few", of_method=(*range(27), *range(108, 131)))
    assert [one.measured.state for one in filled(spec, evidence)] == ["measured", "waiting"]
    assert words(spec, evidence)[METHOD] == "- / 54.00 waiting: for the scores of 150 of 200 answers"
