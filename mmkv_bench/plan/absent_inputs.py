"""What is asked for and not here, in words, before torch is imported where that is certain: a device, a compiler, a package."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mmkv_bench import devices
from mmkv_bench.devices.installed import COMPILED, FLASH, check_compiler, check_flash_attn
from mmkv_bench.errors import ConfigError

if TYPE_CHECKING:
    from mmkv_bench.config.schema import Model, RunConfig


def refuse_absent(config: RunConfig) -> None:
    """Refuse at once `model.device=cuda` without a driver, decode=compiled without a compiler and flash-attn without its package,
    where no row is here either: a run whose rows are all there needs none of them, which only the store tells.

    Raises:
        ConfigError: see `no_cuda` and `devices/installed.py`.
    """
    if config.stage == "score" or (Path(config.out).expanduser() / "store.json").exists():
        return
    if config.model.device == "cuda" and devices.KINDS["cuda"].ruled_out():
        raise no_cuda(config.model, str(config.model.dtype))
    if config.model.attention == FLASH:
        check_flash_attn()
    if config.decode == COMPILED:
        check_compiler()


def no_cuda(model: Model, dtype: str) -> ConfigError:
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
