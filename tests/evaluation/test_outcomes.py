"""Promise: what became of answers is held once and told apart exactly, and what nobody asks about is forgotten."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mmkv_bench.evaluation import outcomes
from mmkv_bench.evaluation.outcomes import Outcome, Outcomes

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


def test_an_answer_that_is_asked_about_stays_and_another_is_forgotten(monkeypatch):
    monkeypatch.setattr(outcomes, "HELD", 0)
    held = Outcomes([0])
    often = Outcome({}, {}, [])
    held.put(0, "often", often)
    held.put(0, "once", Outcome({"hit": 1.0}, {}, []))
    for _ in range(3):
        held.make_room()
        assert held.unknown(0, ["often", "new"]) == ["new"]
        assert held.of(0, "often") is often
    assert held.unknown(0, ["once"]) == ["once"]
