"""Promise: what became of answers is held once and told apart exactly, and what nobody asks about is forgotten."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mmkv_bench.evaluation import grader
from mmkv_bench.evaluation.grader import Outcome, Outcomes

NUMBERS = st.sampled_from([0.0, -0.0, 1.0, 0.1, float("nan"), float("inf")])
RETURNED = st.one_of(NUMBERS, st.sampled_from([0, 1, False, True, None, "1", "1.0", [1], {"score": 1}]))
OUTCOMES = st.builds(
    Outcome,
    st.dictionaries(st.sampled_from("ab"), NUMBERS),
    st.dictionaries(st.sampled_from("ab"), st.tuples(NUMBERS, NUMBERS)),
    st.lists(st.dictionaries(st.sampled_from("ab"), RETURNED), max_size=2),
)


@given(st.lists(OUTCOMES, max_size=12))
def test_every_answer_has_its_own_outcome_to_the_type_and_sign_of_each_value(made):
    held = Outcomes(range(len(made)))
    for doc_id, outcome in enumerate(made):
        held.put(doc_id, "text", outcome)
    assert [repr(held.of(doc_id, "text")) for doc_id in range(len(made))] == list(map(repr, made))


def test_equal_outcomes_are_one_object_unless_a_value_can_be_changed():
    held = Outcomes(range(4))
    for doc_id, value in enumerate([1.0, 1.0, [1.0], [1.0]]):
        held.put(doc_id, "text", Outcome({"hit": 1.0}, {}, [{"hit": value}]))
    assert held.of(0, "text") is held.of(1, "text")
    assert held.of(2, "text") is not held.of(3, "text")


def test_where_many_are_held_those_that_are_asked_about_stay_and_others_are_forgotten(monkeypatch):
    monkeypatch.setattr(grader, "HELD", 2)
    held = Outcomes([0, 1])
    for doc_id, text in ((0, "often"), (0, "once")):
        held.put(doc_id, text, Outcome({text: 1.0}, {}, []))
    assert held.unknown({0: ["often", "new"]}) == {0: ["new"]}
    assert held.unknown({0: ["once"]}) == {0: []}  # two are not many
    held.put(1, "once", Outcome({}, {}, []))
    assert held.unknown({0: ["often"], 1: ["new"]}) == {0: [], 1: ["new"]}
    assert held.of(0, "often").values == {"often": 1.0}
    assert held.unknown({0: ["once"], 1: ["once"]}) == {0: ["once"], 1: ["once"]}


def test_no_more_kinds_are_looked_for_than_are_worth_it(monkeypatch):
    monkeypatch.setattr(grader, "KINDS", 1)
    held = Outcomes(range(4))
    for doc_id, value in enumerate([1.0, 2.0, 2.0, 1.0]):
        held.put(doc_id, "text", Outcome({"hit": value}, {}, []))
    assert [held.of(doc_id, "text").values["hit"] for doc_id in range(4)] == [1.0, 2.0, 2.0, 1.0]
    assert held.of(0, "text") is held.of(3, "text") and held.of(1, "text") is not held.of(2, "text")
