"""The command that makes the rows of an address."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from mmkv_bench.papers.address import SYNTHETIC, Address, is_group, members

PROGRAM = "mmkv-bench"


def command(address: Address) -> str:
    """One line that runs what an address needs; empty where nothing of it can be run."""
    if not address.runs:
        return ""
    words = [f"model={address.model}", *_methods(address)]
    if address.budget:
        words.append(
            f"budget={address.budget if '.' in address.budget or address.budget_kind != 'fraction' else '1.0'}"
        )
    if address.dataset == SYNTHETIC:
        words = ["scenario=efficiency", *words, f"lengths={address.length}", f"new_tokens={address.new_tokens}"]
    else:
        names = [name for name, _ in members(address.dataset)] if is_group(address.dataset) else [address.dataset]
        words.append(f"dataset={_listed(names)}")
        if address.max_new_tokens is not None:
            words += [f"datasets.{name}.generation.max_new_tokens={address.max_new_tokens}" for name in names]
        if address.metric in ("ppl", "rouge_l_sampled"):
            words += [f"datasets.{name}.measures=[ppl,self_rouge]" for name in names]
    words += [f"reading={address.reading}"] * (address.reading != "paper")
    words += [f"protocol={address.protocol}"] * (address.protocol != "paper")
    words += [f"model.frames={address.frames}"] * (address.frames is not None)
    words += [f"seed={_listed(address.seeds)}"] * (address.seeds != (0,))
    return shlex.join([PROGRAM, *words])


def _methods(address: Address) -> list[str]:
    names, words = [], []
    for method in (address.method, address.minus):
        if method is None:
            continue
        if not method.changed:
            names.append(method.name)
            continue
        told = ", ".join(
            f"{key}: {str(value).lower() if isinstance(value, bool) else value}"
            for key, value in method.changed.items()
        )
        words.append(f"variants.{method.name}_variant={{base: {method.name}, {told}}}")
    return [f"method={_listed(names or ['full'])}", *words]


def _listed(values: Iterable[object]) -> str:
    texts = [str(value) for value in values]
    return texts[0] if len(texts) == 1 else f"[{','.join(texts)}]"
