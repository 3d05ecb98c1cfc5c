"""Commands that measure the numbers of the papers' tables."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from mmkv_bench.config.files import conf_dir
from mmkv_bench.declared import read_yaml
from mmkv_bench.papers.address import FRACTION, SYNTHETIC, Address, file_of, is_group, members, samples_of
from mmkv_bench.papers.non_score_metrics import DIAGNOSTICS

PROGRAM = "mmkv-bench"
SETTING = "efficiency_"
"""Prefix of files in conf/experiment that run timed passes. Files that ask questions are in conf/experiment/papers."""
SAMPLES = 100
"""Number of samples of a diagnostic, if neither the figure nor the data set's file states one."""


def experiment(name: str) -> str:
    """Return the command that runs a file of conf/experiment/papers, or of conf/experiment if `name` begins with `SETTING`."""
    return f"{PROGRAM} experiment={name if name.startswith(SETTING) else f'papers/{name}'}"


def command(address: Address, experiments: Sequence[str] = ()) -> str:
    """Return the command that measures the number at `address` on the whole data set; "" if the model cannot be run.

    experiments: experiments that the table names. If one of them runs the timed passes of `address`, its command is returned.
    """
    if not address.runs:
        return ""
    if address.metric in DIAGNOSTICS:
        return _diagnose([address])
    if name := setting(address, experiments):
        return experiment(name)
    arguments = [f"model={address.model}", *_methods(address)]
    if address.budget:
        keeps_all = address.budget_kind == FRACTION and "." not in address.budget
        arguments.append(f"budget={'1.0' if keeps_all else address.budget}")
    if address.dataset in SYNTHETIC:
        arguments += [f"prompts={address.dataset.removeprefix('made_up_')}", f"lengths={address.length}"]
        arguments = [
            "scenario=efficiency",
            *arguments,
            f"new_tokens={address.new_tokens}",
            f"batch={address.batch or 1}",
        ]
    else:
        names = [name for name, _ in members(address.dataset)] if is_group(address.dataset) else [address.dataset]
        arguments += [f"dataset={_list_text(map(file_of, names))}", "limit=null"]
        arguments += [f"page_size={name.rpartition('_')[2]}" for name in names if name != file_of(name)][:1]
        measures = "[ppl,self_rouge]" if address.metric in ("ppl", "rouge_l_sampled") else None
        for key, value in (("generation.max_new_tokens", address.max_new_tokens),
                           ("generation.cut_prompt", address.cut_prompt), ("measures", measures)):  # fmt: skip
            arguments += [f"datasets.{name}.{key}={value}" for name in names if value is not None]
    arguments += [f"reading={address.reading}"] * (address.reading != "paper")
    arguments += [f"protocol={address.protocol}"] * (address.protocol != "paper")
    arguments += [f"model.frames={address.frames}"] * (address.frames is not None)
    arguments += [f"seed={_list_text(address.seeds)}"] * (address.seeds != (0,))
    command_line = shlex.join([PROGRAM, *arguments])
    return f"{calibrate(address)} && {command_line}" if address.method.calibrated else command_line


def commands(addresses: Iterable[Address]) -> list[str]:
    """Return the commands that measure several numbers, without duplicates. Methods and budgets of a diagnostic share one."""
    groups: dict[tuple[object, ...], list[Address]] = {}
    for one in addresses:
        key: tuple[object, ...] = (command(one),)
        if one.runs and one.metric in DIAGNOSTICS:
            conditions = (one.reading, one.frames, one.samples, one.max_new_tokens)
            key = (one.metric, one.model, one.dataset, *conditions, one.method.settings)
        groups.setdefault(key, []).append(one)
    lines = (_diagnose(group) if len(key) > 1 else str(*key) for key, group in groups.items())
    return list(dict.fromkeys(filter(None, lines)))


def artefact(address: Address) -> str:
    """Return the path of the calibration file for the method of `address`; "" if no source of a calibration is given."""
    source = address.method.calibrated
    if not source:
        return ""
    path_parts = [
        address.method.base,
        *(str(source[key]) for key in ("data", "samples", "instruction") if key in source),
    ]
    return f"runs/calibration/{address.model}/{'_'.join(path_parts).replace(':', '-').strip('-')}.json"


def calibrate(address: Address) -> str:
    """Return the command that makes the file `artefact(address)`."""
    source = address.method.calibrated
    arguments = [
        PROGRAM,
        "calibrate",
        address.method.base,
        "--model",
        address.model,
        "--samples",
        str(source["samples"]),
    ]
    arguments += ["--instruction", source["instruction"]] if "instruction" in source else []
    return shlex.join([*arguments, "--out", artefact(address), f"dataset={source['data']}"])


def setting(address: Address, names: Sequence[str]) -> str:
    """Return the first of the experiments `names` that runs the timed passes of `address`; "" if none does."""
    if address.dataset not in SYNTHETIC:
        return ""
    wanted_setting = (address.model, address.dataset.removeprefix("made_up_"), address.new_tokens)
    for name in names:
        if not name.startswith(SETTING):
            continue
        experiment_settings = _setting(name)
        model = next(one["override /model"] for one in experiment_settings["defaults"] if "override /model" in one)
        batches = experiment_settings.get("batch", 1)
        fits_setting = (
            address.length in experiment_settings["lengths"]
            and (model, experiment_settings["prompts"], experiment_settings["new_tokens"]) == wanted_setting
        )
        if fits_setting and (address.batch or 1) in (batches if isinstance(batches, list) else [batches]):
            return name
    return ""


@cache
def _setting(name: str) -> Mapping[str, Any]:
    return read_yaml((conf_dir() / "experiment" / f"{name}.yaml").read_bytes())


def _diagnose(addresses: Sequence[Address]) -> str:
    """Return the command that runs a diagnostic for several methods and budgets.

    addresses: equal in everything but the method's name and the budget.
    """
    address, diagnostic = addresses[0], DIAGNOSTICS[addresses[0].metric]
    arguments = ["diagnose", diagnostic.name, f"model={address.model}", f"dataset={address.dataset}"]
    if diagnostic.of_method:
        names = list(dict.fromkeys(one.method.name for one in addresses if one.budget)) or [address.method.name]
        changed_settings = address.method.changed.items()
        arguments.append(f"method={_list_text(names)}")
        arguments += [f"methods.{name}.{key}={_value(value)}" for name in names for key, value in changed_settings]
        budgets = list(dict.fromkeys(one.budget for one in addresses if one.budget))
        arguments += [f"budget={_list_text(budgets)}"] * bool(budgets)
        arguments += [f"reading={address.reading}"] * (address.reading != "paper")
    arguments += [f"model.frames={address.frames}"] * (address.frames is not None)
    arguments += ["--samples", str(address.samples or samples_of(address.dataset) or SAMPLES)]
    arguments += ["--tokens", str(address.max_new_tokens)] if address.max_new_tokens is not None else []
    return shlex.join([PROGRAM, *arguments])


def _methods(address: Address) -> list[str]:
    names, variants = [], []
    for method in filter(None, (address.method, address.minus)):
        changed = method.changed | ({"calibration": artefact(address)} if method.calibrated else {})
        if changed:
            settings = ", ".join(f"{key}: {_value(value)}" for key, value in changed.items())
            variants.append(f"variants.{method.name}_variant={{base: {method.name}, {settings}}}")
        else:
            names.append(method.name)
    return [f"method={_list_text(names or ['full'])}", *variants]


def _value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _list_text(values: Iterable[object]) -> str:
    texts = [str(value) for value in values]
    return texts[0] if len(texts) == 1 else f"[{','.join(texts)}]"
