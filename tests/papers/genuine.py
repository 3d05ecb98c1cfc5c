"""Columns of made-up cells that are what `conf` says of a model and a data set: rows of a whole, honest run."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from mmkv_bench.config.files import content
from mmkv_bench.models.files import hub_fingerprint
from mmkv_bench.papers.address import SYNTHETIC, MethodSettings, file_of

COMMIT = "c" * 40


@cache
def _config(model: str, dataset: str) -> str:
    own = {key: value for key, value in content("model", model).items() if key not in ("about", "gates")}
    data = {} if dataset in SYNTHETIC else {dataset: content("dataset", file_of(dataset))}
    return json.dumps(
        {"model": own | {"weights": "hub"}, "datasets": data, "data": {"source": "upstream", "root": None}}
    )


def genuine(model: str, dataset: str, method: str, **given: Any) -> dict[str, Any]:
    """Columns of `cells` by `conf`; given: columns that replace them, JSON key by key."""
    path = content("model", model)["path"]
    of = MethodSettings.of(method, given.pop("with_", None))
    version = 1 if method == "full" else of.version(given.get("reading") or "paper")
    data = {} if dataset in SYNTHETIC else content("dataset", file_of(dataset)).get("generation") or {}
    generation = (
        {"ends": "length"} if dataset in SYNTHETIC else {"do_sample": False, "until": [], "num_beams": 1} | data
    )
    config, generation = (
        json.dumps(json.loads(text) | json.loads(given.pop(name, "{}")))
        for name, text in (("config", _config(model, dataset)), ("generation", json.dumps(generation)))
    )
    return {
        "model": model,
        "dataset": dataset,
        "model_fingerprint": hub_fingerprint(path, COMMIT),
        "model_revision": COMMIT,
        "weights": "hub",
        "dtype": "bfloat16",
        "attention": "sdpa",
        "method_version": None if version == 1 else version,
        "config": config,
        "generation": generation,
        "git_dirty": False,
        "device": "NVIDIA H100",
    } | given
