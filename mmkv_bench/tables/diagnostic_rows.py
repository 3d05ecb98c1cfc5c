"""Rows of `mmkv-bench diagnose` for pictures: of one analysis, what one panel shows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mmkv_bench.errors import ConfigError
from mmkv_bench.tables.rows import choose

if TYPE_CHECKING:
    import pandas as pd

_OF = ("model", "model_fingerprint", "dtype", "dataset", "dataset_fingerprint", "versions", "setting")


BESIDE = {"prefix_search": "lorenz"}
"""Analysis -> another one that its figure shows too, where the same samples have it."""


@dataclass(frozen=True)
class Panel:
    """Rows of one analysis of one model, dataset and setting, with those that its figure has beside. `rows` has `budget` and
    `budget_kind` of its methods, null where a number is of none."""

    name: str
    title: str
    rows: pd.DataFrame

    @property
    def layers(self) -> list[int]:
        """The layers that have numbers."""
        return sorted(int(layer) for layer in self.rows["layer"].dropna().unique())


def panels(root: Path, name: str, datasets: Sequence[str] | None = None) -> list[Panel]:
    """The panels of an analysis in a store, one per model, dataset and setting.

    Raises:
        ConfigError: rows that hold nothing of it, or of none of these datasets.
    """
    from mmkv_bench.store.store import Store

    every = Store(root).diagnostics(coded=True).to_pandas()
    if not (every["name"] == name).any():
        held = ", ".join(sorted(map(str, every["name"].unique()))) or "none"
        raise ConfigError(
            f"'{root}' holds no rows of {name} (it holds: {held}); `mmkv-bench diagnose {name}` makes them"
        )
    return panels_of(every[choose(every["dataset"], datasets, "dataset")], name)


def panels_of(every: pd.DataFrame, name: str) -> list[Panel]:
    """The same of rows of the table `diagnostics`."""
    own = every[every["name"].isin([name, BESIDE.get(name, name)])]
    known = {text: json.loads(text) for text in own["settings"].unique()}
    methods = {text: told.get("method", {}) for text, told in known.items()}
    settings = {
        text: json.dumps({key: value for key, value in told.items() if key != "method"}, sort_keys=True)
        for text, told in known.items()
    }
    texts = own["settings"].astype(str)
    own = own.assign(
        setting=texts.map(settings),
        budget=texts.map({text: float(told["budget"]) if told else None for text, told in methods.items()}),
        budget_kind=texts.map({text: told.get("budget_kind") for text, told in methods.items()}),
    )
    groups = [
        (key, rows) for key, rows in own.groupby(list(_OF), observed=True, sort=True) if (rows["name"] == name).any()
    ]
    return [Panel(name, _title(rows, key, [other for other, _ in groups]), rows) for key, rows in groups]


def _title(rows: pd.DataFrame, key: Sequence[str], every: Sequence[Sequence[str]]) -> str:
    told = json.loads(str(key[-1]))
    samples = int(rows["sample_id"].nunique())
    words = [f"{key[0]}, {key[3]}, {samples} {'sample' if samples == 1 else 'samples'}"]
    words += ["random weights"] * (told.get("weights") == "random")
    alike = [other for other in every if (other[0], other[3]) == (key[0], key[3])]
    for at, column in enumerate(_OF):
        if len({other[at] for other in alike}) > 1:
            words.append(f"{column} {key[at]}")
    return "; ".join(words)
