"""Identity of evidence: what rows must be made with before anything is said of their number and a printed one.

Expected values come from the address and from the files of `conf` (model, dataset), never from other rows. What neither a paper
nor a file states, such as the commit of the weights, is marked, and two numbers that are compared must share it all the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from mmkv_bench.config.files import content
from mmkv_bench.config.schema import options
from mmkv_bench.models.fingerprint import hub_fingerprint
from mmkv_bench.papers.address import SYNTHETIC, Address, file_of
from mmkv_bench.store.schema import NUMERICS_VERSION
from mmkv_bench.tables.rows import config_of

HUB, FOLDER, RANDOM = "hub", "folder", "random"
CONDITIONS = ("max_new_tokens", "cut_prompt", "frames")
"""What a table may set itself."""
OF_DIAGNOSTICS = ("weights", "dtype", "attention", "min_pixels", "max_pixels", "video_max_pixels")
"""What a measurement of `diagnose` says of itself."""
CHANGED = "changed since its commit"
_LIMITS = ("min_pixels", "max_pixels", "video_max_pixels", "max_prompt_tokens", "layers", "frames")
_DATA = ("task", "split", "include_path", "placeholders", "cluster_key")
_TIMES = ("profiles", "memory_limit")
PROMPTS = "prompt_tokens"
"""The metric that no answer's length changes."""
_APART = ("method version", "code", "weights")
"""Facts of a number alone: one that it is compared with may have others (its fingerprint says which weights)."""
OF_MODEL = ("path", "fingerprint", "dtype", "attention", "numerics", "max_pixels", "min_pixels")
"""Facts that parts of a mean share, whatever their data."""
_SHOWN = 60  # characters of a value


def facts(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a row of `cells` was made with, by name; None for what it does not say.

    row: the columns of a cell, null as None.
    """
    told = config_of(row["config"])
    model, data = told.get("model") or {}, (told.get("datasets") or {}).get(row["dataset"]) or {}
    generation = dict(json.loads(row["generation"]))
    found = {name: model.get(name) for name in ("path", "revision", *_LIMITS)}
    found |= {name: row.get(name) for name in ("weights", "dtype", "attention")}
    found |= {"commit": row.get("model_revision"), "fingerprint": row["model_fingerprint"]}
    found |= {"numerics": row["numerics_version"], "method version": int(row.get("method_version") or 1)}
    found |= {"code": CHANGED if row.get("git_dirty") else None}
    if row["dataset"] in SYNTHETIC:
        found |= _shaped(model) if row.get("weights") == RANDOM else {}
        found |= {name: told.get(name) for name in _TIMES} | {"decode": generation.get("decode")}
        return found | {"device": row["device"], "cpu": row.get("cpu") if row["device"] == "cpu" else None}
    found |= {name: generation.pop(name, None) for name in ("max_new_tokens", "cut_prompt")}
    found |= {"num_beams": generation.pop("num_beams", 1), "decoding": generation}
    local = data.get("dataset_path") or (told.get("data") or {}).get("root")
    found |= {name: data.get(name) for name in _DATA} | {"source": FOLDER if local else HUB}
    return found | {"data": row["dataset_fingerprint"]}


def wanted(address: Address, had: Mapping[str, Any]) -> dict[str, Any]:
    """What facts must be at an address, those that are stated: by the address, by files of `conf` or by a rule.

    had: the facts of the row, whose own commit says which fingerprint its weights have.
    """
    model, data = _file("model", address.model), _file("dataset", file_of(address.dataset))
    found = {name: model.get(name) for name in ("revision", *_LIMITS)} | {"code": None}
    found |= {"dtype": model["dtype"], "attention": model["attention"], "numerics": NUMERICS_VERSION}
    if address.frames is not None and address.dataset not in SYNTHETIC:  # made-up prompts have a length instead
        found["frames"] = address.frames
    found |= {"method version": 1 if address.method.base == "full" else address.method.version(address.reading)}
    if address.dataset in SYNTHETIC and had["weights"] == RANDOM:
        found |= _shaped(model)
    else:
        found |= {
            "weights": HUB,
            "path": model["path"],
            "fingerprint": hub_fingerprint(model["path"], str(had["commit"])),
        }
        found |= {"commit": model["revision"]} if model.get("revision") else {}
    if address.dataset in SYNTHETIC:
        return found | dict.fromkeys((*_TIMES, "decode"))
    about = data.get("about") or {}
    decoding = {"do_sample": False, "until": about.get("until") or []} | dict(data.get("generation") or {})
    found |= {name: decoding.pop(name, None) for name in ("max_new_tokens", "cut_prompt")}
    asked = {"max_new_tokens": address.max_new_tokens, "cut_prompt": address.cut_prompt}
    found |= {name: value for name, value in asked.items() if value is not None}
    if address.metric == PROMPTS:
        found.pop("max_new_tokens")
    found |= {"num_beams": 1, "decoding": decoding} | {name: data.get(name) for name in _DATA}
    found |= (
        {"data": about["fingerprint"]} if "fingerprint" in about else {} if data.get("offline") else {"source": HUB}
    )
    return found


def stated(address: Address) -> str:
    """What rows must be made with to count at an address, in words."""
    every = wanted(address, {"weights": HUB, "commit": None})
    named = [f"{name} {_text(value)}" for name, value in every.items() if value is not None and name != "fingerprint"]
    return f"{', '.join(named)}; no {', '.join(name for name, value in every.items() if value is None)}"


def other(address: Address, had: Mapping[str, Any], only: Sequence[str] | None = None) -> tuple[str, ...]:
    """What is other about a row, as `max_pixels 50176, the table has none`; only: of these facts."""
    return tuple(
        f"{name} {_text(had.get(name))}, the table has {_text(value)}"
        for name, value in wanted(address, had).items()
        if had.get(name) != value and (only is None or name in only)
    )


def unstated(address: Address, had: Mapping[str, Any]) -> tuple[str, ...]:
    """What a row was made with and neither the paper nor a file of `conf` states."""
    stated = wanted(address, had)
    found = (
        [] if "commit" in stated or had["weights"] == RANDOM else [f"weights {had['path']} at {_text(had['commit'])}"]
    )
    found += [] if "data" in stated or address.dataset in SYNTHETIC else [f"{address.dataset} {had['data']}"]
    return tuple(found)


def shared(had: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """What a number must share with one that it is compared with: name and value of each fact."""
    return tuple((name, _text(value, None)) for name, value in sorted(had.items()) if name not in _APART)


def _shaped(model: Mapping[str, Any]) -> dict[str, Any]:
    """What random weights are made from; positions may be widened for prompts that are longer than the model's."""
    shape = json.loads(json.dumps(model.get("shape") or {}))
    (shape.get("text_config") or {}).pop("max_position_embeddings", None)
    return {"shape": shape, "processor": model.get("processor")}


@cache
def _file(group: str, name: str) -> Mapping[str, Any]:
    return content(group, name) if name in options(group) else {}


def _text(value: Any, length: int | None = _SHOWN) -> str:
    text = "none" if value is None else value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return text[:length]
