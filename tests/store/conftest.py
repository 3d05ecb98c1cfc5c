"""Lets the tests of this folder, and the processes they start, import the helpers that lie beside them."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
