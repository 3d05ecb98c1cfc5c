"""Forecast of a plan by arithmetic from shapes: bytes, the roofline of a decode step, hours, and what fits into
memory.

No weights, data or torch are loaded. Unknown parts are listed in `Forecast.missing`, never counted as zero.
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
_LIVE_MLP_TENSORS = 3  # tensors [tokens, intermediate] that an eager MLP holds at once


@dataclass(frozen=True)
class Assumptions:
    """Assumptions about prompts and device, given by the user or measured before. None or empty means unknown.

    Attributes:
        prompt_tokens: prompt lengths to plan for.
        visual_tokens: visual tokens of each prompt.
        images: width and height in pixels of a prompt's images; with a question they determine the prompt's length.
        memory, bandwidth, rate: of the device, in bytes, bytes/s and operations/s.
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
    """The work of a plan on prompts of one length.

    Attributes:
        length: length of each prompt.
        new_tokens: most tokens of an answer; None if unknown.
        cells: (method, budget) settings that answer the prompts.
        prefills: tokens of a prompt -> number of such prompts to prefill.
        fed: (tokens, entries before them) -> number of pieces of this size that are fed after a prefill. A piece is a
            chunk of a context that is fed again, or a turn of a conversation.
        weight_reads: number of times that decoding reads the weights; None if the length of answers is unknown.
        entry_reads: number of cache entries that decoding reads; None if the length of answers is unknown.
        streams: pairs (cap, number of prompts), for prompts that are read as streams. The cap is None without a limit.
        chunk: tokens of a stream's chunk.
        ask_at: shares of a stream after which questions are asked, ascending. The cache is copied at each share but the
            last. The stream after the last share is never read.
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
        scope: when methods compress: after each `layer`, after the whole `model`, after each chunk of a `stream`, or
            never (`full`).
        kept: entries per KV head kept of a prompt.
        kv: bytes of the batch's caches after compression, with windows and recurrent states of uncompressed layers.
        read, ms: useful bytes and least milliseconds of the first decode step; no time without a bandwidth.
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

    source: source of the prompt length, see `PromptLength`. sequences: number of sequences decoded together.
    prefill_hours, decode_hours: None if unknown. chunk: tokens of a stream's chunk; 0 without streams.
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
    """The forecast for a plan. held, read: bytes of weights on the device, and read by a decode step; None if unknown.

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
    """Compute bytes, least decode times and hours of each workload of a plan.

    workloads: from `workloads_of` for a run. notes: further sentences about what is not counted.
    """
    sizes_of_model = model_sizes(plan.model)
    model = ModelBytes.of(sizes_of_model, plan.cells[0].dtype, plan.family)
    missing_sentences = [sizes_of_model.missing] if sizes_of_model.missing else []
    if model is None or plan.family is None:
        return Forecast(
            given, sizes_of_model, None, None, None, None, (), missing_sentences or ["the model's precision is unknown"]
        )
    if given.bandwidth is None:
        missing_sentences.append(
            "times need a device; give --bandwidth GB/s, or --measure auto, which measures this machine"
        )
    missing_sentences += _several_devices(plan.model.device_map, model.weights, given.memory) + _uncounted_memory(
        plan.cells
    )
    missing_sentences += [*_unknown_chunks(workloads), *notes]
    datasets = [_dataset(workload, model, given) for workload in workloads]
    model_numbers = model.weights, model.step_weights, model.kv_per_token, plan.family.max_context
    return Forecast(given, sizes_of_model, *model_numbers, datasets, missing_sentences)


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
    stored_length_by_dataset = {} if lengths else prompt_length.stored_lengths(plan, store)
    workloads = []
    for part in plan.parts:
        samples = coverage.missing(part)
        for length in lengths or [
            stored_length_by_dataset.get(part.dataset) or prompt_length.expected_length(plan, part)
        ]:
            visual_tokens = length.visual if given.visual_tokens is None else given.visual_tokens
            workloads.append(_workload(plan, part, replace(length, visual=visual_tokens), samples))
    return workloads


def kept_entries(budget: Budget | None, tokens: int) -> int:
    """Return the number of entries per KV head that a budget keeps of `tokens` tokens. None: the full cache."""
    return tokens if budget is None else min(tokens, budget.entries_for(tokens))


def prefills(plan: Plan, coverage: Coverage) -> int:
    """Return the number of prompts that a run must prefill to generate the missing answers."""
    passes_by_dataset = [passes(plan, part, coverage.missing(part)) for part in plan.parts]
    return sum(each.prefills + sum(each.streams.values()) for each in passes_by_dataset)


