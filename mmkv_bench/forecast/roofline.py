"""Roofline of a model on a device: bytes and operations of a decode step and of a prefill, and their least time.

A decode step reads each used weight of the text model once for the whole batch, and the keys and values of each
sequence once. It does not use the vision tower. Of an embedding table that is not tied to the head it reads one row per
token. Each step reads sliding windows and recurrent states completely. Bytes that kernels read twice, write, or pad are
not useful bytes.

Units: bytes, seconds, operations (one multiplication and one addition are two), bytes or operations per second;
milliseconds if a name says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv_bench.errors import MMKVError
from mmkv_bench.families.facts import ITEMSIZE, kv_bytes_per_token, stated
from mmkv_bench.models.files import cached_folder
from mmkv_bench.models.shape import Decoder, Sizes, decoder_of, sizes_of, values_of
from mmkv_bench.models.source import FOLDER, HUB, RANDOM, Source
from mmkv_bench.text_columns import size

if TYPE_CHECKING:
    import pyarrow as pa

    from mmkv_bench.families.facts import ModelFacts
    from mmkv_bench.forecast.device_speed import DeviceSpeed
    from mmkv_bench.plan.plan import Plan
    from mmkv_bench.store.store import Store

MS = 1000.0
_KEY_COLUMNS = ("model", "model_fingerprint", "dtype", "device")
"""Columns of a cell that determine its roofline; models of the same name may differ in their layers."""
_SOURCE_CLAUSES = {
    "files": "counted in its files",
    "stated": "as its repository states",
    "shape": "from its shape",
    "bound": "at most, a share of the whole model's",
}


@dataclass(frozen=True)
class ModelBytes:
    """Sizes of a model that is not loaded [bytes].

    Attributes:
        itemsize: bytes of a number.
        weights: bytes of all parameters; None if their number is unknown.
        step_weights: bytes of weights that a decode step reads.
        kv_per_token: bytes of a token's keys and values in the compressed layers.
    """

    decoder: Decoder
    itemsize: int
    weights: int | None
    step_weights: int
    kv_per_token: int

    def state_bytes(self, tokens: int) -> int:
        """Return the bytes of one sequence's sliding windows, convolutions and recurrent states, after `tokens` tokens."""
        return self.decoder.states.nbytes(tokens, self.decoder.entry, self.itemsize)

    @classmethod
    def of(cls, sizes: Sizes, dtype: str, family: ModelFacts | None) -> ModelBytes | None:
        """Compute the bytes from a model's sizes; None if its shape or dtype is unknown."""
        itemsize, decoder = ITEMSIZE.get(dtype), sizes.decoder
        if decoder is None or itemsize is None or family is None:
            return None
        weight_bytes = None if sizes.parameters is None else sizes.parameters * itemsize
        return cls(decoder, itemsize, weight_bytes, decoder.read * itemsize, kv_bytes_per_token(family, dtype))


def model_sizes(model: Any) -> Sizes:
    """Return the sizes of a model from its files. model: the `model` node of a configuration."""
    source = Source.of(model)
    folder: str | Path | None = source.place if source.kind == FOLDER else None
    if source.kind == HUB:
        folder = cached_folder(source.place, model.revision)
    full_config = stated(values_of(model.shape)) if model.layers is not None and model.shape else None
    return sizes_of(vars(model), source.described_here(), full_config, folder)


def weights_text(plan: Plan, loaded: int | None = None) -> str:
    """Return the size of a model's weights, as `3.136 MiB weights (counted in its files), 2.313 MiB read by a decode
    step`.

    loaded: bytes of all parameters, if the model is loaded.
    """
    model, sizes = plan.model, model_sizes(plan.model)
    model_bytes = ModelBytes.of(sizes, plan.cells[0].dtype, plan.family)
    weights = model_bytes.weights if loaded is None and model_bytes is not None else loaded
    step_part = f", {size(model_bytes.step_weights)} read by a decode step" if model_bytes else ""
    if Source.of(model).kind == RANDOM:
        return f"{size(weights) + ' ' if weights else ''}random weights (answers mean nothing: speed and memory only){step_part}"
    if weights is None:
        return "weights of unknown size"
    source_clause = f" ({_SOURCE_CLAUSES[sizes.source]})" if loaded is None and sizes.source else ""
    return f"{size(weights)} weights{source_clause}{step_part}"


