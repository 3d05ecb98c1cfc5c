"""Forecast of a plan by arithmetic from shapes: bytes, the roofline of a decode step, hours, and whether it fits.

No weights, data or torch are loaded. What is unknown then is listed in `Forecast.missing`, never counted as zero.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from mmkv_bench.errors import ConfigError
from mmkv_bench.forecast import prompt_length, roofline
from mmkv_bench.forecast.prefill_counts import Passes, passes, questions_per_document
from mmkv_bench.forecast.prompt_length import PromptLength
from mmkv_bench.forecast.roofline import ModelBytes, model_sizes

if TYPE_CHECKING:
    from mmkv_bench.compression.budget import Budget
    from mmkv_bench.families.facts import ModelFacts
    from mmkv_bench.models.shape import Sizes
    from mmkv_bench.plan.cells import Cell
    from mmkv_bench.plan.plan import Coverage, DatasetShare, Plan
    from mmkv_bench.store.store import Store

HOUR = 3600.0
LARGEST_BATCH = 1 << 24
"""Largest batch that a search considers."""
STREAM = "stream"
_ALIVE = 3  # tensors [tokens, intermediate] that an eager MLP holds at once


@dataclass(frozen=True)
class Assumptions:
    """What a forecast assumes about prompts and device, given by the user or measured before. None or empty means unknown.

    Attributes:
        prompt_tokens: prompt lengths to plan for.
        visual_tokens: visual tokens of each prompt.
        images: width and height in pixels of a prompt's images; the images and a question then determine the prompt's length.
        memory: memory of the device [bytes].
        bandwidth: memory bandwidth of the device [bytes/s].
        rate: rate of the device [operations/s].
        device: name of the device.
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
    """The work that a plan has on prompts of one length.

    Attributes:
        length: length of each prompt.
        new_tokens: most tokens of an answer; None if unknown.
        cells: cells (methods at their budgets) that answer the prompts.
        prefills: tokens of a prompt -> number of such prompts to prefill.
        fed: (tokens, entries before them) -> number of pieces of this size that are fed after a prefill. A piece is a chunk
            of a context that is fed again, or a turn of a conversation.
        weight_reads: number of times that decoding reads the weights; None if the length of answers is unknown.
        entry_reads: number of cache entries that decoding reads; None if the length of answers is unknown.
        streams: pairs (cap, number of prompts), for prompts that are read as streams. The cap is None without a limit.
        chunk: tokens of a stream's chunk.
        ask_at: shares of a stream after which questions are asked, ascending. The cache is copied at each share but the last.
            The stream after the last share is never read.
        batch: number of sequences decoded together.
        together: whether the prompts of a batch are prefilled in one pass, not one by one.
        state_reads: number of times that the states of uncompressed layers are read, once per cell and step.
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
    fed: Mapping[tuple[int, int], int] = field(default_factory=dict)
    streams: Sequence[tuple[int | None, int]] = ()
    chunk: int = 0
    ask_at: Sequence[float] = (1.0,)


@dataclass(frozen=True)
class BudgetForecast:
    """The forecast for methods with one budget, at one prompt length and batch size.

    Attributes:
        label: the budget, or `full`.
        scope: when methods compress: after each `layer`, after the whole `model`, after each chunk of a `stream`, or never
            (`full`).
        methods: methods with this budget and scope.
        kept: entries per KV head kept of a prompt.
        kv: bytes of the batch's caches after compression, with windows and recurrent states of uncompressed layers.
        read: useful bytes of the first decode step.
        ms: least milliseconds of that step; None without a bandwidth.
        speed_up: speed-up over the full cache that the roofline allows; without a bandwidth, by bytes alone.
        needs: bytes that the device must have at least.
        batch: most sequences that fit into the device's memory; None if unknown.
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
    """The forecast for one dataset, at one prompt length and batch size.

    source: source of the prompt length, see `PromptLength`.
    sequences: number of sequences decoded together.
    prefill_hours, decode_hours: None if unknown.
    chunk: tokens of a stream's chunk; 0 without streams.
    """

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
    """The forecast for a plan: memory, decode times and hours of each dataset.

    held: bytes of weights on the device; None if unknown.
    read: bytes of weights that a decode step reads; None if unknown.
    missing: sentences about what is unknown or not counted.
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
    """Compute the forecast for a plan: bytes, least decode times and hours of each workload.

    workloads: the work on prompts of each length, from `workloads_of` for a run.
    given: what is assumed about prompts and device.
    notes: extra sentences about what is not counted.
    """
    sizes = model_sizes(plan.model)
    model = ModelBytes.of(sizes, plan.cells[0].dtype, plan.family)
    missing = [sizes.missing] if sizes.missing else []
    if model is None or plan.family is None:
        return Forecast(given, sizes, None, None, None, None, (), missing or ["the model's precision is unknown"])
    if given.bandwidth is None:
        missing.append("times need a device; give --bandwidth GB/s, or --measure auto, which measures this machine")
    missing += _several_devices(plan.model.device_map, model.weights, given.memory) + _uncounted(plan.cells)
    missing += [*_unknown_chunks(workloads), *notes]
    datasets = [_dataset(workload, model, given) for workload in workloads]
    facts = model.weights, model.step_weights, model.kv_per_token, plan.family.max_context
    return Forecast(given, sizes, *facts, datasets, missing)


def workloads_of(plan: Plan, coverage: Coverage, store: Store, given: Assumptions) -> list[Workload]:
    """Return the work that a run still has to do: one workload for each dataset and planned prompt length.

    coverage: which answers are stored.

    Raises ConfigError: a prompt is longer than the model's context, or has fewer tokens than visual tokens.
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


