"""A LoRA adapter beside a model's weights (`model.adapter=<folder>`), added into them by PEFT when they are loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv_bench.config.schema import resolve_path
from mmkv_bench.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

FILES = ("adapter_config.json", "adapter_model.safetensors")


def files(setting: str) -> list[Path]:
    """The files of an adapter, as PEFT writes them.

    Args:
        setting: `model.adapter`, a local folder or `pkg://package/folder`.

    Raises:
        ConfigError: a folder without them; weights in a form that is not safetensors are never read.
    """
    folder = Path(resolve_path(setting))
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise ConfigError(
            f"model.adapter={setting} has no {' and no '.join(missing)}; give the folder that PEFT's save_pretrained wrote"
        )
    return [folder / name for name in FILES]


def merged(model: nn.Module, setting: str) -> Any:
    """Return the model with the adapter's products added to its weights: the same layers, of the same classes.

    Raises:
        ConfigError: see `files`; an adapter of another model.
    """
    from peft import PeftModel

    folder = files(setting)[0].parent
    try:
        return PeftModel.from_pretrained(model, str(folder), local_files_only=True).merge_and_unload(safe_merge=True)
    except (ValueError, RuntimeError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"model.adapter={setting} does not fit this model ({reason}); give one trained on it"
        ) from error
