"""Peak memory of every (method, budget) setting by phase at the model's true shape, counted in a dry run without a
device."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

from mmkv_bench.calibrate.artefact import StandIns
from mmkv_bench.config.schema import TOGETHER
from mmkv_bench.errors import ConfigError, MMKVError
from mmkv_bench.families.facts import model_facts, text_config
from mmkv_bench.families.registry import apply_limits
from mmkv_bench.forecast.dry_run import dry_model, prompt_types
from mmkv_bench.forecast.forecast import LARGEST_BATCH
from mmkv_bench.forecast.prefill_counts import caches_held, observed_bytes
from mmkv_bench.generation.encode import encode
from mmkv_bench.generation.one_pass import DECODE, LOAD, PHASES
from mmkv_bench.models.load import quiet_transformers
from mmkv_bench.models.processor import build_processor
from mmkv_bench.models.source import HUB, Source
from mmkv_bench.plan.cells import build_methods
from mmkv_bench.text_columns import align_columns
from mmkv_bench.text_columns import size as nbytes

if TYPE_CHECKING:
    from torch import Tensor

    from mmkv_bench.compression.budget import Budget
    from mmkv_bench.compression.compressor import Compressor
    from mmkv_bench.config.schema import Model
    from mmkv_bench.forecast.forecast import Forecast
    from mmkv_bench.models.load import LoadedModel
    from mmkv_bench.plan.plan import Plan

GIB = 2**30
JOIN = "join"  # phase in which the caches of a batch are joined
VISUAL_SHARE = 0.8
"""Assumed share of visual tokens in a prompt of which nothing is known."""
QUESTION = "What is the total that the last row of the table on this page states?"


@dataclass(frozen=True)
class DryPrompt:
    """A prompt of a dry run.

    types: token types, int `[1, T]`. inputs: a processor's output for a prompt with media. chunk: tokens of a stream's
    chunk; 0 without a stream.
    """

    types: Tensor
    inputs: Mapping[str, Tensor] | None = None
    chunk: int = 0


@dataclass(frozen=True)
class CellPeaks:
    """Memory peaks of one (method, budget) setting at one prompt length and batch size.

    Attributes:
        cell: label of method and budget.
        peaks: phase -> bytes, in the order of `PHASES`.
        error: one sentence if there are no peaks.
        fits, largest_batch: None if the device's memory is unknown.
    """

    cell: str
    tokens: int
    visual_tokens: int
    peaks: Mapping[str, int]
    fits: bool | None = None
    error: str = ""
    batch: int = 1
    largest_batch: int | None = None

    @property
    def largest(self) -> int:
        return max(self.peaks.values(), default=0)


def count_peaks(
    plan: Plan,
    forecast: Forecast,
    prompts: Sequence[DryPrompt] | None = None,
    reserve: int = 32,
    tell: Callable[[int, int, str], None] = lambda done, total, label: None,
) -> tuple[list[CellPeaks], list[str]]:
    """Return the memory peaks of each (method, budget) setting at each prompt length and batch size, and notes.

    The peaks of a batch are computed from those of one sequence.

    Args:
        prompts: prompts to use instead of the forecast's lengths.
        reserve: slots for an answer's tokens.
        tell: called before each dry run with the number done, the number of all, and a label.

    Raises:
        ConfigError: the model's shape is not on this machine.
    """
    quiet_transformers()
    config, model = _transformers_config(plan), plan.model
    assert plan.family is not None, "a model with a shape has a family"
    stand_ins = StandIns(plan.cells[0].model, plan.cells[0].model_fingerprint, plan.family)
    method_by_label, device_kind = _distinct_settings(plan, stand_ins), "cpu" if model.device == "cpu" else "cuda"
    prompts = _prompts(plan, forecast, config) if prompts is None else prompts
    batches = list(dict.fromkeys(one.sequences for one in forecast.datasets)) or [1]
    all_peaks, memory = [], forecast.given.memory
    prompts_and_cells = list(product(prompts, method_by_label.items()))
    with dry_model(config, plan.cells[0].dtype, model.attention, device_kind) as dry:
        for number, (prompt, (name, (compressor, budget, streams))) in enumerate(prompts_and_cells):
            tell(number, len(prompts_and_cells), f"{name} at {prompt.types.shape[1]:,} tokens")
            one = CellPeaks(name, prompt.types.shape[1], int((prompt.types > 0).sum()), {})
            try:
                chunk = prompt.chunk if streams else 0
                peaks = dry.peaks(compressor, budget, prompt.types, prompt.inputs, reserve=reserve, chunk=chunk)
                one = replace(one, peaks={phase: peaks[phase] for phase in PHASES if phase in peaks})
            except MMKVError as error:
                one = replace(one, error=str(error))
            slot_bytes, prefills_together = reserve * (forecast.kv_per_token or 0), plan.batch_prefill == TOGETHER
            peaks_of_batch = partial(
                _batch_peaks, one, slots=slot_bytes, together=prefills_together, layers=plan.family.num_layers
            )
            peaks_by_batch = [peaks_of_batch(size) for size in batches]
            if one.peaks and memory is not None:
                largest_batch = bisect_right(
                    range(1, LARGEST_BATCH), memory, key=lambda size: peaks_of_batch(size).largest
                )
                peaks_by_batch = [
                    replace(each, fits=each.largest <= memory, largest_batch=largest_batch) for each in peaks_by_batch
                ]
            all_peaks += peaks_by_batch
    all_peaks.sort(key=lambda one: one.batch)
    longest_prompt = max((one.tokens for one in all_peaks), default=0)
    cache_and_observed_bytes = (
        longest_prompt * (forecast.kv_per_token or 0),
        observed_bytes(plan, longest_prompt, text_config(config).hidden_size),
    )
    has_uncounted_vision = any(prompt.inputs is None and bool((prompt.types > 0).any()) for prompt in prompts)
    return all_peaks, _notes(plan, stand_ins, has_uncounted_vision, batches != [1]) + _held_cache_notes(
        plan, *cache_and_observed_bytes
    )


def without_weights(plan: Plan) -> LoadedModel:
    """Load the processor and the facts of a plan's model, which suffice to make prompts.

    Raises ConfigError: the model's shape or processor is not on this machine.
    """
    from transformers import AutoProcessor

    from mmkv_bench.models.load import LoadedModel, device_of, limit

    model, source, config = plan.model, Source.of(plan.model), _transformers_config(plan)
    if model.processor:
        processor = build_processor(config, model.processor)
    elif source.kind == HUB:
        raise ConfigError(
            f"--memory needs the processor of {model.name}, but conf/model has none; allowed: a model of conf/model, or "
            "prompts=text; choose one"
        )
    else:
        processor = AutoProcessor.from_pretrained(source.place, trust_remote_code=False)
    limit(processor, model)
    tokenizer = getattr(processor, "tokenizer", processor)
    family, cpu = model_facts(config, tokenizer), device_of("cpu")
    return LoadedModel(model.name, None, processor, tokenizer, family, cpu, plan.cells[0].dtype)  # type: ignore[arg-type]


def _blank_prompt(config: Any, model: Model, images: Sequence[tuple[int, int]]) -> DryPrompt:
    """Make a prompt of blank images (width, height in pixels) and a question, encoded by the model's processor."""
    from PIL import Image

    processor = build_processor(config, model.processor or {})
    apply_limits(processor, model.min_pixels, model.max_pixels)
    content = [*({"type": "image"} for _ in images), {"type": "text", "text": QUESTION}]
    blank_images = [Image.new("RGB", size) for size in images]
    prompt = encode(processor, model_facts(config), "planned", [{"role": "user", "content": content}], blank_images)
    return DryPrompt(prompt.types, prompt.inputs)


