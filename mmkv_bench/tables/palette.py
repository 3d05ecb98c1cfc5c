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
    "p": "pentagon",
    "h": "hexagon",
    "<": "triangle-left",
    ">": "triangle-right",
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
    "cut_prompt": Look(GREY, "X"),
    "blind": Look(GREY, "v"),
    "oracle": Look(GREY, "^"),
}


_OTHERS = ("brown", "pink", "gold", "sky")  # hues of names that are not shipped


def looks(labels: Iterable[str]) -> dict[str, Look]:
    """Return label -> look of the lines of a picture, no two alike while a hue has markers left.

    A shipped method has the look of its name, whatever else is drawn. Any other label has the hue of the method whose name it
    begins with, else one that its name decides; its marker is the next one that no shipped method and no line before it has.
    """
    labels = set(labels)
    given = {label: _LISTED[label] for label in sorted(labels) if label in _LISTED}
    for label in sorted(labels - set(given)):
        start = zlib.crc32(label.encode())
        hue = _hue(label) or COLOURS[_OTHERS[start % len(_OTHERS)]]
        markers = [_MARKERS[(start // 8 + step) % len(_MARKERS)] for step in range(len(_MARKERS))]
        taken = {*_LISTED.values(), *given.values()}
        given[label] = next(
            (look for marker in markers if (look := Look(hue, marker)) not in taken), Look(hue, markers[0])
        )
    return given


def _hue(label: str) -> str | None:
    """Return the hue of the longest shipped name that a label begins with."""
    begun = [name for name in _LISTED if label.startswith(name)]
    return _LISTED[max(begun, key=len)].colour if begun else None
