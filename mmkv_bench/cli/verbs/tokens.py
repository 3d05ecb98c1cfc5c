"""`mmkv-bench tokens`: how many visual tokens images or a video become, and the bytes of their cache."""

from __future__ import annotations

import argparse

from mmkv_bench.cli.grammar import Parser

SUMMARY = "how many visual tokens images or a video become in a model, and the bytes of their keys and values"


def options(parser: Parser) -> None:
    """The model and the sizes."""
    parser.add_argument(
        "words",
        nargs="+",
        metavar="WIDTHxHEIGHT | key=value",
        help="sizes in pixels, and settings as of a run: model=<name>, model.frames=<n> (the sizes are then those of videos, "
        "of which n frames are taken), for Qwen-VL models model.min_pixels, model.max_pixels, model.video_max_pixels",
    )
    parser.examples(
        "mmkv-bench tokens model=qwen2_5_vl_7b 1344x896",
        "mmkv-bench tokens model=llava_onevision_7b 640x480 model.frames=32",
    )


def answer(given: argparse.Namespace) -> int:
    """Print a line per size, and their sum."""
    from mmkv_bench.models.prompt_size import lines

    print("\n".join(lines(given.words)))
    return 0