def text(counted: Sequence[CellPeaks], notes: Sequence[str], memory: float | None) -> str:
    """Return the peaks as a table for a terminal, in GiB. memory: bytes of the device, None if unknown."""
    shown_phases = [phase for phase in (*PHASES, JOIN) if any(phase in one.peaks for one in counted)]
    headings = ["cell", *shown_phases, "largest", *([] if memory is None else [f"on {memory / GIB:,.4g} GiB"])]
    lines = ["", "peak memory in GiB, counted in a dry run without numbers"]
    peaks_by_setting: dict[tuple[int, int, int], list[CellPeaks]] = {}
    for one in counted:
        peaks_by_setting.setdefault((one.tokens, one.visual_tokens, one.batch), []).append(one)
    for (tokens, visual, batch), here in peaks_by_setting.items():
        rows = []
        for one in here:
            row = [one.cell, *(_gib(one.peaks.get(phase)) for phase in shown_phases), _gib(one.largest or None)]
            fit_column = [] if memory is None else ["-" if one.fits is None else "fits" if one.fits else "too large"]
            rows.append([*row, *fit_column])
        batch_clause = f", {batch} at a time" if batch > 1 else ""
        lines += ["", f"prompts of {tokens:,} tokens, {visual:,} of them visual{batch_clause}"]
        lines += align_columns(headings, rows, words=1)
        lines += [f"  {one.cell}: {one.error}" for one in here if one.error]
    return "\n".join([*lines, "", *(f"note       {note}" for note in notes)])


def document(counted: Sequence[CellPeaks], notes: Sequence[str]) -> dict[str, Any]:
    """Return peaks [bytes] and notes as data for JSON."""
    rows = [vars(one) | {"largest": one.largest or None, "error": one.error or None} for one in counted]
    return {"measured": "planned", "cells": rows, "notes": list(notes)}


