"""Peak memory of every cell by phase at true shape, counted without a device: a dry run of the code that a run executes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmkv_bench.columns import aligned
from mmkv_bench.config.compose import method_defaults
from mmkv_bench.errors import ConfigError, MMKVError
from mmkv_bench.forecast.blank_prompt import blank_prompt
from mmkv_bench.forecast.dry_run import dry_model, prompt_types
from mmkv_bench.generation.one_pass import PHASES
from mmkv_bench.models.quiet import quiet_transformers
from mmkv_bench.models.source import HUB, Source
from mmkv_bench.plan.cells import bases, build_methods
from mmkv_bench.plan.stand_ins import StandIns

if TYPE_CHECKING:
    from torch import Tensor

    from mmkv_bench.compression.budget import Budget
    from mmkv_bench.compression.compressor import Compressor
    from mmkv_bench.forecast.dry_run import DryModel
    from mmkv_bench.forecast.forecast import Forecast
    from mmkv_bench.models.load import LoadedModel
    from mmkv_bench.plan.plan import Plan

GIB = 2**30
VISUAL = 0.8
"""Share of a prompt's tokens that are visual where nobody says."""


@dataclass(frozen=True)
class PlannedMemory:
    """One cell at one length. peaks: phase -> bytes, in the order of `PHASES`; error: one sentence in their place; fits: None
    without a device memory."""

    cell: str
    tokens: int
    visual_tokens: int
    peaks: Mapping[str, int]
    fits: bool | None = None
    error: str = ""

    @property
    def largest(self) -> int:
        return max(self.peaks.values(), default=0)


Prompts = list[tuple["Tensor", "Mapping[str, Tensor] | None"]]
"""Of each prompt token types, and what a processor made of it where it has media."""


def planned(
    plan: Plan, forecast: Forecast, prompts: Prompts | None = None, reserve: int = 32
) -> tuple[list[PlannedMemory], list[str]]:
    """Every different cell at every length of the forecast, and notes.

    Args:
        prompts: in the place of those lengths; reserve: slots for an answer's tokens.

    Raises:
        ConfigError: a model whose shape is not here.
    """
    quiet_transformers()
    config = _shape(plan)
    assert plan.family is not None, "who has a shape has a family"
    made_up = StandIns(plan.cells[0].model, plan.cells[0].model_fingerprint, plan.family)
    cells = _distinct(plan, made_up)
    prompts = _prompts(plan, forecast, config) if prompts is None else prompts
    kind, memory = "cpu" if plan.config.model.device == "cpu" else "cuda", forecast.given.memory
    with dry_model(config, plan.cells[0].dtype, plan.config.model.attention, kind) as model:
        found = [
            _counted(model, name, *cell, *prompt, memory, reserve) for prompt in prompts for name, cell in cells.items()
        ]
    unseen = any(inputs is None and bool((types > 0).any()) for types, inputs in prompts)
    return found, _notes(plan, made_up, unseen)


def without_weights(plan: Plan) -> LoadedModel:
    """The model of a plan as far as prompts need it: its processor and its facts.

    Raises:
        ConfigError: a model whose shape or processor is not here.
    """
    from transformers import AutoProcessor

    from mmkv_bench.models.families import family_of
    from mmkv_bench.models.limits import apply_limits
    from mmkv_bench.models.load import LoadedModel, device_of
    from mmkv_bench.models.processors import build_processor

    model, source, config = plan.config.model, Source.of(plan.config.model), _shape(plan)
    if model.processor:
        processor = build_processor(config, model.processor)
    elif source.kind == HUB:
        raise ConfigError(
            f"--memory needs the processor of {model.name}, and conf/model has none; allowed: a model of conf/model, or "
            "prompts=text; choose one"
        )
    else:
        processor = AutoProcessor.from_pretrained(source.place, trust_remote_code=False)
    apply_limits(processor, model.min_pixels, model.max_pixels, model.video_max_pixels, model.frames)
    tokenizer = getattr(processor, "tokenizer", processor)
    family, cpu = family_of(config, tokenizer), device_of("cpu")
    return LoadedModel(model.name, None, processor, tokenizer, family, cpu, plan.cells[0].dtype)  # type: ignore[arg-type]


def _prompts(plan: Plan, forecast: Forecast, config: Any) -> Prompts:
    """Token types, and what a processor made of a prompt with images."""
    given, model = forecast.given, plan.config.model
    if given.images:
        limits = {"min_pixels": model.min_pixels, "max_pixels": model.max_pixels}
        made = blank_prompt(config, model.processor or {}, given.images, limits)
        return [(made.types, made.inputs)]
    assert plan.family is not None
    share = VISUAL if plan.family.multimodal else 0
    lengths = dict.fromkeys(one.tokens for one in forecast.datasets)
    visual = given.visual_tokens
    return [(prompt_types(n, int(share * n) if visual is None else visual), None) for n in lengths]


