"""Scores by the place of a question in its document's order, and their picture, read back from its artists."""

from __future__ import annotations

import math

import pandas as pd
import pytest

from mmkv_bench.errors import ConfigError
from mmkv_bench.statistics.intervals import wilson
from mmkv_bench.tables.questions import KNOWN, _places, by_place, question_figure, x_shift

DOCUMENTS = 12
LINE = {"model": "m", "dataset": "d", "metric": "exact_match", "reading": "", "seed": ""}


def scores() -> pd.DataFrame:
    """Four questions of each document: snapkv answers the first one asked, and of the others those of even documents."""
    made = []
    for document in range(DOCUMENTS):
        for place in range(1, 5):
            names = LINE | {"cluster": f"d{document:02}", "sample_id": f"s{document:02}-{place}", "place": place}
            nothing = dict.fromkeys([*KNOWN, "same"], math.nan)
            made.append(names | nothing | {"method": "full", "budget": "", "each": 1.0})
            right = float(document % 2 == 0)
            known = {"same": 1.0} if place == 1 else {"other": right}
            made.append(names | nothing | {"method": "snapkv", "budget": "64", "each": 1.0, "agnostic": right} | known)
    return pd.DataFrame(made)


def test_a_place_is_that_of_the_order_in_which_the_document_is_asked() -> None:
    rows, expected = [], {}
    for document, (size, first) in enumerate([(4, 0), (4, 1), (4, 3), (3, 2), (3, 1), (1, 0)]):
        order = [(first + turn) % size for turn in range(size)]
        for number in range(size):
            sample = f"{document}-{number}"
            expected[sample] = order.index(number) + 1
            named = {"dataset": "d", "sample_id": sample, "cluster": f"page {document % 2}", "question_number": number}
            turn = order[: order.index(number) + 1]
            for known, text in (
                ("each", None),
                ("joint", ",".join(map(str, range(size)))),
                ("same" if number == first else "other", str(first)),
                ("turns", ",".join(map(str, turn))),
            ):
                rows.append(named | {"known": known, "question_known": text})
    frame = pd.DataFrame(rows)
    for left_out in ((), ("turns",), ("same", "other")):
        places = _places(frame[~frame["known"].isin(left_out)]).set_index("sample_id")["place"]
        assert places.to_dict() == expected, left_out
    unordered = _places(frame[frame["known"].isin(["each", "joint"])]).set_index("sample_id")["place"]
    assert unordered.to_dict() == {name: int(name[-1]) + 1 for name in expected}


def test_the_known_question_is_the_first_place_of_its_mode_and_intervals_are_over_documents() -> None:
    points = by_place(scores())
    line = points[(points["method"] == "snapkv")].set_index(["mode", "place"])
    assert set(line.index.get_level_values("mode")) == {"each", "first", "agnostic"}
    assert line.loc["first", "value"].tolist() == [1.0, 0.5, 0.5, 0.5] and (line["documents"] == DOCUMENTS).all()
    assert tuple(line.loc[("agnostic", 3), ["low", "high"]]) == pytest.approx(wilson(0.5, DOCUMENTS))
    amounts = by_place(scores().assign(metric="divergence")).query(
        "method == 'snapkv' and mode == 'agnostic' and place == 3"
    )
    assert tuple(amounts[["low", "high"]].iloc[0]) != pytest.approx(wilson(0.5, DOCUMENTS)), (
        "amounts are no proportions"
    )
    few = by_place(scores().query("cluster < 'd05'"))
    assert few["low"].isna().all() and (few["documents"] == 5).all()


def test_a_panel_has_a_line_per_mode_and_the_full_cache() -> None:
    points = by_place(scores())
    (axes,) = (one for one in question_figure(points).axes if one.get_visible())
    assert axes.get_title() == "snapkv, 64"
    drawn = {bar.get_label(): bar.lines[0] for bar in axes.containers}
    modes = ["each", "first", "agnostic"]
    assert [*drawn] == modes
    assert drawn["first"].get_ydata().tolist() == [1.0, 0.5, 0.5, 0.5]
    assert drawn["first"].get_xdata() == pytest.approx([place + x_shift("first", modes) for place in (1, 2, 3, 4)])
    assert next(line for line in axes.lines if line.get_label() == "full").get_linestyle() == "--"
    assert len(question_figure(points, ["snapkv"], ["64"]).axes) == 1
    for methods, budgets, words in (
        (["snapkw"], None, "no method 'snapkw'.*snapkv"),
        (None, ["32"], "no budget '32'.*64"),
    ):
        with pytest.raises(ConfigError, match=words):
            question_figure(points, methods, budgets)
    with pytest.raises(ConfigError, match="only full has rows"):
        question_figure(points[points["method"] == "full"])
