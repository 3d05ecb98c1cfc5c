"""The embedded model: its weights, and the synthetic pages that it was trained on."""

from __future__ import annotations

from pathlib import Path

WEIGHTS = Path(__file__).parent / "weights"  # an ordinary Hugging Face model folder