def _workload(plan: Plan, part: DatasetShare, length: PromptLength, samples: int) -> Workload:
    """Return the work on one dataset with `samples` samples to answer, for prompts of one length.

    Cells that share a prefill decode in batches of `fork_batch`, with all questions of a document if the questions
    share a prefill. A step reads the weights once per batch, and the entries of every cell.
    """
    cells_per_batch = plan.answering.fork_batch if plan.answering.shares_prefill else 1
    new_tokens = json.loads(part.cells[0].generation).get("max_new_tokens") or None
    pass_counts = passes(plan, part, samples)
    # A lower bound on a question and its answer: without pictures a question's length is unknown and counts as 0.
    turn_tokens = (length.tokens - length.visual if length.visual else 0) + (new_tokens or 0)
    questions_of_document = questions_per_document(part) or 1.0
    questions_per_prefill = questions_of_document if plan.answering.shares_prefill else 1.0
    mean_earlier_turns = questions_of_document / 2 - 0.5  # mean number of earlier turns
    entries_per_step = 0.0
    for cell in part.cells:
        entries_of_earlier_turns = (
            mean_earlier_turns * turn_tokens if cell in pass_counts.turns and cell.budget is None else 0.0
        )
        tokens_read = math.ceil(length.tokens * (cell.stream.ask_at if cell.rule.streams else 1.0))
        entries_per_step += (
            min(kept_entries(cell.budget, length.tokens), tokens_read)
            + entries_of_earlier_turns
            + (new_tokens or 0) / 2
        )
    cells_with_own_prefill = sum(cell.rule.apart for cell in part.cells)
    cells_for_all_questions = sum(
        questions_per_prefill > 1 and cell.rule.serves_all_questions(reads_answer=False) for cell in part.cells
    )
    batches_per_step = (
        math.ceil((len(part.cells) - cells_with_own_prefill - cells_for_all_questions) / cells_per_batch)
        + math.ceil(cells_for_all_questions * questions_per_prefill / cells_per_batch) / questions_per_prefill
    )
    decode_steps = None if new_tokens is None else samples * int(new_tokens)
    streaming_cells = [cell for cell in part.cells if cell.rule.streams]
    return Workload(
        part.dataset,
        length,
        new_tokens,
        part.cells,
        {length.tokens: pass_counts.prefills},
        None if decode_steps is None else math.ceil(decode_steps * (batches_per_step + cells_with_own_prefill)),
        None if decode_steps is None else decode_steps * entries_per_step,
        state_reads=(decode_steps or 0) * len(part.cells),
        fed=_fed_pieces(pass_counts, length, turn_tokens),
        streams=list(pass_counts.streams.items()),
        chunk=_chunk(streaming_cells[0], length, plan.family) if streaming_cells else 0,
        ask_at=sorted({cell.stream.ask_at for cell in streaming_cells}) or (1.0,),
    )


def _fed_pieces(made: Passes, length: PromptLength, turn: int) -> Mapping[tuple[int, int], int]:
    """Return `Workload.fed`. turn: tokens of a conversation's turn."""
    pieces_by_size: Counter[tuple[int, int]] = Counter()
    for cell, count in made.replays.items():
        chunk_tokens = int(json.loads(cell.parameters).get("chunk") or length.tokens)
        whole_chunks, remaining_tokens = divmod(length.tokens, chunk_tokens)
        pieces_by_size[chunk_tokens, length.tokens] += count * whole_chunks
        pieces_by_size[remaining_tokens, length.tokens] += count * bool(remaining_tokens)
    for cell, count in made.turns.items():
        pieces_by_size[turn, kept_entries(cell.budget, length.tokens)] += count
    return {piece: count for piece, count in pieces_by_size.items() if count and piece[0]}


def _chunk(cell: Cell, length: PromptLength, family: ModelFacts | None) -> int:
    """Return the tokens of a stream's chunk: the whole prompt if `every` is None or a frame's tokens are unknown."""
    frames_per_chunk = cell.stream.every
    if frames_per_chunk is None:
        return length.tokens
    if length.visual == 0 or (family is not None and not family.multimodal):
        return min(frames_per_chunk, length.tokens)
    if length.frames is None or length.visual is None:
        return length.tokens
    return min(frames_per_chunk * math.ceil(length.visual / length.frames), length.tokens)


