"""The plug-in for lmms-eval's command line, named by the entry-point group `lmms_eval.models`: a model with a compressor."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmms_eval.models.registry_v2 import ModelManifest

NAME = "mmkv"
MODEL = "mmkv_bench.api.lmms_eval_model.MMKV"


def manifest() -> ModelManifest:
    """Return lmms-eval's entry for `--model mmkv`, in chat form. lmms-eval imports the class when needed."""
    from lmms_eval.models.registry_v2 import ModelManifest

    return ModelManifest(NAME, chat_class_path=MODEL)
