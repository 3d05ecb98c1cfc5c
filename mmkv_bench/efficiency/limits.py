"""What the device allows the model of a plan: read from its shape and from what was measured of the device once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from mmkv_bench.errors import MMKVError
from mmkv_bench.forecast.roofline import MS, roofline_ms, step_bytes, step_operations
from mmkv_bench.models.sizes import Decoder, decoder_of
from mmkv_bench.models.source import Source

if TYPE_CHECKING:
    import pyarrow as pa

    from mmkv_bench.efficiency.planned import Planned
    from mmkv_bench.store.store import Store

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


@dataclass(frozen=True)
class Limits:
    """Of one model on one device.

    Attributes:
        decoder: the text model's shape; itemsize: bytes of a weight, and of a number of the full cache.
        bandwidth: bytes per second of a read-only pass; rate: operations per second in the model's dtype, None where it was
            not measured; device: its name; load: of the machine when it was measured, None where that is not known.
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

    def step_s(self, useful: float, batch: int) -> float:
        """The least time of a decode step whose sequences read `useful` bytes of keys and values together [s]."""
        kv = useful / batch
        operations = step_operations(self.decoder, kv / (self.decoder.kv_values * self.itemsize), batch)
        return roofline_ms(step_bytes(self.weights, kv, batch), self.bandwidth, operations, self.rate) / MS


def limits_of(plan: Planned, rows: pa.Table) -> Limits | None:
    """None where a model's files do not state its shape, or nothing was timed. The device is measured now, once, if it never was.

    rows: of the table `timings`; the device is measured with their threads.
    """
    import pyarrow.compute as pc

    from mmkv_bench.forecast.measure_device import measured
    from mmkv_bench.models.threads import computing_with

    decoder, dtype = decoder_of(Source.of(plan.config.model).described()), plan.cells[0].dtype
    threads = pc.max(rows["threads"]).as_py()
    if decoder is None or threads is None:
        return None
    with computing_with(threads):
        speed = measured(plan.config.model.device)
    return Limits(decoder, _BYTES[dtype], speed.bandwidth, speed.rates.get(dtype), speed.slug, speed.load)


def limits_before(store: Store, rows: pa.Table) -> Limits | None:
    """`limits_of` where nothing ran: of the device that the rows are of, as it was measured before; None where that is not known
    here, or not one."""
    found = set(known_limits(store, rows).values())
    return found.pop() if len(found) == 1 else None


def limits_by_context(store: Store) -> Callable[[Mapping[str, str]], Limits | None]:
    """Of a table's context: its limits, as far as `known_limits` has them; nothing is read before the first is asked for."""
    found = cache(lambda: known_limits(store, store.timings()))
    return lambda context: found().get(tuple(context[name] for name in _KEY))


_KEY = ("model", "model_fingerprint", "dtype", "device")
"""Columns of a cell on which its limits hang; models of one name may differ in their layers."""


def known_limits(store: Store, rows: pa.Table) -> dict[tuple[str, ...], Limits]:
    """`_KEY` of cells of timed passes -> their limits, of those whose model's shape is known here and whose device was measured
    before; nobody is asked and nothing is measured now. rows: of the table `timings`."""
    import json

    from omegaconf import OmegaConf

    from mmkv_bench.forecast.device_speed import slug_of, stored

    timed, speeds = rows.select(["cell", "threads"]).to_pandas().dropna(), stored()
    threads = timed.groupby("cell")["threads"].max().astype(int).to_dict()
    found: dict[tuple[str, ...], Limits] = {}
    for cell in store.cells([*threads]).to_pylist():
        key, host = tuple(cell[name] for name in _KEY), cell["device"] == "cpu"
        name, kind = (cell["cpu"] or "cpu", "cpu") if host else (cell["device"], "cuda")
        speed = speeds.get(slug_of(name, kind, threads[cell["cell"]]))
        if key in found or speed is None:
            continue
        with suppress(MMKVError):
            described = Source.of(OmegaConf.create(json.loads(cell["config"])["model"])).described_here()
            decoder = None if described is None else decoder_of(described)
            if decoder is not None:
                rate = speed.rates.get(cell["dtype"])
                found[key] = Limits(decoder, _BYTES[cell["dtype"]], speed.bandwidth, rate, speed.slug, speed.load)
    return found