def _check(plan: Plan, given: Assumptions) -> None:
    name, family, visual_tokens = plan.model.name, plan.family, given.visual_tokens
    max_context = None if family is None else family.max_context
    for tokens in given.prompt_tokens:
        if max_context is not None and tokens > max_context:
            raise ConfigError(
                f"--prompt-tokens {tokens} is beyond the context of {name}, which is {max_context} tokens; allowed: 1 "
                f"to {max_context}; "
                "give a shorter prompt"
            )
        if visual_tokens is not None and visual_tokens > tokens:
            raise ConfigError(
                f"--visual-tokens {visual_tokens} exceeds --prompt-tokens {tokens}, which includes visual tokens; give fewer"
            )
    if visual_tokens and family is not None and not family.multimodal:
        raise ConfigError(f"--visual-tokens {visual_tokens}: {name} has no visual tokens; leave it out")


def _dataset(work: Workload, model: ModelBytes, given: Assumptions) -> DatasetForecast:
    prefill_hours = decode_hours = None
    if given.rate is not None:
        operations = sum(
            count * roofline.prefill_operations(model.decoder, tokens) for tokens, count in work.prefills.items()
        )
        operations += sum(count * roofline.fed_operations(model.decoder, *piece) for piece, count in work.fed.items())
        for cap, count in work.streams:
            tokens = math.ceil(work.ask_at[-1] * work.length.tokens)
            operations += count * roofline.prefill_operations(model.decoder, tokens, cap, work.chunk)
        prefill_hours = operations / given.rate / HOUR
    if given.bandwidth is not None and work.weight_reads is not None and work.entry_reads is not None:
        bytes_read = work.weight_reads * model.step_weights + work.entry_reads * model.kv_per_token
        bytes_read += work.state_reads * model.state_bytes(work.length.tokens)
        decode_hours = bytes_read / given.bandwidth / HOUR
    lines = [_budget(work, model, given, *group) for group in _groups(work.cells)]
    prompt_facts = work.length.tokens, work.length.visual, work.length.source
    return DatasetForecast(
        work.dataset, *prompt_facts, work.new_tokens, work.batch, lines, prefill_hours, decode_hours, work.chunk
    )


def _budget(
    work: Workload, model: ModelBytes, given: Assumptions, budget: Budget | None, scope: str, methods: Sequence[str]
) -> BudgetForecast:
    kv_bytes_per_token, weight_bytes_read = model.kv_per_token, model.step_weights
    tokens, batch = work.length.tokens, work.batch
    kept = kept_entries(budget, tokens)
    state_bytes = model.state_bytes(tokens)
    kept_kv_bytes = float(kept * kv_bytes_per_token + state_bytes)  # of one sequence
    full_kv_bytes = float(tokens * kv_bytes_per_token + state_bytes)
    step_ms = full_step_ms = None
    if given.bandwidth is not None:
        device_roofline = roofline.Roofline(model.decoder, model.itemsize, given.bandwidth, given.rate, given.device)
        step_ms = device_roofline.step_ms(batch * kept_kv_bytes, batch)
        full_step_ms = device_roofline.step_ms(batch * full_kv_bytes, batch)
    weight_bytes = model.weights or weight_bytes_read

    def needs(batch: int) -> float:
        return weight_bytes + _bytes_beside_weights(work, model, scope, kept, batch)

    return BudgetForecast(
        label="full" if budget is None else str(budget),
        scope=scope,
        methods=methods,
        kept=kept,
        kv=batch * kept_kv_bytes,
        read=roofline.step_bytes(weight_bytes_read, kept_kv_bytes, batch),
        ms=step_ms,
        speed_up=roofline.speed_up_allowed(weight_bytes_read, full_kv_bytes, kept_kv_bytes, batch)
        if step_ms is None or full_step_ms is None
        else full_step_ms / step_ms,
        needs=needs(batch),
        batch=None if given.memory is None else bisect_right(range(1, LARGEST_BATCH), given.memory, key=needs),
    )