# ---------------------------------------------------------------------- limits
def step_bytes(weights: float, kv: float, batch: int = 1) -> float:
    """Return the bytes that one decode step must read: the weights once, and the KV cache of every sequence.

    weights: bytes of the weights that a step reads. kv: bytes of keys and values of ONE sequence.
    """
    return weights + batch * kv


def step_operations(decoder: Decoder, entries: float, batch: int = 1) -> float:
    """Return the operations of one decode step: weight matrices and head, cache entries, and recurrent states.

    entries: mean entries per KV head and layer with attention, of one sequence (`Decoder.mean_entries`).
    """
    weight_operations = 2 * (decoder.multiplied + decoder.table) + _recurrent_operations(decoder)
    return batch * (weight_operations + 4 * sum(one.count * one.queries for one in decoder.shapes) * entries)


def prefill_operations(decoder: Decoder, tokens: int, cap: int | None = None, chunk: int | None = None) -> float:
    """Return the text model's operations for the prefill of a prompt, with the logits of the last token only.

    cap, chunk: of a stream, which is read in chunks of `chunk` tokens; a KV head keeps at most `cap` entries after
    each.
    """
    unattended_pairs = tokens * (tokens + 1) // 2 - stream_pairs(
        tokens, tokens if cap is None else cap, chunk or tokens
    )
    saved_operations = 4 * decoder.queries(near=False) * unattended_pairs
    return fed_operations(decoder, tokens, 0) - saved_operations + last_operations(decoder, tokens)


def last_operations(decoder: Decoder, tokens: int) -> float:
    """Return the operations of a prefill for its last token only: logits, and layers that reuse other layers' keys."""
    query_key_pairs = decoder.queries(False, True) * tokens + decoder.queries(True, True) * min(
        tokens, decoder.states.window + 1
    )
    return 2 * (decoder.multiplied - decoder.prefilled + decoder.table) + 4 * query_key_pairs


