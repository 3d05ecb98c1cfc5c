"""Bytes of a model's weights, known before the model is loaded. Used by a run's card, forecasts and dry runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv_bench.families.facts import kv_bytes_per_token, stated
from mmkv_bench.models.files import cached_folder
from mmkv_bench.models.shape import Decoder, Sizes, sizes_of
from mmkv_bench.models.source import FOLDER, HUB, RANDOM, Source
from mmkv_bench.text_columns import size

if TYPE_CHECKING:
    from mmkv_bench.families.facts import ModelFacts
    from mmkv_bench.plan.plan import Plan

ITEMSIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
"""Dtype -> bytes of a number."""
_COUNTED = {
    "files": "counted in its files",
    "stated": "as its repository states",
    "shape": "from its shape",
    "bound": "at most, a share of the whole model's",
}


@dataclass(frozen=True)
class ModelBytes:
    """Bytes of a model before it is loaded.

    Attributes:
        decoder: shape of the text model.
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
        """Return the bytes of windows and recurrent states of one sequence of `tokens` tokens."""
        return self.decoder.states.nbytes(tokens, self.decoder.entry, self.itemsize)

    @classmethod
    def of(cls, sizes: Sizes, dtype: str, family: ModelFacts | None) -> ModelBytes | None:
        """Compute the bytes from a model's sizes; None if its shape or dtype is unknown."""
        itemsize, decoder = ITEMSIZE.get(dtype), sizes.decoder
        if decoder is None or itemsize is None or family is None:
            return None
        weights = None if sizes.parameters is None else sizes.parameters * itemsize
        return cls(decoder, itemsize, weights, decoder.read * itemsize, kv_bytes_per_token(family, dtype))


def model_sizes(model: Any) -> Sizes:
    """Return the sizes of a model from its files. model: the `model` node of a configuration."""
    source = Source.of(model)
    folder: str | Path | None = source.place if source.kind == FOLDER else None
    if source.kind == HUB:
        folder = cached_folder(source.place, model.revision)
    whole = None
    if model.layers is not None and model.shape:
        from mmkv_bench.models.shape import values_of

        whole = stated(values_of(model.shape))
    return sizes_of(vars(model), source.described_here(), whole, folder)


def weights_text(plan: Plan, loaded: int | None = None) -> str:
    """Describe the weights: `3.136 MiB weights (counted in its files), 2.313 MiB read by a decode step`.

    loaded: bytes of all parameters, if the model is loaded.
    """
    model, sizes = plan.model, model_sizes(plan.model)
    known = ModelBytes.of(sizes, plan.cells[0].dtype, plan.family)
    weights = known.weights if loaded is None and known is not None else loaded
    read = f", {size(known.step_weights)} read by a decode step" if known else ""
    if Source.of(model).kind == RANDOM:
        return f"{size(weights) + ' ' if weights else ''}random weights (answers mean nothing: speed and memory only){read}"
    if weights is None:
        return "weights of unknown size"
    counted = f" ({_COUNTED[sizes.source]})" if loaded is None and sizes.source else ""
    return f"{size(weights)} weights{counted}{read}"
