"""What a run must find out before it can name its cells: checksums of model and data, resolved dtype, versions."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv_bench.config import resolve_path
from mmkv_bench.planning.cells import DatasetFacts, Facts
from mmkv_bench.planning.fingerprint import folder_fingerprint
from mmkv_bench.store.provenance import collect

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from mmkv_bench.evaluation.contract import TaskSpec


def gather(config: DictConfig, specs: Mapping[str, TaskSpec]) -> tuple[Facts, dict[str, Any]]:
    """Facts that the cells' hashes cover, and the provenance columns of the `cells` rows.

    Args:
        config: composed and validated; specs: dataset label -> task.

    Raises:
        ConfigError, UnsupportedError: a model folder that cannot be read or is of an unsupported family.
        DataError: data that are not what their checksum says.
    """
    from mmkv_bench.evaluation import fingerprint
    from mmkv_bench.models.load import load_config

    path = resolve_path(config.model.path)
    model = load_config(path, config.model.revision)
    revision = getattr(model, "_commit_hash", None)
    if Path(path).is_dir():
        checksum, revision = folder_fingerprint(path), None
    else:
        checksum = hashlib.sha256(f"{path}@{revision}".encode()).hexdigest()[:16]
    device = _device(config.model.device)
    provenance = collect(device)
    datasets = {
        label: DatasetFacts(fingerprint(spec), prompt={"task": spec.name}, generation=dict(spec.generation))
        for label, spec in specs.items()
    }
    facts = Facts(
        model_fingerprint=checksum,
        model_revision=revision,
        dtype=_dtype(config.model.dtype, model),
        torch=provenance["torch"],
        transformers=provenance["transformers"],
        datasets=datasets,
    )
    return facts, provenance


def _device(asked: str) -> str:
    import torch

    return "cuda" if asked != "cpu" and torch.cuda.is_available() else "cpu"


def _dtype(asked: str, model: Any) -> str:
    if asked != "auto":
        return asked
    stored = getattr(model, "dtype", None) or getattr(model.get_text_config(decoder=True), "dtype", None)
    return str(stored).removeprefix("torch.") if stored is not None else "float32"