def text(found: Sequence[PlannedMemory], notes: Sequence[str], memory: float | None) -> str:
    """For people: a line per cell, GiB."""
    shown = [phase for phase in PHASES if any(phase in one.peaks for one in found)]
    heads = ["cell", *shown, "largest", *([] if memory is None else [f"on {memory / GIB:,.4g} GiB"])]
    lines = ["", "peak memory in GiB, planned: counted in a dry run without numbers"]
    for tokens, visual in dict.fromkeys((one.tokens, one.visual_tokens) for one in found):
        here = [one for one in found if (one.tokens, one.visual_tokens) == (tokens, visual)]
        rows = []
        for one in here:
            row = [one.cell, *(_gib(one.peaks.get(phase)) for phase in shown), _gib(one.largest or None)]
            rows.append(
                row + ([] if memory is None else ["-" if one.fits is None else "fits" if one.fits else "too large"])
            )
        lines += [
            "",
            f"prompts of {tokens:,} tokens, {visual:,} of them visual",
            *aligned(heads, rows, words=1),
        ]
        lines += [f"  {one.cell}: {one.error}" for one in here if one.error]
    return "\n".join([*lines, "", *(f"note       {note}" for note in notes)])


def document(found: Sequence[PlannedMemory], notes: Sequence[str]) -> dict[str, Any]:
    """The same as data, in bytes."""
    rows = [vars(one) | {"largest": one.largest or None, "error": one.error or None} for one in found]
    return {"measured": "planned", "cells": rows, "notes": list(notes)}


def _gib(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / GIB:.3f}" if nbytes < 10 * GIB else f"{nbytes / GIB:.2f}"


def _shape(plan: Plan) -> Any:
    """The transformers config of the model, from what is here."""
    from mmkv_bench.models.fingerprint import cached_folder
    from mmkv_bench.models.load import load_config
    from mmkv_bench.models.shapes import config_of

    model, source = plan.config.model, Source.of(plan.config.model)
    if source.kind != HUB:
        return source.hf_config()
    if model.shape:
        return config_of(model.shape)
    folder = cached_folder(source.place, model.revision)
    if folder is None:
        raise ConfigError(
            f"--memory needs the shape of {model.name}, and its files are not here; allowed: a model of conf/model, or one that "
            "was fetched; choose such a one"
        )
    return load_config(str(folder))


def _distinct(plan: Plan, made_up: StandIns) -> dict[str, tuple[Compressor, Budget | None]]:
    """Label -> what is counted, each method, reading and budget once: dataset, protocol and seed change no peak here."""
    names = method_defaults(bases(plan.config), plan.config.folders)
    built = {
        (method.name, method.compressor.reading): method.compressor
        for method in build_methods(plan.config, names, made_up)  # type: ignore[arg-type]
    }
    found: dict[str, tuple[Compressor, Budget | None]] = {}
    for cell in plan.cells:
        label = cell.method if cell.budget is None else f"{cell.method}@{cell.budget}"
        label += f" {cell.reading}" if cell.reading not in (None, "paper") else ""
        found.setdefault(label, (built[cell.method, cell.compressor.reading], cell.budget))
    return found


def _counted(
    model: DryModel,
    name: str,
    compressor: Compressor,
    budget: Budget | None,
    types: Tensor,
    inputs: Mapping[str, Tensor] | None,
    memory: float | None,
    reserve: int,
) -> PlannedMemory:
    tokens, visual = types.shape[1], int((types > 0).sum())
    try:
        found = model.peaks(compressor, budget, types, inputs, reserve=reserve)
    except MMKVError as error:
        return PlannedMemory(name, tokens, visual, {}, None, str(error))
    peaks = {phase: found[phase] for phase in PHASES if phase in found}
    return PlannedMemory(name, tokens, visual, peaks, None if memory is None else max(peaks.values()) <= memory)


def _notes(plan: Plan, made_up: StandIns, unseen: bool) -> list[str]:
    said = [
        "bytes of live storages: what an allocator rounds up or keeps in reserve, workspaces of libraries and the CUDA "
        "context come on top",
        "attention counts as a fused kernel; entries per head are as made-up scores divide them: heads that a real prompt "
        "makes more unequal take more padding, where they are padded",
    ]
    if unseen:
        said.append("the vision tower, which runs before the text model, is counted where --image says what it sees")
    if {cell.protocol for cell in plan.cells} != {"paper"}:
        said.append("counted under protocol=paper, whatever else the run has")
    if made_up.used:
        named = ", ".join(sorted(made_up.used))
        said.append(f"{named}: not calibrated here; counted as if all layers and heads were alike")
    if any(cell.compressor.needs.answer for cell in plan.cells):
        said.append("oracle: without the full cache's answer, which it reads first")
    return said
