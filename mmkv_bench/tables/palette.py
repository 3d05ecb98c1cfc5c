"""The colour and marker of each method: the same in every picture, in the report and in notebooks.

Hues are Okabe and Ito's, told apart with every common colour vision; the two light ones are darkened and two are added, so that
each has a contrast of 3:1 on white and on a dark page. Methods of one family share a hue and differ by their markers.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import NamedTuple

COLOURS = {
    "blue": "#0072b2",
    "vermilion": "#d55e00",
    "green": "#009e73",
    "pink": "#c7689c",
    "gold": "#a87b00",
    "sky": "#3b8fc2",
    "violet": "#8a63c9",
    "brown": "#9c5a3c",
}
GREY = "#7f7f7f"
MARKERS = {
    "o": "circle",
    "s": "square",
    "D": "diamond",
    "^": "triangle-up",
    "v": "triangle-down",
    "P": "cross",
    "*": "star",
    "X": "x",
}
"""Marker in matplotlib -> symbol in plotly."""


class Look(NamedTuple):
    """The colour (RGB in hex) and the matplotlib marker of a line."""

    colour: str
    marker: str


_FAMILIES = {
    "vermilion": ("mmshift", "mmshift_adakv", "mmshift_pyramidkv", "mmshift_sparsemm", "mmshift_llava"),
    "blue": ("snapkv", "pyramidkv", "adakv", "sparsemm", "last_query", "snapkv_kvpress", "adakv_official"),
    "green": ("keydiff", "kvpress", "custom"),
    "gold": ("look_m", "meda", "elastic_cache", "madakv"),
    "violet": ("flashcache", "expected_attention", "hybridkv"),
    "pink": ("h2o", "h2o_decode"),
    "brown": ("streamingllm", "local"),
    "sky": ("prefixkv", "prefixkv_uniform", "prefixkv_pyramid", "kivi_prefixkv", "kivi"),
}
_MARKERS = "".join(MARKERS)
_LISTED = {
    name: Look(COLOURS[hue], _MARKERS[(place + shift) % len(_MARKERS)])
    for shift, (hue, names) in enumerate(_FAMILIES.items())
    for place, name in enumerate(names)
} | {
    "full": Look("black", "*"),
    "random": Look(GREY, "x"),
    "pixels": Look(GREY, "P"),
    "blind": Look(GREY, "v"),
    "oracle": Look(GREY, "^"),
}


def looks(labels: Iterable[str]) -> dict[str, Look]:
    """Return label -> look of the lines of a picture, no two alike among 64.

    A shipped method has the look of its name. Any other label has one that its name decides: the hue of the method whose name it
    begins with, else any; where another line of the picture has that look, the next free one.
    """
    names = sorted(set(labels), key=lambda label: (_name(label) not in _LISTED, _hue(label) is None, label))
    free = [Look(colour, marker) for marker in _MARKERS for colour in COLOURS.values()]
    given: dict[str, Look] = {}
    for label in names:
        look = _LISTED.get(_name(label))
        if look is None or look in given.values():
            start = zlib.crc32(label.encode()) % len(free)
            order = free[start:] + free[:start]
            hue = _hue(label)
            order.sort(key=lambda one: (one in given.values(), hue is not None and one.colour != hue))
            look = order[0]
        given[label] = look
    return given


def _name(label: str) -> str:
    return label.split(" ", maxsplit=1)[0].split("@", maxsplit=1)[0]


def _hue(label: str) -> str | None:
    """Return the hue of the longest shipped name that a label begins with."""
    begun = [name for name, look in _LISTED.items() if label.startswith(name) and look.colour in COLOURS.values()]
    return _LISTED[max(begun, key=len)].colour if begun else None
