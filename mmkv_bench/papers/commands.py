"""The command that makes the rows of an address."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from mmkv_bench.config.schema import conf_dir
from mmkv_bench.papers.address import SYNTHETIC, Address, file_of, is_group, members, samples_of
from mmkv_bench.papers.metrics import DIAGNOSTICS

PROGRAM = "mmkv-bench"
SETTING = "efficiency_"
"""How settings of timed passes begin; they lie in conf/experiment, experiments that ask questions in its folder `papers`."""
SAMPLES = 100
"""Of a diagnostic, where neither the figure nor the dataset's file says how many."""


def experiment(name: str) -> str:
    """The line that runs an experiment that a table names."""
    return f"{PROGRAM} experiment={name if name.startswith(SETTING) else f'papers/{name}'}"


def command(address: Address, experiments: Sequence[str] = ()) -> str:
    """One line that runs what an address needs, of all its questions; empty where nothing of it can be run.

    experiments: those of its table; of timed passes the one that plans them is the line.
    """
    if not address.runs:
        return ""
    if address.metric in DIAGNOSTICS:
        return _diagnose([address])
    own = setting(address, experiments)
    if own:
        return experiment(own)
    words = [f"model={address.model}", *_methods(address)]
    if address.budget:
        words.append(
            f"budget={address.budget if '.' in address.budget or address.budget_kind != 'fraction' else '1.0'}"
        )
    if address.dataset in SYNTHETIC:
        passes = [f"lengths={address.length}", f"new_tokens={address.new_tokens}", f"batch={address.batch or 1}"]
        words = ["scenario=efficiency", *words, f"prompts={_kind(address)}", *passes]
    else:
        names = [name for name, _ in members(address.dataset)] if is_group(address.dataset) else [address.dataset]
        words += [f"dataset={_listed(map(file_of, names))}", "limit=null"]
        words += [f"page_size={name.rpartition('_')[2]}" for name in names if name != file_of(name)][:1]
        if address.max_new_tokens is not None:
            words += [f"datasets.{name}.generation.max_new_tokens={address.max_new_tokens}" for name in names]
        if address.cut_prompt is not None:
            words += [f"datasets.{name}.generation.cut_prompt={address.cut_prompt}" for name in names]
        if address.metric in ("ppl", "rouge_l_sampled"):
            words += [f"datasets.{name}.measures=[ppl,self_rouge]" for name in names]
    words += [f"reading={address.reading}"] * (address.reading != "paper")
    words += [f"protocol={address.protocol}"] * (address.protocol != "paper")
    words += [f"model.frames={address.frames}"] * (address.frames is not None)
    words += [f"seed={_listed(address.seeds)}"] * (address.seeds != (0,))
    run = shlex.join([PROGRAM, *words])
    return f"{calibrate(address)} && {run}" if address.method.calibrated else run


def artefact(address: Address) -> str:
    """The file of a calibration that an address asks for; empty where it asks for none."""
    made_of = address.method.calibrated
    if not made_of:
        return ""
    words = [address.method.base, *(str(made_of[key]) for key in ("data", "samples", "instruction") if key in made_of)]
    return f"runs/calibration/{address.model}/{'_'.join(words).replace(':', '-').strip('-')}.json"


def calibrate(address: Address) -> str:
    """The line that makes it."""
    made_of = address.method.calibrated
    words = [PROGRAM, "calibrate", address.method.base, "--model", address.model, "--samples", str(made_of["samples"])]
    words += ["--instruction", made_of["instruction"]] if "instruction" in made_of else []
    return shlex.join([*words, "--out", artefact(address), f"dataset={made_of['data']}"])


def setting(address: Address, names: Sequence[str]) -> str:
    """Of these settings the first whose passes an address is of; empty where none is."""
    if address.dataset not in SYNTHETIC:
        return ""
    wanted = (address.model, _kind(address), address.new_tokens)
    for name in names:
        if not name.startswith(SETTING):
            continue
        told = _told(name)
        models = [one["override /model"] for one in told["defaults"] if "override /model" in one]
        batches = told.get("batch", 1)
        if (
            (models[0], told["prompts"], told["new_tokens"]) == wanted
            and address.length in told["lengths"]
            and (address.batch or 1) in (batches if isinstance(batches, list) else [batches])
        ):
            return name
    return ""


@cache
def _told(name: str) -> Mapping[str, Any]:
    import yaml

    return yaml.safe_load((conf_dir() / "experiment" / f"{name}.yaml").read_text(encoding="utf-8"))


def _kind(address: Address) -> str:
    return address.dataset.removeprefix("made_up_")


def commands(addresses: Iterable[Address]) -> list[str]:
    """The lines of several addresses; methods and budgets that one measurement of prompts can share are in one line."""
    found: dict[tuple[object, ...], list[Address]] = {}
    for one in addresses:
        key = (one.metric, one.model, one.dataset, one.reading, one.frames, one.samples, one.max_new_tokens)
        alike = (*key, one.method.given) if one.runs and one.metric in DIAGNOSTICS else (command(one),)
        found.setdefault(alike, []).append(one)
    lines = (
        _diagnose(own) if own[0].metric in DIAGNOSTICS and own[0].runs else command(own[0]) for own in found.values()
    )
    return list(dict.fromkeys(filter(None, lines)))


def _diagnose(addresses: Sequence[Address]) -> str:
    """The line that measures a diagnostic at addresses which differ in method and budget alone; what is there already it
    leaves as it is, and the numbers of `full` are beside those of any method."""
    address = addresses[0]
    own = DIAGNOSTICS[address.metric]
    words = ["diagnose", own.name, f"model={address.model}", f"dataset={address.dataset}"]
    if own.of_method:
        names = list(dict.fromkeys(one.method.name for one in addresses if one.budget)) or [address.method.name]
        words.append(f"method={_listed(names)}")
        words += [
            f"methods.{name}.{key}={_value(value)}" for name in names for key, value in address.method.changed.items()
        ]
        budgets = list(dict.fromkeys(one.budget for one in addresses if one.budget))
        words += [f"budget={_listed(budgets)}"] * bool(budgets)
        words += [f"reading={address.reading}"] * (address.reading != "paper")
    words += [f"model.frames={address.frames}"] * (address.frames is not None)
    words += ["--samples", str(address.samples or samples_of(address.dataset) or SAMPLES)]
    words += ["--tokens", str(address.max_new_tokens)] if address.max_new_tokens is not None else []
    return shlex.join([PROGRAM, *words])


def _methods(address: Address) -> list[str]:
    names, words = [], []
    for method in (address.method, address.minus):
        if method is None:
            continue
        changed = method.changed | ({"calibration": artefact(address)} if method.calibrated else {})
        if not changed:
            names.append(method.name)
            continue
        told = ", ".join(f"{key}: {_value(value)}" for key, value in changed.items())
        words.append(f"variants.{method.name}_variant={{base: {method.name}, {told}}}")
    return [f"method={_listed(names or ['full'])}", *words]


def _value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _listed(values: Iterable[object]) -> str:
    texts = [str(value) for value in values]
    return texts[0] if len(texts) == 1 else f"[{','.join(texts)}]"
