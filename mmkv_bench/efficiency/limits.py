"""What the device allows the model of a plan: read from its shape and from what was measured of the device once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mmkv_bench.models.roofline import Decoder
from mmkv_bench.models.sizes import decoder_of
from mmkv_bench.models.source import Source

if TYPE_CHECKING:
    import pyarrow as pa

    from mmkv_bench.efficiency.planned import Planned

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
