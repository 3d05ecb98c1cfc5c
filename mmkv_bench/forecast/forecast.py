"""What a run must take at least, by arithmetic from shapes: bytes, the roofline of a decode step, hours, and whether it fits.

Nothing is loaded: neither weights nor data nor torch. What that leaves unknown is said, never counted as zero; lengths of
prompts that only data tell are those of stored answers, else assumed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mmkv_bench.errors import ConfigError
from mmkv_bench.forecast import roofline
from mmkv_bench.models.families import kv_bytes_per_token
from mmkv_bench.models.fingerprint import cached_folder
from mmkv_bench.models.sizes import Sizes, sizes_of
from mmkv_bench.models.source import FOLDER, HUB, Source
from mmkv_bench.models.stated_config import stated
from mmkv_bench.models.visual_tokens import Limits, image_tokens
from mmkv_bench.plan.identity import UNKNOWN

if TYPE_CHECKING:
    from mmkv_bench.compression.budget import Budget
    from mmkv_bench.plan.cells import Cell
    from mmkv_bench.plan.coverage import Standing
    from mmkv_bench.plan.parts import Part
    from mmkv_bench.plan.plan import Plan
    from mmkv_bench.store.store import Store

ASSUMED = 2048
"""Tokens of a prompt of which nothing is known."""
QUESTION = 64
"""Tokens of the text beside images, template included."""
GIB, HOUR = 2**30, 3600.0
_WIDTHS = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
_ALIVE = 3  # tensors [tokens, intermediate] that an eager MLP holds at once


@dataclass(frozen=True)
class Given:
    """What the user says of prompts and of the device; None and empty: not said.

    Attributes:
        prompt_tokens: lengths to plan for; visual_tokens: of each of them; images: width and height in pixels of those of a
            prompt, which then has as many tokens as they and a question make.
        memory: bytes of the device; bandwidth: bytes per second; rate: operations per second; device: whose these are.
    """

    prompt_tokens: Sequence[int] = ()
    visual_tokens: int | None = None
    images: Sequence[tuple[int, int]] = ()
    memory: float | None = None
    bandwidth: float | None = None
    rate: float | None = None
    device: str = ""


@dataclass(frozen=True)
class Line:
    """What one budget comes to at one length.

    Attributes:
        label: the budget, `full` without one; scope: when its methods reduce a layer (`layer`, `model`), `full`: never.
        methods: those of it; kept: entries per KV head of the prompt; kv: bytes of one prompt's keys and values then.
        read: useful bytes of the first decode step; ms: the least milliseconds of it, None without a bandwidth.
        speed_up: over the full cache that the roofline allows, by bytes alone without a bandwidth; needs: bytes that the device
            must have at least.
        batch: sequences whose caches fit beside the weights up to the end of their answers, None without a device memory.
    """

    label: str
    scope: str
    methods: Sequence[str]
    kept: int
    kv: float
    read: float
    ms: float | None
    speed_up: float
    needs: float
    batch: int | None


@dataclass(frozen=True)
class Lengths:
    """One dataset's prompts at one length. source: `given`, `pictures`, `stored` (median of stored answers), `assumed`, or
    `asked` (the setting `lengths`)."""

    dataset: str
    tokens: int
    source: str
    new_tokens: int | None
    lines: Sequence[Line]
    prefill_hours: float | None
    decode_hours: float | None


@dataclass(frozen=True)
class Forecast:
    """Of a plan. held, read: bytes of weights that the device holds and that a step reads, None where unknown; missing: sentences
    about what is not known or not counted."""

    given: Given
    sizes: Sizes
    held: int | None
    read: int | None
    kv_per_token: int | None
    context: int | None
    datasets: Sequence[Lengths]
    missing: Sequence[str]


def forecast(plan: Plan, standing: Standing, store: Store, given: Given) -> Forecast:
    """The forecast of an outline.

    Raises:
        ConfigError: a prompt longer than the model's context, or with fewer tokens than visual ones.
    """
    given = _with_images(plan, given)
    _check(plan, given)
    known = _stored_lengths(plan, store)

    def datasets(counted: Counting) -> list[Lengths]:
        return [
            counted.dataset(part, tokens, source, standing.missing(part))
            for part in plan.parts
            for tokens, source in _lengths(plan, part, given, known)
        ]

    return forecast_of(plan, given, datasets)


def forecast_of(plan: Plan, given: Given, datasets: Callable[[Counting], Sequence[Lengths]]) -> Forecast:
    """The forecast of lengths that are known; `datasets` is asked where there is something to count with."""
    sizes, dtype = _sizes(plan), plan.cells[0].dtype
    width = None if dtype == UNKNOWN else _WIDTHS[dtype]
    missing = [sizes.missing] if sizes.missing else []
    if sizes.decoder is None or width is None or plan.family is None:
        return Forecast(
            given, sizes, None, None, None, None, (), missing or ["the precision of the model is not known"]
        )
    held = None if sizes.parameters is None else sizes.parameters * width
    read = sizes.decoder.read * width
    per_token = kv_bytes_per_token(plan.family, dtype)
    counted = Counting(plan, given, sizes, held, read, per_token, width)
    found = datasets(counted)
    if given.bandwidth is None:
        missing.append(
            "the roofline needs a device's bandwidth: --bandwidth GB/s, or --measure auto, which measures this one's"
        )
    missing += _spread(plan.config.model.device_map, held, given.memory) + _unlike(plan.cells)
    return Forecast(given, sizes, held, read, per_token, plan.family.max_context, found, missing)


def _spread(device_map: Any, held: int | None, memory: float | None) -> list[str]:
    """What to say of a model that lies on several devices, or would have to."""
    if device_map is not None:
        return [
            f"model.device_map={device_map} lays layers on several devices, which work one after the other: --device-memory is "
            "of all of them together, --bandwidth and --matmul are of one"
        ]
    if held is None or memory is None or held < memory:
        return []
    return [
        f"the weights alone fill {math.ceil(held / memory)} such devices or more: model.device_map=auto lays the layers on all "
        "that a process sees (CUDA_VISIBLE_DEVICES)"
    ]


def _sizes(plan: Plan) -> Sizes:
    model, source = plan.config.model, Source.of(plan.config.model)
    folder: str | Path | None = source.place if source.kind == FOLDER else None
    if source.kind == HUB:
        folder = cached_folder(source.place, model.revision)
    whole = None
    if model.layers is not None and model.shape:
        from mmkv_bench.models.shapes import values_of

        whole = stated(values_of(model.shape))
    return sizes_of(vars(model), source.described_here(), whole, folder)


def _check(plan: Plan, given: Given) -> None:
    most = None if plan.family is None else plan.family.max_context
    for tokens in given.prompt_tokens:
        if most is not None and tokens > most:
            raise ConfigError(
                f"--prompt-tokens {tokens} is beyond the context of {plan.config.model.name}, which is {most} tokens; allowed: "
                f"1 to {most}; give a shorter prompt"
            )
        if given.visual_tokens is not None and given.visual_tokens > tokens:
            raise ConfigError(
                f"--visual-tokens {given.visual_tokens} is more than --prompt-tokens {tokens}, of which they are a part; give "
                "fewer"
            )
    if given.visual_tokens and plan.family is not None and not plan.family.multimodal:
        raise ConfigError(
            f"--visual-tokens {given.visual_tokens}: {plan.config.model.name} has no visual tokens; leave it out"
        )


def _with_images(plan: Plan, given: Given) -> Given:
    """With the lengths that images make.

    Raises:
        ConfigError: a model whose processor is not known here; UnsupportedError: one without images.
    """
    if not given.images:
        return given
    model = plan.config.model
    if not model.shape or not model.processor:
        raise ConfigError(
            f"--image needs the settings of a processor, and {model.name} has none in conf/model; give --prompt-tokens instead"
        )
    limits = Limits(model.min_pixels, model.max_pixels)
    kind, count = model.shape["model_type"], len(given.images)
    visual = sum(image_tokens(kind, model.processor, *size, count, limits) for size in given.images)
    return replace(given, prompt_tokens=[visual + QUESTION], visual_tokens=visual)


def _stored_lengths(plan: Plan, store: Store) -> dict[str, int]:
    """Dataset -> median tokens of the prompts of its stored answers."""
    rows = store.responses(plan.names, ("cell", "prompt_tokens"))
    found = {}
    for part in plan.parts:
        own = pc.is_in(rows["cell"], value_set=pa.array([cell.cell for cell in part.cells], pa.string()))
        tokens = rows["prompt_tokens"].filter(own).drop_null()
        if len(tokens):
            found[part.dataset] = int(np.median(tokens.to_numpy()))
    return found


def _lengths(plan: Plan, part: Part, given: Given, known: dict[str, int]) -> list[tuple[int, str]]:
    if given.prompt_tokens:
        return [(tokens, "pictures" if given.images else "given") for tokens in given.prompt_tokens]
    if part.dataset in known:
        return [(known[part.dataset], "stored")]
    most = None if plan.family is None else plan.family.max_context
    return [(min(ASSUMED, most or ASSUMED), "assumed")]


def _unlike(cells: Sequence[Cell]) -> list[str]:
    """Sentences about cells whose bytes do not follow from their budget alone."""
    said = []
    quantised = dict.fromkeys(cell.method for cell in cells if cell.compressor.quantises)
    if quantised:
        said.append(
            f"bytes of {', '.join(quantised)} follow from bits, scales and residuals: `plan --memory` counts them"
        )
    acting = dict.fromkeys(cell.method for cell in cells if cell.compressor.decoding and not cell.compressor.quantises)
    if acting:
        said.append(f"{', '.join(acting)} act while decoding: their lines are those right after the prefill")
    return said


@dataclass(frozen=True)
class Counting:
    """What lines are counted with: bytes of weights (held on the device, read by a step), of a token's keys and values, of a
    number."""

    plan: Plan
    given: Given
    sizes: Sizes
    held: int | None
    read: int
    per_token: int
    width: int

    def dataset(self, part: Part, tokens: int, source: str, samples: int) -> Lengths:
        """One dataset at one length; samples: those that have answers to be made."""
        new = _new_tokens(part.cells)
        lines = [self.line(*group, tokens, new or 0) for group in groups(part.cells)]
        return Lengths(
            part.dataset,
            tokens,
            source,
            new,
            lines,
            self.prefill_hours(part, tokens, samples),
            self.decode_hours(part, tokens, new, samples),
        )

    def line(self, budget: Budget | None, scope: str, methods: Sequence[str], tokens: int, new: int) -> Line:
        """One budget; `methods` reduce their layers as `scope` says, answers have `new` tokens at most."""
        kept = tokens if budget is None else min(tokens, budget.entries_for(tokens))
        kv, full = float(kept * self.per_token), float(tokens * self.per_token)
        weights, ms, whole = self.held or self.read, self._step_ms(kept), self._step_ms(tokens)
        decoder = self.sizes.decoder
        assert decoder is not None, "without a shape nothing is forecast"
        one_layer = full / decoder.layers
        prefilled = (
            full if scope != "layer" else max(kv, min(full, kv * (decoder.layers - 1) / decoder.layers + one_layer))
        )
        alive = tokens * (_ALIVE * decoder.intermediate + 2 * decoder.hidden) * self.width
        free = None if self.given.memory is None else self.given.memory - weights
        return Line(
            label="full" if budget is None else str(budget),
            scope=scope,
            methods=methods,
            kept=kept,
            kv=kv,
            read=roofline.step_bytes(self.read, kv),
            ms=ms,
            speed_up=roofline.speed_up_allowed(self.read, full, kv) if ms is None or whole is None else whole / ms,
            needs=weights + prefilled + alive,
            batch=None if free is None else max(0, int(free // (kv + new * self.per_token))),
        )

    def _step_ms(self, entries: int) -> float | None:
        """The least milliseconds of a decode step over so many entries, None without a bandwidth."""
        if self.given.bandwidth is None or self.sizes.decoder is None:
            return None
        read = roofline.step_bytes(self.read, entries * self.per_token)
        work = roofline.step_operations(self.sizes.decoder, entries)
        return roofline.roofline_ms(read, self.given.bandwidth, work, self.given.rate)

    def prefill_hours(self, part: Part, tokens: int, samples: int) -> float | None:
        """Of the samples' prefills: one for all cells of a protocol, one more for each that prefills again."""
        from mmkv_bench.protocols import protocol

        if self.given.rate is None or self.sizes.decoder is None:
            return None
        rules = {cell.protocol: protocol(cell.protocol) for cell in part.cells}
        passes = len({rule.cuts for rule in rules.values()}) + sum(
            rules[cell.protocol].prefills_again and cell.budget is not None for cell in part.cells
        )
        if str(self.plan.config.sharing) == "off":
            passes = len(part.cells)
        return samples * passes * roofline.prefill_operations(self.sizes.decoder, tokens) / self.given.rate / HOUR

    def decode_hours(self, part: Part, tokens: int, new: int | None, samples: int) -> float | None:
        """Of answers of full length: weights once for each batch of forks, every cell's entries by themselves."""
        if self.given.bandwidth is None or new is None:
            return None
        together = 1 if str(self.plan.config.sharing) == "off" else int(self.plan.config.fork_batch)
        batches = -(-len(part.cells) // together)
        entries = sum(
            (tokens if cell.budget is None else min(tokens, cell.budget.entries_for(tokens))) + new / 2
            for cell in part.cells
        )
        step = batches * self.read + entries * self.per_token
        return samples * new * step / self.given.bandwidth / HOUR


def groups(cells: Sequence[Cell]) -> list[tuple[Budget | None, str, list[str]]]:
    """Budgets and scopes with their methods, `full` first."""
    found: dict[tuple[Budget | None, str], dict[str, None]] = {}
    for cell in sorted(cells, key=lambda one: one.budget is not None):
        if cell.compressor.quantises:
            continue  # `_unlike` says so
        scope = "full" if cell.budget is None else str(cell.allocation_scope)
        found.setdefault((cell.budget, scope), {})[cell.method] = None
    return [(budget, scope, list(methods)) for (budget, scope), methods in found.items()]


def _new_tokens(cells: Sequence[Cell]) -> int | None:
    """Most tokens of an answer, where the dataset's generation settings say so."""
    told = json.loads(cells[0].generation).get("max_new_tokens")
    return int(told) if told else None