def _batch_peaks(one: CellPeaks, batch: int, slots: int, together: bool, layers: int) -> CellPeaks:
    """Compute the peaks of a batch from the peaks of one sequence.

    If prompts are prefilled together, each sequence holds everything except the weights. Otherwise each prefill comes
    on top of the kept entries of earlier sequences, and at the end the caches are joined layer by layer.

    slots: bytes of one answer's slots, which are allocated when caches are joined.
    """
    if batch == 1 or not one.peaks:
        return replace(one, batch=batch)
    load_bytes = one.peaks[LOAD]
    cache_bytes = one.peaks[DECODE] - load_bytes
    kept_bytes = max(0, cache_bytes - slots)
    peak_by_phase = {
        phase: load_bytes + batch * (peak - load_bytes)
        if together or phase in (LOAD, DECODE)
        else peak + (batch - 1) * kept_bytes
        for phase, peak in one.peaks.items()
    }
    if not together:
        peak_by_phase[JOIN] = load_bytes + batch * (kept_bytes + cache_bytes // layers)
    return replace(one, peaks=peak_by_phase, batch=batch)


def _prompts(plan: Plan, forecast: Forecast, config: Any) -> list[DryPrompt]:
    if forecast.given.images:
        prompt = _blank_prompt(config, plan.model, forecast.given.images)
        return [replace(prompt, chunk=max((one.chunk for one in forecast.datasets), default=0))]
    assert plan.family is not None
    visual_share = VISUAL_SHARE if plan.family.multimodal else 0
    lengths = dict.fromkeys((one.tokens, one.visual_tokens, one.chunk) for one in forecast.datasets)
    return [
        DryPrompt(prompt_types(n, int(visual_share * n) if visual is None else visual), chunk=chunk)
        for n, visual, chunk in lengths
    ]


def _gib(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / GIB:.3f}" if nbytes < 10 * GIB else f"{nbytes / GIB:.2f}"


def _transformers_config(plan: Plan) -> Any:
    from mmkv_bench.models.files import cached_folder
    from mmkv_bench.models.load import load_config
    from mmkv_bench.models.shape import config_of

    model, source = plan.model, Source.of(plan.model)
    if source.kind != HUB:
        return source.hf_config
    if model.shape:
        return config_of(model.shape)
    folder = cached_folder(source.place, model.revision)
    if folder is None:
        raise ConfigError(
            f"--memory needs the shape of {model.name}, but its config.json is not on this machine; allowed: a model of "
            "conf/model, or one that was fetched before; fetch this model, or choose another"
        )
    return load_config(str(folder))


def _distinct_settings(plan: Plan, stand_ins: StandIns) -> dict[str, tuple[Compressor, Budget | None, bool]]:
    """Return label -> (method, budget, whether a stream is read). Dataset, seed and most protocols change no peak."""
    compressor_by_method = {
        (method.name, method.compressor.reading): method.compressor for method in build_methods(plan.entries, stand_ins)
    }
    cells: dict[str, tuple[Compressor, Budget | None, bool]] = {}
    for cell in plan.cells:
        label = cell.method if cell.budget is None else f"{cell.method}@{cell.budget}"
        label += f" {cell.reading}" if cell.reading not in (None, "paper") else ""
        is_stream = cell.rule.streams
        label += " stream" * is_stream
        cells.setdefault(label, (compressor_by_method[cell.method, cell.compressor.reading], cell.budget, is_stream))
    return cells


def _held_cache_notes(plan: Plan, cache: int, observed: int) -> list[str]:
    """Return sentences about memory besides the peaks. cache: bytes of the longest full cache. observed:
    `observed_bytes`."""
    caches_while_answering, caches_while_prefilling = caches_held(plan)
    notes = []
    if caches_while_answering:
        notes.append(
            f"documents' whole caches stay for further questions and come on top: {caches_while_answering} while "
            "answers are decoded "
            f"({nbytes(caches_while_answering * cache)}), {caches_while_prefilling} during one more prefill "
            f"({nbytes(caches_while_prefilling * cache)})"
        )
    if observed:
        notes.append(
            "query_joint: what scorers read of all layers stays until a document's last question is prefilled and comes on top "
            f"({nbytes(observed)})"
        )
    if any(cell.rule.converses for cell in plan.cells):
        notes.append(
            "turns: a conversation holds one question and answer beside its budget; with full, those of all earlier turns"
        )
    return notes


def _notes(plan: Plan, stand_ins: StandIns, unseen: bool, batched: bool) -> list[str]:
    notes = [
        "live storages alone: an allocator's rounding and reserve, workspaces of libraries and the CUDA context come on top",
        "attention is taken as a fused kernel; heads of unequal length are padded by made-up scores, real prompts may need more",
    ]
    if batched:
        notes.append(
            "batches follow from one sequence by arithmetic; padding between sequences of unequal heads comes on top"
        )
    if unseen:
        notes.append("the vision tower runs before the text model and is counted only if --image gives its input")
    if {cell.protocol for cell in plan.cells} - {"paper", "stream"}:
        notes.append("counted under protocol=paper, whatever else the run has")
    if any(cell.rule.streams for cell in plan.cells):
        notes.append(
            "a stream is counted as a text of its length, in its chunks; a copy of its cache for each further ask_at comes on top"
        )
    if stand_ins.made_up:
        made_up_methods = ", ".join(sorted(stand_ins.made_up))
        notes.append(f"{made_up_methods}: not calibrated here; counted as if all layers and heads were alike")
    if any(cell.compressor.needs.answer for cell in plan.cells):
        notes.append("oracle: without the full cache's answer, which it reads first")
    return notes
