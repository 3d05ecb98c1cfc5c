"""Forecast of a plan by arithmetic from shapes: bytes, the roofline of a decode step, hours, and whether it fits.

Loads neither weights nor data nor torch. What is not known then is listed in `Forecast.missing`, never counted as zero.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mmkv_bench.errors import ConfigError
from mmkv_bench.forecast import prompt_length, roofline
from mmkv_bench.forecast.prompt_length import PromptLength
from mmkv_bench.forecast.weights import ModelBytes, model_sizes
from mmkv_bench.protocols import protocol

if TYPE_CHECKING:
    from mmkv_bench.compression.budget import Budget
    from mmkv_bench.families.facts import ModelFacts
    from mmkv_bench.models.shape import Sizes
    from mmkv_bench.plan.cells import Cell
    from mmkv_bench.plan.plan import Coverage, DatasetShare, Plan
    from mmkv_bench.store.store import Store

HOUR = 3600.0
_LARGEST = 1 << 24  # of the batches that are looked for
STREAM = "stream"
_ALIVE = 3  # tensors [tokens, intermediate] that an eager MLP holds at once


@dataclass(frozen=True)
class Assumptions:
    """Facts about prompts and the device that the user states or an earlier measurement knows; None and empty: not known.

    Attributes:
        prompt_tokens: lengths to plan for; visual_tokens: of each of them; images: width and height in pixels of those of a
            prompt, which then has as many tokens as they and a question make.
        memory: bytes of the device; bandwidth: bytes per second; rate: operations per second; device: its name.
    """

    prompt_tokens: Sequence[int] = ()
    visual_tokens: int | None = None
    images: Sequence[tuple[int, int]] = ()
    memory: float | None = None
    bandwidth: float | None = None
    rate: float | None = None
    device: str = ""


@dataclass(frozen=True)
class Workload:
    """Prompts of one length, and what is done with them.

    Attributes:
        length: of each prompt; new_tokens: most tokens of an answer, None where that is not known; cells: what reads the prompts.
        prefills: tokens of a prompt -> number of such prompts to prefill.
        weight_reads: times that decoding reads the weights; entry_reads: entries that it reads in sum; None where answers have no
            known length.
        streams: (cap or None, number of prompts) of those that are read as streams. chunk: tokens of a stream's chunk; places: at
        which a stream is asked, each a copy of its cache.
        batch: sequences decoded together; together: their prompts are prefilled in one pass, not one by one.
        state_reads: times that the states of layers that are not compressed are read, once for each cell and step.
    """

    dataset: str
    length: PromptLength
    new_tokens: int | None
    cells: Sequence[Cell]
    prefills: Mapping[int, int]
    weight_reads: float | None
    entry_reads: float | None
    batch: int = 1
    together: bool = False
    state_reads: float = 0.0
    streams: Sequence[tuple[int | None, int]] = ()
    chunk: int = 0
    places: int = 1


@dataclass(frozen=True)
class BudgetForecast:
    """One budget at one length and batch.

    Attributes:
        label: the budget, `full` without one; scope: when its methods reduce a layer (`layer`, `model`), `full`: never; `stream`:
        after every chunk.
        methods: those of it; kept: entries per KV head of a prompt; kv: bytes of the batch's caches then, windows and recurrent
            states of layers that are not compressed included.
        read: useful bytes of the first decode step; ms: the least milliseconds of it, None without a bandwidth.
        speed_up: over the full cache that the roofline allows, by bytes alone without a bandwidth; needs: bytes that the device
            must have at least.
        batch: most sequences for which the device has these bytes, None without a device memory.
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
class DatasetForecast:
    """One dataset at one length and batch. source: see `PromptLength`; sequences: decoded together; hours: None where unknown;
    chunk: tokens of a stream's chunk, 0 where nothing streams."""

    dataset: str
    tokens: int
    visual_tokens: int | None
    source: str
    new_tokens: int | None
    sequences: int
    lines: Sequence[BudgetForecast]
    prefill_hours: float | None
    decode_hours: float | None
    chunk: int = 0


@dataclass(frozen=True)
class Forecast:
    """Forecast of a plan.

    held, read: bytes of weights that the device holds and that a step reads, None where unknown; missing: sentences about what is
    not known or not counted.
    """

    given: Assumptions
    sizes: Sizes
    held: int | None
    read: int | None
    kv_per_token: int | None
    context: int | None
    datasets: Sequence[DatasetForecast]
    missing: Sequence[str]


