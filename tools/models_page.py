"""Page of models, `docs/models.md`: `python -m tools.models_page` writes it, `--check` compares it.

Everything on the page is read from `conf/model/*.yaml`, from the architecture that each file's shape gives (built without
memory), from the families' rules for visual tokens, and from `config/unavailable.yaml`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from mmkv_bench.config.files import content, options
from mmkv_bench.config.names import UNAVAILABLE
from mmkv_bench.errors import ConfigError, nearest
from mmkv_bench.families.facts import ModelFacts
from tools.pages import command

ABOUT = ("title", "parameters", "parameters_source", "shape_source", "licence", "tokens", "papers", "notes")
"""Keys that the `about` of every model with a shape has."""
MEASURED = {"ppl": "ppl", "rouge_l_sampled": "self_rouge", "rouge_l_greedy": "self_rouge"}  # metric -> measure
GATE = ("dataset", "metric", "expected", "tolerance", "scale", "source")
GROUP_GATE = ("group", *GATE[2:])  # the mean over the datasets of a benchmark's group
LENGTHS = (2048, 8192, 16384)  # of prompts, those of experiment=hybrid
IMAGE, VIDEO = (1344, 896), (640, 360)  # the page's examples, width x height
FRAMES = 32
EXERCISED = (
    "What was run where: hub weights of these models nowhere by this project, which has no access to them; their loading "
    "path with checkpoints saved from random weights (tests/models). Random weights: every file's shape was built and its "
    "parameters counted against the checkpoint's (tests/models/test_shapes.py); which families, cut to two layers, answered "
    "which datasets with which methods stands in [results/matrix](../results/matrix/README.md) (`make matrix`)."
)


@dataclass(frozen=True)
class Described:
    """One model file as the page shows it. Sizes are those of its architecture.

    tokens: visual tokens of the page's examples; None if the model takes no such input.
    """

    name: str
    path: str
    family: str
    about: Mapping[str, Any]
    gates: Sequence[Mapping[str, Any]]
    parameters: int
    layers: str
    heads: str
    kv_bytes: int
    context: int | None
    facts: ModelFacts
    image_tokens: int | None
    video_tokens: int | None


def page() -> str:
    """Return the page as Markdown."""
    models = [read(name) for name in names()]
    wide, high = IMAGE
    lines = [
        "# Models",
        "",
        "Made by `make docs` from the files in `conf/model`; do not edit. `model=<name>` runs one of these;",
        "`model=hf model.path=<hub id or folder>` any other checkpoint of the same families, and `model=tiny`, the default,",
        "the embedded model of README.md. Weights: `model.weights=hub` (default: those of the repository, at the commit that",
        "`model.revision` names, else at the newest, which rows record), `model.weights=<folder>` (a checkpoint's folder, or",
        "a text model's `.gguf` file with the extra `gguf`; `mmkv-bench fetch model smollm2_135m_q4_1` gets one, see",
        "[pretrained models](pretrained.md)), or",
        "`model.weights=random` (the true shape without a download; `model.layers=2` cuts it to two layers). Random answers",
        "mean nothing, and no table of scores is made of them.",
        "",
        EXERCISED,
        "",
        "KV bytes are of one token in bfloat16, all KV heads of layers that are compressed. Visual tokens are those of one image "
        f"of {wide}x{high} pixels and of a video of {FRAMES} frames of {VIDEO[0]}x{VIDEO[1]}; "
        "`python -m mmkv_bench tokens` tells them for other sizes.",
        "",
        "| model | family | parameters | layers | heads (query/KV x dim) | KV bytes | context | image | video | gates |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_row(model) for model in models]
    lines += ["", *_states(models)]
    lines += ["", "| cannot be run | why | papers |", "|---|---|---|"]
    lines += [f"| [{m.title}](#{key}) | {_clause(m.why)} | {m.papers} |" for key, m in UNAVAILABLE.items()]
    for model in models:
        lines += ["", *_section(model)]
    lines += ["", "## Models that cannot be run", "", *_paragraph()]
    for key, m in UNAVAILABLE.items():
        near = ", ".join(f"`model={name}`" for name in m.instead)
        lines += ["", f"### {key}", "", f"{m.title}: {m.repository}.", "", f"- in: {m.papers}", f"- why: it {m.why}"]
        lines += [f"- would need: {m.needed}"] + ([f"- nearest that runs: {near}"] if near else [])
    return "\n".join(lines) + "\n"


def names() -> list[str]:
    """Return the models with a shape; models that papers use come first."""
    from mmkv_bench.models.source import shaped

    return sorted(shaped(), key=lambda name: (not _load(name)["about"].get("papers"), name))


def read(name: str) -> Described:
    """Return a model file with the facts that its shape determines.

    Raises:
        ConfigError: the file lacks a fact, or has a gate of a dataset that does not exist.
    """
    from mmkv_bench.families.facts import kv_bytes_per_token, model_facts
    from mmkv_bench.models.shape import config_of

    file = _load(name)
    about = file.get("about") or {}
    lacking = [key for key in ABOUT if key not in about]
    if lacking:
        raise ConfigError(f"conf/model/{name}.yaml says nothing under about.{lacking[0]}; add it")
    gates = list(file.get("gates") or [])
    for gate in gates:
        _check_gate(name, gate)
    config = config_of(file["shape"])
    family = model_facts(config)
    return Described(
        name=name,
        path=file["path"],
        family=family.name,
        about=about,
        gates=gates,
        parameters=_count(config, family.multimodal),
        layers=str(family.num_layers) + (f" of {family.all_layers}" if family.states.layers else ""),
        heads=f"{family.num_query_heads}/{family.num_kv_heads} x {family.head_dim}",
        kv_bytes=kv_bytes_per_token(config, "bfloat16"),
        context=family.max_context,
        facts=family,
        image_tokens=_visual(family.model_type, file["processor"], video=False),
        video_tokens=_visual(family.model_type, file["processor"], video=True),
    )


def _load(name: str) -> dict[str, Any]:
    return content("model", name)


def _check_gate(name: str, gate: Mapping[str, Any]) -> None:
    keys = GROUP_GATE if "group" in gate else GATE
    if set(gate) != set(keys):
        raise ConfigError(f"conf/model/{name}.yaml: a gate has the keys {', '.join(keys)}; got {', '.join(gate)}")
    known = _groups() if "group" in gate else options("dataset")
    if gate[keys[0]] not in known:
        raise ConfigError(f"conf/model/{name}.yaml has a gate of {gate[keys[0]]}, which is not in conf/dataset")
    if "group" not in gate and gate["metric"] not in _metrics(gate["dataset"]):
        raise ConfigError(
            f"conf/model/{name}.yaml has a gate of {gate['dataset']}'s {gate['metric']}, which no run of it gives; "
            f"{nearest(gate['metric'], _metrics(gate['dataset']))}"
        )


def _metrics(dataset: str) -> set[str]:
    """Return the metrics of a dataset: its headline metrics, and measures that a run may add."""
    return {*(content("dataset", dataset).get("metrics") or []), *MEASURED}


def _besides(gate: Mapping[str, Any]) -> str | None:
    """Return the measure that a run has to request, if the gate uses a measure that the dataset's file lacks."""
    measure = MEASURED.get(gate.get("metric", ""))
    return None if measure is None or measure in content("dataset", gate["dataset"])["measures"] else measure


