"""Identity of evidence: the facts that rows must share with an address before their number is compared with a printed one.

Expected facts come from the address and from the files of `conf` (model, dataset), never from other rows. Facts that neither a
paper nor a file states, such as the commit of the weights, are marked; compared numbers must share them all the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from mmkv_bench.config.files import content
from mmkv_bench.config.schema import options
from mmkv_bench.models.files import hub_fingerprint
from mmkv_bench.papers.address import SYNTHETIC, Address, file_of
from mmkv_bench.store.schema import NUMERICS_VERSION
from mmkv_bench.tables.rows import config_of

HUB, FOLDER, RANDOM = "hub", "folder", "random"
CONDITIONS = ("max_new_tokens", "cut_prompt", "frames")
"""Facts that a table may set itself."""
OF_DIAGNOSTICS = ("weights", "dtype", "attention", "min_pixels", "max_pixels", "video_max_pixels")
"""Facts that rows of `diagnose` state."""
OF_MODEL = ("path", "fingerprint", "dtype", "attention", "numerics", "max_pixels", "min_pixels")
"""Facts that parts of a mean share, whatever their data."""
CHANGED = "changed since its commit"
PROMPTS = "prompt_tokens"
"""Metric that is independent of the answers' length."""
_LIMITS = ("min_pixels", "max_pixels", "video_max_pixels", "max_prompt_tokens", "layers", "frames")
_DATA = ("task", "split", "include_path", "placeholders", "cluster_key")
_TIMES = ("profiles", "memory_limit")
_APART = ("method version", "code", "weights")
"""Facts in which compared numbers may differ (the fingerprint says which weights)."""
_SHOWN = 60  # characters of a value


def facts(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a row of `cells`, by name; None for what it does not state.

    row: columns of a cell, null as None.
    """
    config = config_of(row["config"])
    model, data = config.get("model") or {}, (config.get("datasets") or {}).get(row["dataset"]) or {}
    generation = dict(json.loads(row["generation"]))
    stated = {name: model.get(name) for name in ("path", "revision", *_LIMITS)}
    stated |= {name: row.get(name) for name in ("weights", "dtype", "attention")}
    stated |= {"commit": row.get("model_revision"), "fingerprint": row["model_fingerprint"]}
    stated |= {"numerics": row["numerics_version"], "method version": int(row.get("method_version") or 1)}
    stated |= {"code": CHANGED if row.get("git_dirty") else None}
    if row["dataset"] in SYNTHETIC:
        stated |= _shape(model) if row.get("weights") == RANDOM else {}
        stated |= {name: config.get(name) for name in _TIMES} | {"decode": generation.get("decode")}
        return stated | {"device": row["device"], "cpu": row.get("cpu") if row["device"] == "cpu" else None}
    stated |= {name: generation.pop(name, None) for name in ("max_new_tokens", "cut_prompt")}
    stated |= {"num_beams": generation.pop("num_beams", 1), "decoding": generation}
    local = data.get("dataset_path") or (config.get("data") or {}).get("root")
    stated |= {name: data.get(name) for name in _DATA} | {"source": FOLDER if local else HUB}
    return stated | {"data": row["dataset_fingerprint"]}


def expected(address: Address, actual: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts that an address requires: those stated by itself, by files of `conf` or by a rule.

    actual: the facts of the row, whose own commit says which fingerprint its weights have.
    """
    model, data = _file("model", address.model), _file("dataset", file_of(address.dataset))
    timed = address.dataset in SYNTHETIC
    required = {name: model.get(name) for name in ("revision", *_LIMITS)} | {"code": None}
    required |= {"dtype": model["dtype"], "attention": model["attention"], "numerics": NUMERICS_VERSION}
    if address.frames is not None and not timed:  # made-up prompts have a length instead
        required["frames"] = address.frames
    required["method version"] = 1 if address.method.base == "full" else address.method.version(address.reading)
    if timed and actual["weights"] == RANDOM:
        required |= _shape(model)
    else:
        fingerprint = hub_fingerprint(model["path"], str(actual["commit"]))
        required |= {"weights": HUB, "path": model["path"], "fingerprint": fingerprint}
        required |= {"commit": model["revision"]} if model.get("revision") else {}
    if timed:
        return required | dict.fromkeys((*_TIMES, "decode"))
    about = data.get("about") or {}
    decoding = {"do_sample": False, "until": about.get("until") or []} | dict(data.get("generation") or {})
    required |= {name: decoding.pop(name, None) for name in ("max_new_tokens", "cut_prompt")}
    own = {"max_new_tokens": address.max_new_tokens, "cut_prompt": address.cut_prompt}
    required |= {name: value for name, value in own.items() if value is not None}
    if address.metric == PROMPTS:
        required.pop("max_new_tokens")
    required |= {"num_beams": 1, "decoding": decoding} | {name: data.get(name) for name in _DATA}
    if "fingerprint" in about:
        return required | {"data": about["fingerprint"]}
    return required if data.get("offline") else required | {"source": HUB}


def requirements(address: Address) -> str:
    """List in words the facts that rows need to count at an address."""
    every = expected(address, {"weights": HUB, "commit": None})
    named = [f"{name} {_text(value)}" for name, value in every.items() if value is not None and name != "fingerprint"]
    return f"{', '.join(named)}; no {', '.join(name for name, value in every.items() if value is None)}"


def mismatches(address: Address, actual: Mapping[str, Any], only: Sequence[str] | None = None) -> tuple[str, ...]:
    """List the facts of a row that an address contradicts, as `max_pixels 50176, the table has none`; only: of these."""
    return tuple(
        f"{name} {_text(actual.get(name))}, the table has {_text(value)}"
        for name, value in expected(address, actual).items()
        if actual.get(name) != value and (only is None or name in only)
    )


def unstated(address: Address, actual: Mapping[str, Any]) -> tuple[str, ...]:
    """List the facts of a row that neither the paper nor a file of `conf` states."""
    required, words = expected(address, actual), []
    if "commit" not in required and actual["weights"] != RANDOM:
        words.append(f"weights {actual['path']} at {_text(actual['commit'])}")
    if "data" not in required and address.dataset not in SYNTHETIC:
        words.append(f"{address.dataset} {actual['data']}")
    return tuple(words)


def shared(actual: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return the facts (name, value) that a number must share with one that it is compared with."""
    return tuple((name, _text(value, None)) for name, value in sorted(actual.items()) if name not in _APART)


def _shape(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return what random weights are made from; positions may be widened for prompts longer than the model's."""
    shape = json.loads(json.dumps(model.get("shape") or {}))
    (shape.get("text_config") or {}).pop("max_position_embeddings", None)
    return {"shape": shape, "processor": model.get("processor")}


@cache
def _file(group: str, name: str) -> Mapping[str, Any]:
    return content(group, name) if name in options(group) else {}


def _text(value: Any, length: int | None = _SHOWN) -> str:
    text = "none" if value is None else value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return text[:length]
