"""A LoRA adapter for a model's weights (`model.adapter=<folder>`); PEFT adds it to the weights when the model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv_bench.config.schema import resolve_path
from mmkv_bench.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

FILES = ("adapter_config.json", "adapter_model.safetensors")


def files(setting: str) -> list[Path]:
    """Return the files of an adapter, as PEFT writes them.

    Args:
        setting: `model.adapter`, a local folder or `pkg://package/folder`.

    Raises:
        ConfigError: a file is missing from the folder; only safetensors weights are read.
    """
    folder = Path(resolve_path(setting))
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise ConfigError(
            f"model.adapter={setting} has no {' and no '.join(missing)}; give the folder that PEFT's save_pretrained wrote"
        )
    return [folder / name for name in FILES]


def merged(model: nn.Module, setting: str) -> Any:
    """Add the adapter's products to the model's weights and return the model; layers and their classes do not change.

    Raises:
        ConfigError: see `files`; or the adapter belongs to another model.
    """
    from peft import PeftModel

    folder = files(setting)[0].parent
    try:
        return PeftModel.from_pretrained(model, str(folder), local_files_only=True).merge_and_unload(safe_merge=True)
    except (ValueError, RuntimeError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"model.adapter={setting} does not fit this model ({reason}); give an adapter trained on this model"
        ) from error
