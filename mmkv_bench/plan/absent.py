"""A device that is asked for and not there, in words; and before torch is imported, where that is certain."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mmkv_bench import devices
from mmkv_bench.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig


def refuse_absent_device(config: DictConfig) -> None:
    """Refuse `model.device=cuda` at once where no driver is here and no row either: a run whose rows are all there needs no
    device, which only the store tells.

    Raises:
        ConfigError: see `no_cuda`.
    """
    if config.model.device != "cuda" or config.stage == "score" or not devices.KINDS["cuda"].ruled_out():
        return
    if not (Path(config.out).expanduser() / "store.json").exists():
        raise no_cuda(config.model, str(config.model.dtype))


def no_cuda(model: DictConfig, dtype: str) -> ConfigError:
    """The refusal; it says how much memory the weights take. dtype: `auto` where that is not known yet."""
    parameters = (model.about or {}).get("parameters")
    size = ""
    if parameters and model.layers is None:
        taken = parameters * (4 if dtype == "float32" else 2) / 2**30
        kind = "half precision" if dtype == "auto" else dtype
        size = f" with more than {taken:.1f} GiB: {parameters / 1e9:.2f} B parameters in {kind}, before any cache"
    return ConfigError(
        f"model.device=cuda, but this machine has no CUDA device; this run needs one{size}; allowed here: cpu, auto; a "
        "form shrunk to two layers of random weights runs on CPU: model.weights=random model.layers=2 model.device=cpu"
    )