def _bytes_beside_weights(work: Workload, model: ModelBytes, scope: str, kept: int, batch: int) -> float:
    """Return the memory that a batch needs in addition to the weights [bytes].

    This is the largest of three moments. At the end of the answers, all caches are at their largest. When caches that
    were prefilled one by one are joined layer by layer, one layer is held twice. The prefill of the last prompt holds
    its keys and values (for scope `layer`, of one layer at a time), the tensors of one MLP, and the kept entries of
    earlier sequences. Uncompressed layers hold their states at all times.

    scope: when the method compresses, see `BudgetForecast`. kept: entries per KV head kept of a prompt.
    """
    decoder, state_bytes = model.decoder, model.state_bytes(work.length.tokens)
    if scope == STREAM:
        return stream_bytes(work, model, kept) + (batch - 1) * kept * model.kv_per_token
    kept_kv_bytes = float(kept * model.kv_per_token)  # of one sequence
    full_kv_bytes = float(work.length.tokens * model.kv_per_token)
    final_kv_bytes = kept_kv_bytes + (work.new_tokens or 0) * model.kv_per_token
    layers = decoder.compressed
    joining_bytes = batch * (kept_kv_bytes + final_kv_bytes / layers) if batch > 1 and not work.together else 0.0
    prefill_bytes = full_kv_bytes
    if scope == "layer":
        prefill_bytes = max(
            kept_kv_bytes, min(full_kv_bytes, kept_kv_bytes * (layers - 1) / layers + full_kv_bytes / layers)
        )
    prefill_bytes += (
        work.length.tokens * (_LIVE_MLP_TENSORS * decoder.intermediate + 2 * decoder.hidden) * model.itemsize
    )
    prompts_at_once = batch if work.together else 1
    return batch * state_bytes + max(
        batch * final_kv_bytes,
        joining_bytes,
        prompts_at_once * prefill_bytes + (batch - prompts_at_once) * kept_kv_bytes,
    )


def stream_bytes(work: Workload, model: ModelBytes, kept: int) -> float:
    """Return the memory that reading a stream needs in addition to the weights [bytes].

    Every layer has slots for the kept entries and a chunk, one layer is copied while entries are evicted, and one MLP
    works on a chunk. Without a cap nothing is evicted. Questions before the stream's end are answered from copies of
    the cache.

    kept: entries per KV head under the stream's cap.
    """
    is_capped = kept < work.length.tokens
    *entries_of_copies, entry_slots = (
        min(kept, math.ceil(share * work.length.tokens)) + work.chunk * is_capped for share in work.ask_at
    )
    layers_with_copy = model.decoder.compressed + is_capped
    entries_of_all_layers = entry_slots * layers_with_copy / model.decoder.compressed + sum(entries_of_copies)
    mlp_bytes = (
        work.chunk * (_LIVE_MLP_TENSORS * model.decoder.intermediate + 2 * model.decoder.hidden) * model.itemsize
    )
    return entries_of_all_layers * model.kv_per_token + mlp_bytes


def _groups(cells: Sequence[Cell]) -> list[tuple[Budget | None, str, list[str]]]:
    """Group cells by budget and scope, `full` first, without quantising methods. Return (budget, scope, methods'
    names)."""
    groups: dict[tuple[Budget | None, str], dict[str, None]] = {}
    for cell in sorted(cells, key=lambda cell: cell.budget is not None):
        if not cell.compressor.quantises:  # see `_uncounted_memory`
            unstreamed = "full" if cell.budget is None else str(cell.allocation_scope)
            scope = STREAM if cell.rule.streams else unstreamed
            groups.setdefault((cell.budget, scope), {})[cell.method] = None
    return [(budget, scope, list(methods)) for (budget, scope), methods in groups.items()]


def _several_devices(device_map: Any, weights: int | None, memory: float | None) -> list[str]:
    """Return a sentence if the model is, or must be, on several devices. weights: all bytes. memory: bytes of one
    device."""
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
    unchunked_workloads = [work for work in workloads if work.streams and work.chunk == work.length.tokens]
    unchunked_datasets = dict.fromkeys(
        work.dataset for work in unchunked_workloads if all(cell.stream.every is not None for cell in work.cells)
    )
    sentence = (
        f"{', '.join(unchunked_datasets)}: the tokens of a frame are unknown without --image or stored rows, "
        "so a stream's chunk is counted "
        "as the whole prompt"
    )
    return [sentence] if unchunked_datasets else []


def _uncounted_memory(cells: Sequence[Cell]) -> list[str]:
    quantising_methods = dict.fromkeys(cell.method for cell in cells if cell.compressor.quantises)
    decode_evicting_methods = dict.fromkeys(
        cell.method for cell in cells if cell.compressor.decoding and not cell.compressor.quantises
    )
    sentences = []
    if quantising_methods:
        sentences.append(
            f"{', '.join(quantising_methods)}: bytes follow from bits, scales and residuals, not a budget; `plan "
            "--memory` counts them"
        )
    if decode_evicting_methods:
        sentences.append(
            f"{', '.join(decode_evicting_methods)}: the cache changes while decoding; numbers are of its first step"
        )
    return sentences