def forecast(plan: Plan, workloads: Sequence[Workload], given: Assumptions, notes: Sequence[str] = ()) -> Forecast:
    """The forecast of a plan's workloads (`workloads_of` for a run). notes: further sentences about what is not counted."""
    sizes = model_sizes(plan.model)
    model = ModelBytes.of(sizes, plan.cells[0].dtype, plan.family)
    missing = [sizes.missing] if sizes.missing else []
    if model is None or plan.family is None:
        return Forecast(
            given, sizes, None, None, None, None, (), missing or ["the precision of the model is not known"]
        )
    if given.bandwidth is None:
        missing.append("times need a device: --bandwidth GB/s, or --measure auto, which measures this machine's")
    missing += _several_devices(plan.model.device_map, model.weights, given.memory) + _uncounted(plan.cells)
    missing += [*_unknown_chunks(workloads), *notes]
    datasets = [_dataset(workload, model, given) for workload in workloads]
    facts = model.weights, model.step_weights, model.kv_per_token, plan.family.max_context
    return Forecast(given, sizes, *facts, datasets, missing)


def workloads_of(plan: Plan, coverage: Coverage, store: Store, given: Assumptions) -> list[Workload]:
    """What a run has left to do for each dataset, at each length that its prompts are planned with.

    Raises:
        ConfigError: a prompt longer than the model's context, or with fewer tokens than visual ones.
    """
    _check(plan, given)
    if given.images:
        lengths = [prompt_length.of_images(plan, given.images)]
    else:
        lengths = [PromptLength(tokens, "given") for tokens in given.prompt_tokens]
    known = {} if lengths else prompt_length.stored_lengths(plan, store)
    workloads = []
    for part in plan.parts:
        samples = coverage.missing(part)
        for length in lengths or [known.get(part.dataset) or prompt_length.expected_length(plan, part)]:
            visual = length.visual if given.visual_tokens is None else given.visual_tokens
            workloads.append(_workload(plan, part, replace(length, visual=visual), samples))
    return workloads


def kept_entries(cell: Cell, tokens: int) -> int:
    """Entries per KV head that a cell keeps of a prompt."""
    return tokens if cell.budget is None else min(tokens, cell.budget.entries_for(tokens))


def prefills(plan: Plan, coverage: Coverage) -> int:
    """Number of prompts that a run prefills for the answers that are missing."""
    made = 0
    for part in plan.parts:
        samples = coverage.missing(part)
        documents = _documents(part, samples) if plan.answering.shares_prefill else samples
        made += samples * _passes(plan, part) + documents * len(_apart(plan, part))
    return made


def _passes(plan: Plan, part: DatasetShare) -> int:
    """Prefills of a sample: one for all cells of a protocol, and one more for each cell that prefills again; without those of
    cells that stream or converse (`_apart`)."""
    cells = [cell for cell in part.cells if not protocol(cell.protocol).apart]
    if not plan.answering.shares_prefill:
        return len(cells)
    rules = {cell.protocol: protocol(cell.protocol) for cell in cells}
    again = sum(rules[cell.protocol].prefills_again and cell.budget is not None for cell in cells)
    if plan.family is not None and plan.family.states.layers:  # states are those of one place in the prompt
        return len(rules) + again
    return len({rule.cuts for rule in rules.values()}) + again


def _apart(plan: Plan, part: DatasetShare) -> list[Cell]:
    """Cells with a prefill of their own for each document, of streams one for all places at which they are asked."""
    cells = [cell for cell in part.cells if protocol(cell.protocol).apart]
    if not plan.answering.shares_prefill:
        return cells
    return list(
        {(*_method(cell), cell.protocol, cell.seed, replace(cell.stream, ask_at=1.0)): cell for cell in cells}.values()
    )


def _method(cell: Cell) -> tuple[str, str | None, Budget | None]:
    return cell.method, cell.reading, cell.budget


def _documents(part: DatasetShare, samples: int) -> int:
    """Documents that samples ask about, where the dataset's file says how many questions one has."""
    each = part.about.get("questions") if part.spec.questions_key else None
    return samples if each is None else math.ceil(samples / float(each))


