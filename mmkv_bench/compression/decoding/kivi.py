"""KIVI: keys per channel, values per token, in 2, 4 or 8 bits, with a full-precision residual."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mmkv_bench.compression.decoding.base import DecodePolicy, Start
from mmkv_bench.compression.numerics.quantise import check_group
from mmkv_bench.compression.parameter_checks import check_words
from mmkv_bench.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from mmkv_bench.compression.cache import CompressedLayer


@dataclass(frozen=True)
class KIVI(DecodePolicy):
    """KIVI (arXiv 2402.02750, section 4.2, algorithm 1): the kept entries in b bits, the newest in full precision.

    The prompt's own attention runs in full precision. Then, per KV head with m kept entries:

    - keys: the first ``floor(m / R) * R`` are quantised per channel over groups of G consecutive KEPT tokens. The other
      ``m mod R`` stay in full precision, new keys join them, and once there are R they are quantised together.
    - values: all but the last R are quantised per token over groups of G channels (one group of all channels if a head
      has fewer than G). From then on every step quantises the oldest of R + 1.

    Keys are quantised with their rotation, as released. Evicted entries are in no group, and no group spans two heads.
    Prompt tokens that are fed after the reduction (the last one under ``strict``, the question under
    ``query_agnostic``) are attended to in full precision once, like the rest of the prompt. Fewer than R entries all
    stay in full precision until the answer has filled the residual (fallback `within_residual`), so with eviction R
    should be well below the budget.

    Every step dequantises a whole layer for the attention kernel and drops that copy again. Decoding is therefore
    slower than with the paper's fused kernels; stored bytes do not include the copy.

    Args:
        bits: bits of a stored number, 2 or 4 as in the paper, or 8. The scale and minimum of each group are stored too,
            in the model's dtype: together ``b + 32 / G`` bits per number in half precision.
        group: G, numbers of one group: kept tokens of a key channel, channels of a value [tokens, channels].
        residual: R, newest entries that stay in full precision at most [entries per KV head]; a multiple of G.
        flush: `before` quantises before the attention of the token that filled the residual (algorithm 1), `after`
            quantises after it (released code).

    Paper and code: see ``flush``. The released code divides by zero for a constant group; here the scale is at least
    1e-6, and such a group is restored exactly.
    """

    bits: int = 2
    group: int = 32
    residual: int = 128
    flush: Literal["before", "after"] = "before"

    quantises = True

    def __post_init__(self) -> None:
        check_group(self.bits, self.group)
        if self.residual < self.group or self.residual % self.group:
            raise ConfigError(
                f"residual is {self.residual}; allowed: multiples of group={self.group} tokens, at least one "
                "group; choose such a number"
            )
        check_words(self)

    def value_group(self, dim: int) -> int:
        """Return the number of channels in one group of values. dim: number of channels of a head.

        Raises:
            UnsupportedError: the channels do not divide into groups, or a group fills no whole bytes.
        """
        group = min(self.group, dim)
        if dim % group or group * self.bits % 8:
            raise UnsupportedError(
                f"KIVI with group={self.group} at {self.bits} bits cannot divide heads of {dim} channels into "
                "groups of whole bytes; set group to a size that divides the head"
            )
        return group

    def fallbacks(self, entries: int) -> tuple[str, ...]:
        return ("within_residual",) if entries < self.residual else ()

    def layer(self, start: Start) -> CompressedLayer:
        from mmkv_bench.compression.decoding.quantised_layer import QuantisedLayer

        value_group = self.value_group(start.kept_value.shape[-1])
        return QuantisedLayer.of(start, self.bits, self.group, value_group, self.residual, self.flush == "before")
