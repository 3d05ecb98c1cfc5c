"""The embedded model: synthetic pages, a tiny vision-language model trained on them, its training and evaluation."""

from __future__ import annotations

from pathlib import Path

WEIGHTS = Path(__file__).parent / "weights"  # an ordinary Hugging Face model folder