def kept_entries(budget: Budget | None, tokens: int) -> int:
    """Return the number of entries per KV head that a budget keeps of a prompt with `tokens` tokens. None stands for the full
    cache."""
    return tokens if budget is None else min(tokens, budget.entries_for(tokens))


def prefills(plan: Plan, coverage: Coverage) -> int:
    """Return the number of prompts that a run must prefill to generate the missing answers."""
    made = [passes(plan, part, coverage.missing(part)) for part in plan.parts]
    return sum(each.prefills + sum(each.streams.values()) for each in made)


def _workload(plan: Plan, part: DatasetShare, length: PromptLength, samples: int) -> Workload:
    """Return the work on one dataset with `samples` samples to answer, for prompts of one length.

    Cells that share a prefill decode in batches of `fork_batch`, with all questions of a document if the questions share a
    prefill. A step reads the weights once per batch, and the entries of every cell.
    """
    forks = plan.answering.fork_batch if plan.answering.shares_prefill else 1
    new = json.loads(part.cells[0].generation).get("max_new_tokens") or None
    made = passes(plan, part, samples)
    # A lower bound on a question and its answer: without pictures a question's length is unknown and counts as 0.
    turn = (length.tokens - length.visual if length.visual else 0) + (new or 0)
    questions = questions_per_document(part) or 1.0
    size = questions if plan.answering.shares_prefill else 1.0
    earlier = questions / 2 - 0.5  # mean number of earlier turns
    entries = 0.0
    for cell in part.cells:
        grown = earlier * turn if cell in made.turns and cell.budget is None else 0.0
        read = math.ceil(length.tokens * (cell.stream.ask_at if cell.rule.streams else 1.0))
        entries += min(kept_entries(cell.budget, length.tokens), read) + grown + (new or 0) / 2
    alone = sum(cell.rule.apart for cell in part.cells)
    once = sum(size > 1 and cell.rule.serves_all_questions(reads_answer=False) for cell in part.cells)
    batches = math.ceil((len(part.cells) - alone - once) / forks) + math.ceil(once * size / forks) / size
    steps = None if new is None else samples * int(new)
    streaming = [cell for cell in part.cells if cell.rule.streams]
    return Workload(
        part.dataset,
        length,
        new,
        part.cells,
        {length.tokens: made.prefills},
        None if steps is None else math.ceil(steps * (batches + alone)),
        None if steps is None else steps * entries,
        state_reads=(steps or 0) * len(part.cells),
        fed=_fed(made, length, turn),
        streams=list(made.streams.items()),
        chunk=_chunk(streaming[0], length, plan.family) if streaming else 0,
        ask_at=sorted({cell.stream.ask_at for cell in streaming}) or (1.0,),
    )


def _fed(made: Passes, length: PromptLength, turn: int) -> Mapping[tuple[int, int], int]:
    """Return `Workload.fed`: (tokens, entries before them) -> number of pieces fed after a prefill.

    made: number of contexts and turns that are fed again.
    turn: tokens of a conversation's turn.
    """
    fed: Counter[tuple[int, int]] = Counter()
    for cell, count in made.replays.items():
        chunk = int(json.loads(cell.parameters).get("chunk") or length.tokens)
        whole, rest = divmod(length.tokens, chunk)
        fed[chunk, length.tokens] += count * whole
        fed[rest, length.tokens] += count * bool(rest)
    for cell, count in made.turns.items():
        fed[turn, kept_entries(cell.budget, length.tokens)] += count
    return {piece: count for piece, count in fed.items() if count and piece[0]}


