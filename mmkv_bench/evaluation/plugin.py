"""lmms-eval's own command line with a compressor on the model: what its entry-point group `lmms_eval.models` names."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmms_eval.models.registry_v2 import ModelManifest

NAME = "mmkv"
MODEL = "mmkv_bench.api.lmms_eval_model.MMKV"


def manifest() -> ModelManifest:
    """Name the class of `--model mmkv`, in chat form; lmms-eval imports it when it needs it."""
    from lmms_eval.models.registry_v2 import ModelManifest

    return ModelManifest(NAME, chat_class_path=MODEL)
