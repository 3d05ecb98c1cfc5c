"""One analysis from beginning to end: samples of a dataset, one prefill each, every layer read, rows of `diagnostics`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv_bench.calibrate.samples import Asked, Questions, encoded
from mmkv_bench.errors import ConfigError
from mmkv_bench.store.digests import canonical_json, checksum

if TYPE_CHECKING:
    import pyarrow as pa
    import torch

    from mmkv_bench.diagnostics.quantities import Value
    from mmkv_bench.generation.encode import EncodedPrompt
    from mmkv_bench.models.load import LoadedModel

Row = tuple[str, int, "Value"]
"""Sample, layer, and a number of it."""


def diagnose(name: str, model: Any, questions: Questions, tokens: int, out: Path) -> tuple[Path, int]:
    """Measure and store. Returns the file and how many numbers it holds.

    Args:
        name: one of `quantities.QUANTITIES`; model: the `model` node of a run; tokens: of the full cache's own answer, at
            most, where the analysis looks at answers.

    Raises:
        MMKVError: a model or data that cannot be had, a prompt that the model does not read.
    """
    from mmkv_bench.models.source import Source
    from mmkv_bench.store.store import Store

    store, source = Store(out.expanduser()), Source.of(model)
    store.check_writable()
    fingerprint, _ = source.fingerprint()
    loaded = source.load()
    source.confirm(fingerprint)
    rows: list[Row] = []
    questions.each(loaded, lambda sample: rows.extend(layers_of(loaded, name, sample, tokens)))
    told = {
        "name": name,
        "model": source.settings.name,
        "model_fingerprint": fingerprint,
        "dtype": loaded.dtype,
        "dataset": questions.settings["dataset"],
        "dataset_fingerprint": questions.settings["dataset_fingerprint"],
        "settings": json.dumps(
            {**questions.settings, "samples": questions.described, "tokens": tokens}, sort_keys=True
        ),
        "versions": json.dumps({package: metadata.version(package) for package in ("torch", "transformers")}),
    }
    return store.write_diagnostics(table(told, rows)), len(rows)


def layers_of(loaded: LoadedModel, name: str, sample: Asked, tokens: int) -> list[Row]:
    """Numbers of one sample, layer by layer."""
    from mmkv_bench.calibrate.observing import read_layers, with_answer
    from mmkv_bench.diagnostics.quantities import QUANTITIES

    quantity, prompt = QUANTITIES[name], encoded(loaded, sample)
    inputs, types = prompt.inputs, prompt.types
    if quantity.answer:
        inputs, types = with_answer(inputs, types, fed_tokens(loaded, prompt, tokens))
    layers = read_layers(
        loaded.model,
        inputs,
        types,
        quantity.needs,
        lambda obs: list(quantity.read(obs, prompt.length)),
        f"{sample.sample_id}",
    )
    return [(sample.sample_id, layer, value) for layer, values in enumerate(layers) for value in values]


def fed_tokens(loaded: LoadedModel, prompt: EncodedPrompt, tokens: int) -> torch.Tensor:
    """The tokens that decoding feeds after the prompt, int64 ``[n]``, n >= 1: the full cache's own greedy answer without its
    last one, which nobody reads; of an answer of one token that one."""
    import torch

    generate: Any = loaded.model.generate
    with torch.no_grad():
        whole = generate(**prompt.inputs, max_new_tokens=tokens, do_sample=False)
    answer = whole[0, prompt.length :]
    return answer[:-1] if len(answer) > 1 else answer


def table(told: Mapping[str, str], rows: Sequence[Row]) -> pa.Table:
    """The measurement's rows, `measurement` the hash of what is told of it.

    Raises:
        ConfigError: no row, where the analysis says nothing of such prompts.
    """
    import pyarrow as pa

    if not rows:
        raise ConfigError(f"{told['name']} says nothing of these samples: it needs text and images; choose others")
    samples, layers, values = zip(*rows, strict=True)
    columns: dict[str, Any] = {
        "sample_id": samples,
        "layer": pa.array(layers, pa.int64()),
        "head": pa.array([value.head for value in values], pa.int64()),
        "quantity": [value.quantity for value in values],
        "part": [value.part for value in values],
        "x": pa.array([value.x for value in values], pa.float64()),
        "value": pa.array([value.value for value in values], pa.float64()),
    }
    same = dict(told) | {"measurement": checksum(canonical_json(dict(told)).encode())}
    return pa.table(columns | {name: [text] * len(rows) for name, text in same.items()})
