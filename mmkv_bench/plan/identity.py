"""Facts that a cell's hash covers besides the configuration: model files, datasets and installed packages."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv_bench import devices
from mmkv_bench.compression.budget import StateCost
from mmkv_bench.devices.requirements import check_meant
from mmkv_bench.errors import ConfigError
from mmkv_bench.families.facts import full_state_bytes, kv_bytes_per_token, model_facts
from mmkv_bench.models.files import is_gguf
from mmkv_bench.models.source import Source
from mmkv_bench.plan.cells import DatasetIdentity, Identity
from mmkv_bench.plan.validate import no_cuda_error

if TYPE_CHECKING:
    import pyarrow as pa

    from mmkv_bench.config.schema import Model
    from mmkv_bench.datasets.specs import TaskSpec
    from mmkv_bench.families.facts import ModelFacts

_SAFETENSORS_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}


UNKNOWN = "unknown"
"""Fingerprint of something that could not be read. The hash of a cell with this value matches no run."""


def gather(model: Model, specs: Mapping[str, TaskSpec]) -> Identity:
    """Return the facts that planning needs besides the configuration. Datasets other than pages are opened for their
    checksums.

    specs: dataset label -> task.

    Raises ConfigError: the model is missing or of an unsupported family, or the commit of a hub id cannot be
    determined.
    """
    source = Source.of(model)
    fingerprint, commit = source.fingerprint()
    dtype = resolve_dtype(model.dtype, source.described, source.path)
    return Identity(
        model_fingerprint=fingerprint,
        model_revision=commit,
        dtype=dtype,
        datasets={name: dataset_identity(spec) for name, spec in specs.items()},
        cost=cost_of(source.described, dtype),
        **_library_versions(),
    )


def outline(model: Model, specs: Mapping[str, TaskSpec], stored: pa.Table) -> Identity:
    """Return the facts of `gather` without a connection and without opening data.

    Facts that the configuration and local model files lack are taken from the newest stored cells, or else are UNKNOWN.

    specs: dataset label -> task.
    stored: the store's table `cells`.
    """
    described, fingerprint, commit = Source.of(model).outlined()
    columns = ("model", "model_fingerprint", "model_revision", "dtype", "dataset", "dataset_fingerprint", "created_at")
    rows = sorted(stored.select(columns).to_pylist(), key=itemgetter("created_at"))  # the newest row wins
    newest_row_of_model: dict[str, Any] = {row["model"]: row for row in rows}.get(model.name, {})
    stored_fingerprints = {row["dataset"]: row["dataset_fingerprint"] for row in rows}
    if fingerprint is None:
        fingerprint = newest_row_of_model.get("model_fingerprint", UNKNOWN)
        commit = newest_row_of_model.get("model_revision")
    if model.dtype == "auto" and described is None:
        dtype = newest_row_of_model.get("dtype", UNKNOWN)
    else:
        dtype = resolve_dtype(model.dtype, described, None)
    datasets = {
        name: dataset_identity(spec, None if spec.is_pages else stored_fingerprints.get(name, UNKNOWN))
        for name, spec in specs.items()
    }
    return Identity(
        fingerprint, commit, dtype, datasets=datasets, cost=cost_of(described, dtype), **_library_versions()
    )


def provenance(model: Model, dtype: str) -> dict[str, Any]:
    """Return the columns of the table `cells` about code, versions, device and weights of a run.

    dtype: precision of the run. Raises the errors of `usable_device`.
    """
    from mmkv_bench.store.provenance import collect

    source = Source.of(model)
    return collect(usable_device(model, dtype)) | {"weights": source.kind, "weights_file": source.gguf_file}


def state_cost(family: ModelFacts, dtype: str) -> StateCost:
    """Return the bytes of a model's state: of one entry per KV head in all compressed layers, and of windows and
    recurrent states."""
    return StateCost(kv_bytes_per_token(family, dtype), full_state_bytes(family, dtype))


def cost_of(described: Any, dtype: str) -> StateCost | None:
    """Return `state_cost`, or None if shape or precision is unknown. described: from `Source.described`."""
    return None if described is None or dtype == UNKNOWN else state_cost(model_facts(described), dtype)


def _library_versions() -> dict[str, str]:
    from mmkv_bench.store.provenance import version

    return {name: version(name) or "none" for name in ("torch", "transformers")}


def dataset_identity(spec: TaskSpec, fingerprint: str | None = None) -> DatasetIdentity:
    """Return the facts about a dataset that its cells' hashes cover. The number of samples is not one of them.

    fingerprint: checksum of the content; None computes it.
    """
    from mmkv_bench.evaluation import documents, fingerprints

    if fingerprint is None:
        documents.forget_changed(spec)  # cached by an earlier run of this process
    prompt_settings: dict[str, Any] = {"task": spec.name, "size": spec.size, "split": spec.split}
    if spec.placeholders:
        prompt_settings["placeholders"] = spec.placeholders
    return DatasetIdentity(
        fingerprint=fingerprints.fingerprint(spec) if fingerprint is None else fingerprint,
        prompt=prompt_settings,
        generation=documents.generation_settings(spec),
        context=spec.context_key,
        questions=spec.questions_key,
    )


def usable_device(model: Model, dtype: str) -> str:
    """Return the kind of device (`cpu`, `cuda`) on which a run generates.

    Raises ConfigError: model.device=cuda without a CUDA device, or an error of `check_meant`.
    """
    check_meant(model.device)
    device = devices.kind_of(model.device)
    if model.device != "cuda" or device == "cuda":
        return device
    raise no_cuda_error(model, dtype)


def resolve_dtype(setting: str, config: Any, path: str | None) -> str:
    """Return the dtype in which a model will be loaded. `auto` is float32 for a GGUF file, else the dtype in the
    model's configuration, or else of its first stored weight.

    config: from `Source.described`.
    path: folder or hub id; None for random weights.
    """
    if setting != "auto":
        return setting
    if path and is_gguf(path):
        return "float32"  # transformers dequantises to it
    text_config = config.get_text_config(decoder=True)
    declared_dtype = getattr(config, "dtype", None) or getattr(text_config, "dtype", None)
    if declared_dtype is not None:
        return str(declared_dtype).removeprefix("torch.")
    stored_dtype = _first_stored_dtype(Path(path)) if path else None
    if stored_dtype is None:
        raise ConfigError(
            f"the dtype of {path or 'the shape'} is not in its config.json; set it with model.dtype=float32 (or another)"
        )
    return stored_dtype


def _first_stored_dtype(folder: Path) -> str | None:
    from safetensors import safe_open

    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                dtype = _SAFETENSORS_DTYPES.get(tensors.get_slice(name).get_dtype())
                if dtype is not None:
                    return dtype
    return None
