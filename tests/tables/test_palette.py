"""Promise: a method has one look everywhere, no two of a picture are alike, and each is seen on white and on a dark page."""

from __future__ import annotations

from mmkv_bench.config.files import options
from mmkv_bench.tables.figure import COLOURS, GREY, looks

DARK = "#1e1e1e"


def luminance(colour: str) -> float:
    channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_every_colour_is_seen_on_white_and_on_a_dark_page():
    for colour in (*COLOURS.values(), GREY):
        assert contrast(colour, "#ffffff") >= 3 and contrast(colour, DARK) >= 3, colour


def test_a_shipped_method_has_one_look_in_every_picture_and_no_two_are_alike():
    every = looks(options("method"))
    assert len(set(every.values())) == len(every) >= 36
    for name in every:
        assert looks([name, "mine", "snapkv_wide (tuned)"])[name] == every[name]


def test_lines_of_ones_own_keep_their_hue_and_away_from_shipped_looks():
    shipped = options("method")
    others = [*(f"mine{number}" for number in range(12)), "mmshift (tuned)", "mmshift, 64", "full, 64", "full (paper)"]
    given = looks([*shipped, *others])
    assert len(set(given.values())) == len(given)
    assert given["mmshift (tuned)"].colour == given["mmshift, 64"].colour == given["mmshift"].colour
    assert given["full, 64"].colour == given["full (paper)"].colour == "black"
    for label in others:
        assert looks([label])[label].colour == given[label].colour
        assert label[:4] != "mine" or given[label].colour not in (given["mmshift"].colour, given["snapkv"].colour)
    assert looks(reversed([*shipped, *others])) == given