def fed_operations(decoder: Decoder, tokens: int, before: int) -> float:
    """Return the operations for `tokens` tokens fed behind `before` entries per KV head, without `last_operations`."""
    window = decoder.states.window + 1
    # Number of tokens whose window begins before the first stored entry.
    tokens_in_first_window = min(tokens, max(window - before, 0))
    query_key_pairs = decoder.queries(near=False) * (tokens * before + tokens * (tokens + 1) // 2)
    query_key_pairs += decoder.queries(near=True) * (
        tokens_in_first_window * before
        + tokens_in_first_window * (tokens_in_first_window + 1) // 2
        + (tokens - tokens_in_first_window) * window
    )
    return tokens * (2 * decoder.prefilled + _recurrent_operations(decoder)) + 4 * query_key_pairs


def stream_pairs(tokens: int, cap: int, chunk: int) -> int:
    """Return the number of (query, key) pairs in one layer and head while a stream is read, with each query's own key.

    chunk: tokens read at a time. cap: most entries of a KV head after each chunk.
    """
    chunk_sizes = [min(chunk, tokens - start) for start in range(0, tokens, chunk)]
    entries_before_chunk = [min(cap, number * chunk) for number in range(len(chunk_sizes))]
    return sum(
        size * before + size * (size + 1) // 2 for size, before in zip(chunk_sizes, entries_before_chunk, strict=True)
    )


def _recurrent_operations(decoder: Decoder) -> int:
    """Return the operations of one token on the recurrent states. Each state is read twice and written once."""
    return 6 * decoder.states.linear * decoder.states.recurrent


def roofline_ms(nbytes: float, bandwidth: float, operations: float = 0.0, rate: float | None = None) -> float:
    """Return the least time of a step [ms]: the longer of reading `nbytes` and of computing `operations`.

    bandwidth: bytes per second. rate: operations per second; None ignores the operations.
    """
    return MS * max(nbytes / bandwidth, operations / rate if rate else 0.0)


def speed_up_allowed(weights: float, kv_full: float, kv_kept: float, batch: int = 1) -> float:
    """Return a decode step's reading time with the full cache over that with the kept cache.

    No method at this budget and batch can exceed this speed-up if reading takes all of the time.

    weights: bytes of the weights that a step reads. kv_full, kv_kept: bytes of one sequence's cache.
    """
    return step_bytes(weights, kv_full, batch) / step_bytes(weights, kv_kept, batch)


@dataclass(frozen=True)
class Roofline:
    """Hardware limits of one model on one device.

    Attributes:
        decoder: shape of the text model.
        itemsize: bytes of a weight, and of a number in the full cache.
        bandwidth: bytes per second of a read-only pass.
        rate: operations per second in the model's dtype; None if it was not measured.
        load: load of the machine during the measurement; None if unknown.
    """

    decoder: Decoder
    itemsize: int
    bandwidth: float
    rate: float | None
    device: str
    load: float | None = None

    @property
    def weights(self) -> int:
        """Bytes of weights that a decode step reads."""
        return self.decoder.read * self.itemsize

    def step_ms(self, useful: float, batch: int = 1) -> float:
        """Return the least time of a decode step [ms]. useful: bytes of cache, windows and states of all sequences."""
        recurrent_bytes = self.decoder.states.linear_bytes(self.itemsize)
        entries_per_head = self.decoder.mean_entries((useful / batch - recurrent_bytes) / self.itemsize)
        operations = step_operations(self.decoder, entries_per_head, batch)
        return roofline_ms(self.weights + useful, self.bandwidth, operations, self.rate)

    def step_s(self, useful: float, batch: int) -> float:
        """Return the least time of a decode step [s]. Arguments are as in `step_ms`."""
        return self.step_ms(useful, batch) / MS

    @classmethod
    def of(cls, decoder: Decoder, dtype: str, speed: DeviceSpeed) -> Roofline:
        """Return the roofline of a model (its text model's shape and dtype) on a device."""
        return cls(decoder, ITEMSIZE[dtype], speed.bandwidth, speed.rates.get(dtype), speed.slug, speed.load)


def measured_roofline(model: Any, dtype: str, rows: pa.Table) -> Roofline | None:
    """Return the roofline of a model on the device of a run. The device is measured now if it was never measured.

    Args:
        model: the `model` node of a configuration.
        rows: rows of the table `timings`, whose number of threads is used for the measurement.

    Returns:
        None if the model's files do not state its shape, or nothing was timed.
    """
    import pyarrow.compute as pc

    from mmkv_bench.forecast.device_speed import speed_of_device
    from mmkv_bench.models.load import computing_with

    decoder, threads = decoder_of(Source.of(model).described), pc.max(rows["threads"]).as_py()
    if decoder is None or threads is None:
        return None
    with computing_with(threads):
        speed = speed_of_device(model.device)
    return Roofline.of(decoder, dtype, speed)


def stored_roofline(store: Store, rows: pa.Table) -> Roofline | None:
    """Return the roofline of timed rows from a stored measurement; None if there is none or several."""
    rooflines = set(stored_rooflines(store, rows).values())
    return rooflines.pop() if len(rooflines) == 1 else None


def roofline_by_context(store: Store) -> Callable[[Mapping[str, str]], Roofline | None]:
    """Return a function from a table's context (model, device, ...) to a roofline or None; its first call reads the
    rows."""
    rooflines = cache(lambda: stored_rooflines(store, store.timings()))
    return lambda context: rooflines().get(tuple(context[name] for name in _KEY_COLUMNS))


def stored_rooflines(store: Store, rows: pa.Table) -> dict[tuple[str, ...], Roofline]:
    """Return the rooflines of timed cells, by the values of `_KEY_COLUMNS` (model, device, ...).

    A cell is included if its model's shape is on this machine and its device was measured before. Nothing is downloaded
    or measured. rows: rows of the table `timings`.
    """
    from mmkv_bench.config.run_config import stored_config
    from mmkv_bench.forecast.device_speed import slug_of, stored_speeds

    timed_rows, speeds = rows.select(["cell", "threads"]).to_pandas().dropna(), stored_speeds()
    threads_by_cell = timed_rows.groupby("cell")["threads"].max().astype(int).to_dict()
    rooflines: dict[tuple[str, ...], Roofline] = {}
    for cell in store.cells([*threads_by_cell]).to_pylist():
        key, is_cpu = tuple(cell[name] for name in _KEY_COLUMNS), cell["device"] == "cpu"
        name, kind = (cell["cpu"] or "cpu", "cpu") if is_cpu else (cell["device"], "cuda")
        speed = speeds.get(slug_of(name, kind, threads_by_cell[cell["cell"]]))
        if key in rooflines or speed is None:
            continue
        with suppress(MMKVError):
            config = Source.of(stored_config({"model": json.loads(cell["config"])["model"]}).model).described_here()
            decoder = None if config is None else decoder_of(config)
            if decoder is not None:
                rooflines[key] = Roofline.of(decoder, cell["dtype"], speed)
    return rooflines
