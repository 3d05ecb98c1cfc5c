"""A model folder and the facts of a run, small and made by hand, for tests of planning and of the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from mmkv_bench.config.compose import compose
from mmkv_bench.plan.cells import Cell, DatasetIdentity, Identity, expand, method_entries
from mmkv_bench.plan.validate import validate

MODEL = ("model=hf", "model.path=org/name")
"""A hub id: the configuration is valid, nothing is fetched."""


def model_folder(root: Path, weight: float = 1.0) -> Path:
    """A folder with the files that a fingerprint covers and a model card that it does not."""
    root.mkdir(parents=True, exist_ok=True)
    save_file({"weight": np.full((4, 4), weight, dtype=np.float32)}, root / "model.safetensors")
    (root / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 4}))
    (root / "preprocessor_config.json").write_text("{}")
    (root / "README.md").write_text("a card")
    return root


def facts(*datasets: str, **changes) -> Identity:
    """Identity of a run over these datasets; `changes` replaces fields, `dataset_identity` those of every dataset."""
    of_dataset = changes.pop(
        "dataset_identity",
        DatasetIdentity("d0", {"task": "pages_small"}, {"max_new_tokens": 16, "until": [], "do_sample": False}),
    )
    values = {
        "model_fingerprint": "m0",
        "model_revision": None,
        "dtype": "float32",
        "torch": "2.15.0",
        "transformers": "5.23.0",
        "datasets": dict.fromkeys(datasets or ("pages",), of_dataset),
    }
    return Identity(**(values | changes))


def plan(*overrides: str, facts_: Identity | None = None) -> tuple[list[Cell], list[str]]:
    """Cells and notes of the run that these overrides ask for, checked as the command line checks it."""
    config = compose([*MODEL, *overrides])
    validate(config)
    return expand(config.grid, facts_ or facts(*map(str, config.datasets)), method_entries(config.method_config))


def cells(*overrides: str, facts_: Identity | None = None) -> list[Cell]:
    return plan(*overrides, facts_=facts_)[0]


def hashes(*overrides: str, facts_: Identity | None = None) -> set[str]:
    return {cell.cell for cell in cells(*overrides, facts_=facts_)}
