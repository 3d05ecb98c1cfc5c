"""Where child processes of tests find the package: in this checkout, installed or not."""

from __future__ import annotations

import os
from pathlib import Path

import mmkv_bench

CHECKOUT = {**os.environ, "PYTHONPATH": str(Path(mmkv_bench.__file__).parents[1])}
