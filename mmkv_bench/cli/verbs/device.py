"""`mmkv-bench device`: what this machine's device allows, measured once and kept; `plan` and measured times stand beside it."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from mmkv_bench.cli.grammar import Parser

if TYPE_CHECKING:
    from mmkv_bench.models.devices import DeviceSpeed

SUMMARY = "what devices reach: read-only memory bandwidth and products per second, measured once and kept"


def options(parser: Parser) -> None:
    """Which device."""
    parser.add_argument(
        "device",
        nargs="?",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="to measure; auto: cuda where there is one",
    )
    parser.add_argument("--again", action="store_true", help="measure although it was measured before")
    parser.add_argument("--list", action="store_true", help="measure nothing, show what was measured; loads nothing")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.examples("mmkv-bench device", "mmkv-bench device cuda --again", "mmkv-bench device --list")


def answer(given: argparse.Namespace) -> int:
    """Print what is known; of this machine's device it is measured where it is not. 0 whatever it is."""
    from mmkv_bench.models import devices

    if given.list:
        found = list(devices.stored().values())
    else:
        from mmkv_bench.generation.device_speed import measured

        found = [measured(given.device, again=given.again)]
    if given.json:
        print(json.dumps([asdict(speed) | {"device": speed.slug} for speed in found]))
    else:
        print("\n".join(map(line, found)) or f"nothing was measured yet: no file is in {devices.folder()}")
    return 0


def line(speed: DeviceSpeed) -> str:
    """One device."""
    rates = ", ".join(f"{rate / 1e12:.3g} TFLOP/s in {dtype}" for dtype, rate in speed.rates.items())
    threads = f", {speed.threads} threads" if speed.kind == "cpu" else ""
    return (
        f"{speed.slug}: {speed.name}{threads}, {speed.memory_bytes / 2**30:.1f} GiB; reads "
        f"{speed.bandwidth / 1e9:,.1f} GB/s; {rates}; measured {speed.measured} with torch {speed.torch}"
    )