@cache
def _groups() -> frozenset[str]:
    """Return the groups of datasets, for example `MileBench T-1`."""
    return frozenset(
        f"{benchmark} {group}"
        for about in (content("dataset", name).get("about") or {} for name in options("dataset"))
        for benchmark, groups in (about.get("groups") or {}).items()
        for group in groups
    )


def _count(config: Any, multimodal: bool) -> int:
    """Count the parameters of an architecture, built on the meta device, where tensors have only shapes."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    with torch.device("meta"):
        model = (AutoModelForImageTextToText if multimodal else AutoModelForCausalLM).from_config(config)
    return model.num_parameters()


def _visual(model_type: str, settings: Mapping[str, Any], video: bool) -> int | None:
    from mmkv_bench.errors import UnsupportedError
    from mmkv_bench.families.registry import image_tokens, video_tokens

    try:
        if video:
            return video_tokens(model_type, settings, FRAMES, *VIDEO)
        return image_tokens(model_type, settings, *IMAGE)
    except UnsupportedError:
        return None


# ---------------------------------------------------------------------- Markdown
def _states(models: Sequence[Described]) -> list[str]:
    """Return the table of models that keep windows or recurrent states: their bytes at several lengths."""
    return [
        "Some models keep sliding windows or recurrent states in layers that are not compressed ([hybrid](hybrid.md)). All "
        "state is these and the keys and values of one sequence, in bfloat16. The first line of each model is the length at "
        "which windows and states are half of it. `10%` keeps a tenth of the entries of compressed layers, `global0` keeps in "
        "them what a window keeps.",
        "",
        "| model | prompt | all state | windows and states | 10% leaves | global0 leaves |",
        "|---|---|---|---|---|---|",
        *(line for model in models if model.facts.states.layers for line in _state_lines(model)),
    ]


def _state_lines(model: Described) -> Iterator[str]:
    from mmkv_bench.families.facts import full_state_bytes, share_of_all_state, state_bytes

    half, window = full_state_bytes(model.facts, "bfloat16") // model.kv_bytes, model.facts.states.window
    for tokens in (half, *LENGTHS):
        held = tokens * model.kv_bytes + state_bytes(model.facts, tokens, "bfloat16")
        kept = (0, tokens // 10, *([min(tokens, window)] if window else []))
        shares = [f"{share_of_all_state(model.facts, tokens, one, 'bfloat16'):.1%}" for one in kept]
        shares += ["none"] * (not window)
        yield f"| {model.name} | {tokens:,} | {held / 2**20:,.1f} MiB | {' | '.join(shares)} |"


def _row(m: Described) -> str:
    visual = [str(n) if n is not None else "none" for n in (m.image_tokens, m.video_tokens)]
    return (
        f"| [{m.name}](#{m.name}) | {m.family} | {_billions(m.parameters)} | {m.layers} | {m.heads} | {m.kv_bytes} | "
        f"{m.context} | {' | '.join(visual)} | {len(m.gates) or 'none'} |"
    )


def _section(m: Described) -> list[str]:
    papers = "; ".join(m.about["papers"]) or "no table"
    lines = [
        f"## {m.name}",
        "",
        f"{m.about['title']}: `{m.path}`, {m.about['licence']}, {m.parameters:,} parameters.",
        "",
        f"- in: {papers}",
        f"- visual tokens: {m.about['tokens']}",
        f"- shape and processor: {m.about['shape_source']}",
        f"- the checkpoint's parameters, {m.about['parameters']:,}: {m.about['parameters_source']}",
        *(f"- note: {note}" for note in m.about["notes"]),
    ]
    if m.gates:
        lines += ["", "| gate: full cache on | metric | printed | passes within | printed = x ours | source |"]
        lines += ["|---|---|---|---|---|---|"]
        for g in m.gates:
            numbers = f"{g['expected']:g} | {g['tolerance']:g} | {g['scale']:g}"
            asked = _besides(g)
            besides = f" (with `datasets.{g['dataset']}.measures=[{asked}]`)" if asked else ""
            of = (
                f"{g['group']} | mean of its datasets"
                if "group" in g
                else f"`{g['dataset']}`{besides} | `{g['metric']}`"
            )
            lines.append(f"| {of} | {numbers} | {g['source']} |")
    return lines


def _paragraph() -> list[str]:
    return [
        "Only code of the installed transformers is run and only safetensors are read. Asking for one of these",
        "(`model=longva_7b`) is answered with the reason.",
    ]


def _billions(count: int) -> str:
    return f"{count / 1e9:.2f} B"


def _clause(text: str) -> str:
    return text.partition(" (")[0].partition(", and ")[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page, or compare it with `--check`."""
    return command("models_page", __doc__, lambda: {"models.md": page()}, arguments)


if __name__ == "__main__":
    sys.exit(main())
