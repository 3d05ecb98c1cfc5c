"""Puts conf/ and the papers' printed numbers inside the wheel. An editable install reads them from the checkout and must not
carry a copy."""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ShipConfiguration(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "editable":
            build_data["force_include"]["conf"] = "mmkv_bench/conf"
            build_data["force_include"]["results/reference"] = "mmkv_bench/reference"