def _workload(plan: Plan, part: DatasetShare, length: PromptLength, samples: int) -> Workload:
    """One dataset's work, of which `samples` have answers to be made. A step reads the weights once for each batch of forks,
    and the entries of every cell."""
    forks = plan.answering.fork_batch if plan.answering.shares_prefill else 1
    new = json.loads(part.cells[0].generation).get("max_new_tokens") or None
    entries = sum(kept_entries(cell, length.tokens) + (new or 0) / 2 for cell in part.cells)
    steps = None if new is None else samples * int(new)
    documents = _documents(part, samples) if plan.answering.shares_prefill else samples
    apart = [cell for cell in _apart(plan, part) if protocol(cell.protocol).streams]
    streams = Counter(None if cell.budget is None else cell.budget.entries for cell in apart)
    others = documents * (len(_apart(plan, part)) - len(apart))
    return Workload(
        part.dataset,
        length,
        new,
        part.cells,
        {length.tokens: samples * _passes(plan, part) + others},
        None if steps is None else steps * -(-len(part.cells) // forks),
        None if steps is None else steps * entries,
        state_reads=(steps or 0) * len(part.cells),
        streams=[(cap, documents * count) for cap, count in streams.items()],
        chunk=_chunk(apart[0], length, plan.family) if apart else 0,
        places=len({cell.stream.ask_at for cell in part.cells}),
    )


def _chunk(cell: Cell, length: PromptLength, family: ModelFacts | None) -> int:
    """Tokens of a stream's chunk; the whole prompt where a frame's tokens are not known."""
    every = cell.stream.every
    if every is None:
        return length.tokens
    if length.visual == 0 or (family is not None and not family.multimodal):
        return min(every, length.tokens)
    if length.frames is None or length.visual is None:
        return length.tokens
    return min(every * math.ceil(length.visual / length.frames), length.tokens)


def _check(plan: Plan, given: Assumptions) -> None:
    name, family, visual = plan.model.name, plan.family, given.visual_tokens
    context = None if family is None else family.max_context
    for tokens in given.prompt_tokens:
        if context is not None and tokens > context:
            raise ConfigError(
                f"--prompt-tokens {tokens} is beyond the context of {name}, which is {context} tokens; allowed: 1 to {context}; "
                "give a shorter prompt"
            )
        if visual is not None and visual > tokens:
            raise ConfigError(
                f"--visual-tokens {visual} is more than --prompt-tokens {tokens}, of which they are a part; give fewer"
            )
    if visual and family is not None and not family.multimodal:
        raise ConfigError(f"--visual-tokens {visual}: {name} has no visual tokens; leave it out")


def _dataset(work: Workload, model: ModelBytes, given: Assumptions) -> DatasetForecast:
    prefill = decode = None
    if given.rate is not None:
        operations = sum(
            count * roofline.prefill_operations(model.decoder, tokens) for tokens, count in work.prefills.items()
        )
        for cap, count in work.streams:
            operations += count * roofline.prefill_operations(model.decoder, work.length.tokens, cap, work.chunk)
        prefill = operations / given.rate / HOUR
    if given.bandwidth is not None and work.weight_reads is not None and work.entry_reads is not None:
        read = work.weight_reads * model.step_weights + work.entry_reads * model.kv_per_token
        read += work.state_reads * model.state_bytes(work.length.tokens)
        decode = read / given.bandwidth / HOUR
    lines = [_budget(work, model, given, *group) for group in _groups(work.cells)]
    prompt = work.length.tokens, work.length.visual, work.length.source
    return DatasetForecast(work.dataset, *prompt, work.new_tokens, work.batch, lines, prefill, decode, work.chunk)


def _budget(
    work: Workload, model: ModelBytes, given: Assumptions, budget: Budget | None, scope: str, methods: Sequence[str]
) -> BudgetForecast:
    per_token, read = model.kv_per_token, model.step_weights
    tokens, batch = work.length.tokens, work.batch
    kept = tokens if budget is None else min(tokens, budget.entries_for(tokens))
    states = model.state_bytes(tokens)
    kv, full = float(kept * per_token + states), float(tokens * per_token + states)  # of one sequence
    ms = whole = None
    if given.bandwidth is not None:
        device = roofline.Roofline(model.decoder, model.itemsize, given.bandwidth, given.rate, given.device)
        ms, whole = device.step_ms(batch * kv, batch), device.step_ms(batch * full, batch)
    weights = model.weights or read

    def needs(batch: int) -> float:
        return weights + _beside_weights(work, model, scope, kept, batch)

    return BudgetForecast(
        label="full" if budget is None else str(budget),
        scope=scope,
        methods=methods,
        kept=kept,
        kv=batch * kv,
        read=roofline.step_bytes(read, kv, batch),
        ms=ms,
        speed_up=roofline.speed_up_allowed(read, full, kv, batch) if ms is None or whole is None else whole / ms,
        needs=needs(batch),
        batch=None if given.memory is None else bisect_right(range(1, _LARGEST), given.memory, key=needs),
    )


def _beside_weights(work: Workload, model: ModelBytes, scope: str, kept: int, batch: int) -> float:
    """Bytes beside the weights at the largest of three moments: when answers end; while caches that were prefilled one by one
    are joined, layer by layer, one of which is held twice; and while the last prompt is prefilled.

    That prompt holds its keys and values, of which a method of scope `layer` holds one layer whole at a time, and the tensors
    of one MLP, beside what is kept of the sequences before it. Layers that are not compressed hold their states at all of them.
    """
    decoder, states = model.decoder, model.state_bytes(work.length.tokens)
    if scope == STREAM:
        return stream_bytes(work, model, kept) + (batch - 1) * kept * model.kv_per_token
    kv, full = float(kept * model.kv_per_token), float(work.length.tokens * model.kv_per_token)  # of one sequence
    ended = kv + (work.new_tokens or 0) * model.kv_per_token
    layers = decoder.compressed
    joined = batch * (kv + ended / layers) if batch > 1 and not work.together else 0.0
    prompt = full
    if scope == "layer":
        prompt = max(kv, min(full, kv * (layers - 1) / layers + full / layers))
    prompt += work.length.tokens * (_ALIVE * decoder.intermediate + 2 * decoder.hidden) * model.itemsize
    at_once = batch if work.together else 1
    return batch * states + max(batch * ended, joined, at_once * prompt + (batch - at_once) * kv)


def stream_bytes(work: Workload, model: ModelBytes, kept: int) -> float:
    """Bytes beside the weights while a stream is read: every layer has room for what is kept and a chunk, one is held twice while
    it is cut back, and one MLP works on a chunk. An unlimited cache is never cut back."""
    capped = kept < work.length.tokens
    slots = kept + work.chunk * capped
    layers = model.decoder.compressed + capped
    held = slots * layers / model.decoder.compressed + (work.places - 1) * slots
    working = work.chunk * (_ALIVE * model.decoder.intermediate + 2 * model.decoder.hidden) * model.itemsize
    return held * model.kv_per_token + working


def _groups(cells: Sequence[Cell]) -> list[tuple[Budget | None, str, list[str]]]:
    """Budgets and scopes with their methods, `full` first."""
    groups: dict[tuple[Budget | None, str], dict[str, None]] = {}
    for cell in sorted(cells, key=lambda cell: cell.budget is not None):
        if not cell.compressor.quantises:  # see `_uncounted`
            scope = "full" if cell.budget is None else str(cell.allocation_scope)
            scope = STREAM if protocol(cell.protocol).streams else scope
            groups.setdefault((cell.budget, scope), {})[cell.method] = None
    return [(budget, scope, list(methods)) for (budget, scope), methods in groups.items()]


def _several_devices(device_map: Any, weights: int | None, memory: float | None) -> list[str]:
    """A sentence about a model that lies on several devices, or would have to."""
    if device_map is not None:
        return [
            f"model.device_map={device_map} lays layers on several devices, which work one after the other: --device-memory is "
            "of all of them together, --bandwidth and --matmul are of one"
        ]
    if weights is None or memory is None or weights < memory:
        return []
    return [
        f"the weights alone fill {math.ceil(weights / memory)} such devices or more: model.device_map=auto lays the layers on "
        "all that a process sees (CUDA_VISIBLE_DEVICES)"
    ]


def _unknown_chunks(workloads: Sequence[Workload]) -> list[str]:
    """A sentence about streams whose chunks are counted as the whole prompt."""
    names = dict.fromkeys(
        work.dataset
        for work in workloads
        if work.streams and work.chunk == work.length.tokens and work.cells[0].stream.every is not None
    )
    if not names:
        return []
    return [
        f"{', '.join(names)}: how many tokens a frame has is known from --image or stored rows; a stream's chunk is counted as "
        "the whole prompt"
    ]


def _uncounted(cells: Sequence[Cell]) -> list[str]:
    """Sentences about cells whose bytes do not follow from their budget alone."""
    quantised = dict.fromkeys(cell.method for cell in cells if cell.compressor.quantises)
    evicting = dict.fromkeys(
        cell.method for cell in cells if cell.compressor.decoding and not cell.compressor.quantises
    )
    sentences = []
    if quantised:
        sentences.append(
            f"{', '.join(quantised)}: bytes follow from bits, scales and residuals, not a budget; `plan --memory` counts them"
        )
    if evicting:
        sentences.append(f"{', '.join(evicting)}: the cache changes while decoding; numbers are of its first step")
    return sentences
