"""What the device allows the model of a plan: read from its shape and from what was measured of the device once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from mmkv_bench.errors import MMKVError
from mmkv_bench.models.roofline import MS, Decoder, roofline_ms, step_bytes, step_operations
from mmkv_bench.models.sizes import decoder_of
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
            not measured; device: its name.
    """

    decoder: Decoder
    itemsize: int
    bandwidth: float
    rate: float | None
    device: str

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

    from mmkv_bench.generation.device_speed import measured
    from mmkv_bench.models.threads import computing_with

    decoder, dtype = decoder_of(Source.of(plan.config.model).described()), plan.cells[0].dtype
    threads = pc.max(rows["threads"]).as_py()
    if decoder is None or threads is None:
        return None
    with computing_with(threads):
        speed = measured(plan.config.model.device)
    return Limits(decoder, _BYTES[dtype], speed.bandwidth, speed.rates.get(dtype), speed.slug)


def limits_by_context(store: Store) -> Callable[[Mapping[str, str]], Limits | None]:
    """Of a table's context: its limits, as far as `known_limits` has them; nothing is read before the first is asked for."""
    found = cache(lambda: known_limits(store))
    return lambda context: found().get((context["model"], context["dtype"], context["device"]))


def known_limits(store: Store) -> dict[tuple[str, str, str], Limits]:
    """(model, dtype, device) of the cells of timed passes -> its limits, of those whose model's files are here and whose device
    was measured before; nothing is measured now."""
    import json

    from omegaconf import OmegaConf

    from mmkv_bench.models.devices import slug_of, stored

    rows, speeds = store.timings().to_pandas(), stored()
    threads = rows.dropna(subset=["threads"]).groupby("cell")["threads"].max().astype(int) if len(rows) else {}
    found: dict[tuple[str, str, str], Limits] = {}
    for cell in store.cells([*dict(threads)]).to_pylist():
        key = cell["model"], cell["dtype"], cell["device"]
        kind = "cpu" if cell["device"] == "cpu" else "cuda"
        speed = speeds.get(
            slug_of((cell["cpu"] or "") if kind == "cpu" else cell["device"], kind, threads[cell["cell"]])
        )
        if key in found or speed is None:
            continue
        with suppress(MMKVError):
            model = OmegaConf.create(json.loads(cell["config"])["model"])
            decoder = decoder_of(Source.of(model).described())
            if decoder is not None:
                rate = speed.rates.get(cell["dtype"])
                found[key] = Limits(decoder, _BYTES[cell["dtype"]], speed.bandwidth, rate, speed.slug)
    return found
