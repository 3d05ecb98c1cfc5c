"""What a cell's hash covers besides the configuration, read from the model folder, the datasets and the installed packages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv_bench.errors import ConfigError
from mmkv_bench.plan.cells import DatasetIdentity, Identity

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from mmkv_bench.datasets.task_spec import TaskSpec

_SAFETENSORS_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}


def gather(config: DictConfig, specs: Mapping[str, TaskSpec]) -> tuple[Identity, dict[str, Any]]:
    """Everything planning must know besides the configuration.

    Args:
        specs: dataset name, as `config.datasets` has it -> task. Their data are made or opened for the checksums.

    Returns:
        The identity, and the provenance columns of the `cells` rows.

    Raises:
        ConfigError: a model that is not there or of an unsupported family, a hub id whose commit cannot be found.
    """
    from mmkv_bench.models.source import Source
    from mmkv_bench.store import provenance

    source = Source.of(config.model)
    fingerprint, commit = source.fingerprint()
    dtype = resolve_dtype(config.model.dtype, source.hf_config(), source.path)
    device = resolve_device(config.model.device) if config.stage == "score" else _usable_device(config.model, dtype)
    origin = provenance.collect(device) | {"weights": source.kind}
    identity = Identity(
        model_fingerprint=fingerprint,
        model_revision=commit,
        dtype=dtype,
        torch=origin["torch"],
        transformers=origin["transformers"],
        datasets={name: dataset_identity(spec) for name, spec in specs.items()},
    )
    return identity, origin


def dataset_identity(spec: TaskSpec) -> DatasetIdentity:
    """What a dataset adds to its cells' identity. `count` and `limit` are not part of it: more samples reuse rows."""
    from mmkv_bench import evaluation

    prompt: dict[str, Any] = {"task": spec.name, "size": spec.size, "split": spec.split}
    if spec.placeholders:
        prompt["placeholders"] = spec.placeholders
    return DatasetIdentity(
        fingerprint=evaluation.fingerprint(spec),
        prompt=prompt,
        generation=evaluation.generation_settings(spec),
    )


def dataset_costs(config: DictConfig) -> dict[str, float]:
    """Dataset name -> samples of this run times the tokens that each may answer with."""
    from omegaconf import OmegaConf

    from mmkv_bench import evaluation
    from mmkv_bench.datasets.specs import spec_from_config

    costs = {}
    for name, node in config.datasets.items():
        spec = spec_from_config(str(name), OmegaConf.to_container(node, resolve=True), config.data)
        longest = evaluation.generation_settings(spec).get("max_new_tokens") or 1
        costs[str(name)] = float(len(evaluation.sample_refs(spec, config.limit)) * longest)
    return costs


def resolve_device(setting: str) -> str:
    """`cpu` or `cuda`, wherever it runs: cuda where there is one, unless it is not wanted."""
    import torch

    return "cuda" if setting != "cpu" and torch.cuda.is_available() else "cpu"


def _usable_device(model: DictConfig, dtype: str) -> str:
    """`resolve_device` of a run that generates.

    Raises:
        ConfigError: cuda is asked for and not there; the sentence says how much memory the weights take.
    """
    device = resolve_device(model.device)
    if model.device != "cuda" or device == "cuda":
        return device
    parameters = (model.about or {}).get("parameters")
    size = ""
    if parameters and model.layers is None:
        taken = parameters * (4 if dtype == "float32" else 2) / 2**30
        size = f" with more than {taken:.1f} GiB: {parameters / 1e9:.2f} B parameters in {dtype}, before any cache"
    raise ConfigError(
        f"model.device=cuda, but this machine has no CUDA device; this run needs one{size}; allowed here: cpu, auto; a "
        "form shrunk to two layers of random weights runs on CPU: model.weights=random model.layers=2 model.device=cpu"
    )


def resolve_dtype(setting: str, hf_config: Any, path: str | None) -> str:
    """The dtype that a model will be loaded in; `auto` is its configuration's, else that of its first stored weight.
    `path` is its folder or hub id, None for random weights."""
    if setting != "auto":
        return setting
    text = hf_config.get_text_config(decoder=True)
    declared = getattr(hf_config, "dtype", None) or getattr(text, "dtype", None)
    if declared is not None:
        return str(declared).removeprefix("torch.")
    stored = _first_stored_dtype(Path(path)) if path else None
    if stored is None:
        raise ConfigError(
            f"the dtype of {path or 'the shape'} is not in its config.json; name it with model.dtype=float32 (or another)"
        )
    return stored


def _first_stored_dtype(folder: Path) -> str | None:
    from safetensors import safe_open

    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                dtype = _SAFETENSORS_DTYPES.get(tensors.get_slice(name).get_dtype())
                if dtype is not None:
                    return dtype
    return None