def _chunk(cell: Cell, length: PromptLength, family: ModelFacts | None) -> int:
    """Return the number of tokens of a stream's chunk. If the tokens of a frame are unknown, it is the whole prompt."""
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
                f"--visual-tokens {visual} exceeds --prompt-tokens {tokens}, which includes visual tokens; give fewer"
            )
    if visual and family is not None and not family.multimodal:
        raise ConfigError(f"--visual-tokens {visual}: {name} has no visual tokens; leave it out")


def _dataset(work: Workload, model: ModelBytes, given: Assumptions) -> DatasetForecast:
    prefill = decode = None
    if given.rate is not None:
        operations = sum(
            count * roofline.prefill_operations(model.decoder, tokens) for tokens, count in work.prefills.items()
        )
        operations += sum(count * roofline.fed_operations(model.decoder, *piece) for piece, count in work.fed.items())
        for cap, count in work.streams:
            tokens = math.ceil(work.ask_at[-1] * work.length.tokens)
            operations += count * roofline.prefill_operations(model.decoder, tokens, cap, work.chunk)
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
    kept = kept_entries(budget, tokens)
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
        batch=None if given.memory is None else bisect_right(range(1, LARGEST_BATCH), given.memory, key=needs),
    )


def _beside_weights(work: Workload, model: ModelBytes, scope: str, kept: int, batch: int) -> float:
    """Return the memory that a batch needs in addition to the weights [bytes].

    It is the largest of three moments: the end of the answers; the joining of caches that were prefilled one by one, layer by
        layer, with one layer held twice; the prefill of the last prompt. The last prompt holds its keys and values (with a
        method of scope `layer`, of one layer at a time) and the tensors of one MLP, in addition to the kept entries of
        earlier sequences. Uncompressed layers hold their states at all times.

    scope: when the method compresses, see `BudgetForecast`.
    kept: entries per KV head kept of a prompt.
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
    """Return the memory that reading a stream needs in addition to the weights [bytes].

    Every layer has slots for the kept entries and a chunk, one layer is copied while entries are evicted, and one MLP works
    on a chunk. Without a cap nothing is evicted. Questions before the stream's end are answered from copies of the cache.

    kept: entries per KV head under the stream's cap.
    """
    capped = kept < work.length.tokens
    *copies, slots = (min(kept, math.ceil(share * work.length.tokens)) + work.chunk * capped for share in work.ask_at)
    layers = model.decoder.compressed + capped
    held = slots * layers / model.decoder.compressed + sum(copies)
    working = work.chunk * (_ALIVE * model.decoder.intermediate + 2 * model.decoder.hidden) * model.itemsize
    return held * model.kv_per_token + working


def _groups(cells: Sequence[Cell]) -> list[tuple[Budget | None, str, list[str]]]:
    """Group cells by budget and scope (when a method compresses). Return (budget, scope, methods' names) per group, `full`
    first."""
    groups: dict[tuple[Budget | None, str], dict[str, None]] = {}
    for cell in sorted(cells, key=lambda cell: cell.budget is not None):
        if not cell.compressor.quantises:  # see `_uncounted`
            unstreamed = "full" if cell.budget is None else str(cell.allocation_scope)
            scope = STREAM if cell.rule.streams else unstreamed
            groups.setdefault((cell.budget, scope), {})[cell.method] = None
    return [(budget, scope, list(methods)) for (budget, scope), methods in groups.items()]


def _several_devices(device_map: Any, weights: int | None, memory: float | None) -> list[str]:
    """Return a sentence if the model is spread over several devices, or must be because its weights exceed one. Else nothing.

    weights: bytes of all weights.
    memory: bytes of one device.
    """
    if device_map is not None:
        return [
            f"model.device_map={device_map} lays layers on several devices, which work one after the other: --device-memory is "
            "the sum of all these devices, --bandwidth and --matmul are those of one"
        ]
    if weights is None or memory is None or weights < memory:
        return []
    return [
        f"the weights alone fill {math.ceil(weights / memory)} such devices or more: model.device_map=auto spreads the layers "
        "over all devices that a process sees (CUDA_VISIBLE_DEVICES)"
    ]


def _unknown_chunks(workloads: Sequence[Workload]) -> list[str]:
    """Return a sentence if a stream's chunk is counted as the whole prompt because its size is unknown. Else nothing."""
    whole = [work for work in workloads if work.streams and work.chunk == work.length.tokens]
    names = dict.fromkeys(work.dataset for work in whole if all(cell.stream.every is not None for cell in work.cells))
    sentence = (
        f"{', '.join(names)}: the tokens of a frame are unknown without --image or stored rows, so a stream's chunk is counted "
        "as the whole prompt"
    )
    return [sentence] if names else []


def _uncounted(cells: Sequence[Cell]) -> list[str]:
    """Return sentences about cells whose memory does not follow from their budget alone."""
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
