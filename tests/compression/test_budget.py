"""Promise: a budget is read exactly, in one of two kinds that are never converted into one another, or refused."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmkv_bench.compression.budget import Budget, StateCost
from mmkv_bench.errors import ConfigError
from tests.each import each

decimals = st.integers(1, 10**6).map(lambda n: Decimal(n).scaleb(-6))  # 0.000001 to 1
lengths = st.integers(1, 200_000)


@given(st.integers(1, 10**9))
def test_whole_numbers_are_entries_in_every_spelling(number):
    for spelling in (number, str(number), f" {number} ", f"+{number}"):
        budget = Budget.parse(spelling)
        assert (budget.kind, budget.entries, budget.fraction, budget.fraction_text) == ("entries", number, None, None)
        assert budget.entries_for(1) == budget.entries_for(10**6) == number
        assert str(budget) == str(number)


@given(decimals, lengths)
def test_fractions_keep_the_exact_decimal_floor_and_at_least_one_entry(fraction, length):
    exact = Fraction(fraction)
    budget = Budget.parse(str(fraction))
    assert budget.kind == "fraction" and budget.entries is None
    assert budget.entries_for(length) == max(1, exact.numerator * length // exact.denominator)
    assert 1 <= budget.entries_for(length) <= length


@given(decimals)
def test_percent_point_and_float_spellings_are_one_budget(fraction):
    plain, percent = format(fraction, "f"), format(fraction * 100, "f") + "%"
    spellings = {Budget.parse(plain), Budget.parse(percent), Budget.parse(percent.replace("%", " %"))}
    spellings |= {Budget.parse(fraction), Budget.parse(float(fraction)), Budget.parse(plain + "000")}
    assert len(spellings) == 1, "equal budgets are one cell"
    budget = spellings.pop()
    assert Decimal(budget.fraction_text) == fraction and "E" not in budget.fraction_text
    assert Budget.parse(str(budget)) == budget and str(budget).endswith("%")


def test_binary_floats_do_not_lose_an_entry():
    assert int(0.29 * 100) == 28  # what plain arithmetic would keep
    for length, fraction, entries in (
        (100, 0.29, 29),
        (100, 0.57, 57),
        (1000, 0.001, 1),
        (10, 0.7, 7),
        (1100, 1.1e-1, 121),
    ):
        assert Budget.parse(fraction).entries_for(length) == entries
    assert Budget.parse("20%") == Budget.parse(0.2) == Budget.parse("0.20") == Budget.parse(".2")


def test_one_is_an_entry_and_one_point_zero_is_everything():
    for one in (1, "1", "01"):
        assert Budget.parse(one) == Budget("entries", entries=1)
    for everything in (1.0, "1.0", "100%", "1.", Decimal("1.0")):
        budget = Budget.parse(everything)
        assert budget.kind == "fraction" and budget.entries_for(77) == 77
    assert Budget.parse(1) != Budget.parse(1.0)


def test_a_parsed_budget_is_parsed_already():
    budget = Budget.parse(0.25)
    assert Budget.parse(budget) is budget


# fmt: off
REFUSED = (
    0, -1, "0", "-3", "+0", 0.0, -0.2, 1.5, 64.0, "64.0", "1.0001", "101%", "0%", "-5%", "abc", "", " ", "%", "5%%",
    "0.2.1", "1/2", "nan", "inf", "-inf", "++5", "+-5", "²", "٣", "1_000", "1e3", "0_.5", "nan%", float("nan"),
    float("inf"), True, False, None, [64], {"entries": 64}, b"64", 2j,
)
# fmt: on


@each("value", REFUSED)
def test_everything_else_is_refused_with_what_was_got_and_what_is_allowed(value):
    with pytest.raises(ConfigError) as caught:
        Budget.parse(value)
    message = str(caught.value)
    assert "budget=" in message and "allowed" in message
    got = value.strip() if isinstance(value, str) else str(value)
    assert got in message


texts = st.one_of(st.text(max_size=8), st.text("0123456789+-.%eE_ ²٣", max_size=6))


@given(st.one_of(texts, st.integers(max_value=0), st.floats().filter(lambda x: not 0 < x <= 1)))
@settings(max_examples=300)
def test_anything_is_a_budget_in_its_range_or_a_config_error(value):
    try:
        budget = Budget.parse(value)
    except ConfigError:
        return
    assert isinstance(value, str)
    assert budget.entries_for(50) >= 1
    assert budget.entries >= 1 if budget.kind == "entries" else 0 < budget.fraction <= 1


def test_bytes_are_the_entries_that_they_leave_when_windows_and_states_are_paid():
    cost = StateCost(entry=3072, beside=7_680_000)
    for text, nbytes in (("16MiB", 16 * 2**20), ("16 MB", 16_000_000), ("0.5gib", 2**29), ("7683072B", 7_683_072)):
        budget = Budget.parse(text, cost)
        assert (budget.kind, budget.entries, budget.in_bytes) == ("entries", (nbytes - 7_680_000) // 3072, text)
        assert budget == Budget.parse(budget.entries) and hash(budget) == hash(Budget.parse(budget.entries))
        assert Budget.parse(str(budget)) == budget, "a cell and a table name the entries"
        held = 7_680_000 + budget.entries * 3072
        assert held <= nbytes < held + 3072
    for text in ("7683071B", "1KiB"):
        with pytest.raises(
            ConfigError, match="leaves no entry.*hold 7,680,000 bytes.*allowed: 7,683,072 bytes or more"
        ):
            Budget.parse(text, cost)
    for text, known in (("0MiB", cost), ("0.5B", cost), ("0MiB", None)):
        with pytest.raises(ConfigError, match=f"budget={text} keeps nothing"):
            Budget.parse(text, known)
    with pytest.raises(ConfigError, match="more than rows can store"):
        Budget.parse("99999999999TiB", cost)
    with pytest.raises(ConfigError, match="the model's shape is unknown"):
        Budget.parse("16MiB")
    for wrong in ("16Mi", "MiB", "-1MiB", "1e3MiB", "16MiB2"):
        with pytest.raises(ConfigError, match="is not a budget"):
            Budget.parse(wrong, cost)
