"""A loop of cases fails when one of them does, says which, and leaves nothing to the next."""

from __future__ import annotations

import os

import pytest

from tests.each import each


def test_every_case_runs_and_each_failure_names_its_values():
    seen = []

    @each("left, right", [(1, 1), (1, 2), (2, 2), (3, 4)])
    def test_equal(left, right):
        seen.append((left, right))
        assert left == right

    with pytest.raises(BaseExceptionGroup, match="2 of 4 cases of test_equal fail") as failed:
        test_equal()
    assert len(seen) == 4
    assert [error.__notes__[-1].rpartition(": {")[2] for error in failed.value.exceptions] == [
        "'left': 1, 'right': 2}",
        "'left': 3, 'right': 4}",
    ]


def test_an_error_that_does_not_come_fails_the_loop_and_a_skip_hides_no_failure():
    @each("number", [0, 1, 2])
    def test_number(number):
        if number == 1:
            pytest.skip("one")
        with pytest.raises(ZeroDivisionError):
            1 / number

    with pytest.raises(BaseExceptionGroup, match="1 of 3 cases"):
        test_number()

    @each("number", [0, 1])
    def test_skipped(number):
        if number:
            pytest.skip("one")

    with pytest.raises(pytest.skip.Exception, match="1 of 2 cases, the others pass: {'number': 1}: one"):
        test_skipped()


@each("name", ["a", "b"])
@each("value", ["1", "2"])
def test_each_case_has_fixtures_of_its_own(name, value, tmp_path, monkeypatch, capsys):
    assert list(tmp_path.iterdir()) == [] and "EACH_CASE" not in os.environ
    (tmp_path / name).write_text(value)
    monkeypatch.setenv("EACH_CASE", value)
    print(name, value)
    assert capsys.readouterr().out == f"{name} {value}\n"


def test_no_cases_and_unknown_names_are_refused():
    with pytest.raises(AssertionError, match="no cases for name"):
        each("name", [])
    with pytest.raises(AssertionError, match="takes no {'nam'}"):
        each("nam", [1])(lambda name: None)


def test_of_cases_that_say_the_same_some_are_left_to_test_full():
    seen = []

    @each("number", range(10), keep=3)
    def test_number(number):
        seen.append(number)

    (mark,) = test_number.pytestmark
    some, whole = mark.args[1]
    assert [each_mark.name for each_mark in whole.marks] == ["full"] and not some.marks
    test_number(cases_of_each=some.values[0])
    test_number(cases_of_each=whole.values[0])
    assert seen == [0, 3, 6, *range(10)]
