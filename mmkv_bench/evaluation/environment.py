"""The process environment that lmms-eval and its tasks expect, set for as long as they need it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from mmkv_bench.errors import ConfigError, UnsupportedError

OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")  # read once, when huggingface_hub and datasets are imported


def go_offline() -> bool:
    """Make the Hugging Face libraries of this process stay offline, unless they are imported already and are not.

    Returns whether they are offline now. A run that needs nothing from a hub calls it first of all.
    """
    constants = sys.modules.get("huggingface_hub.constants")
    if constants is None:
        os.environ.update(dict.fromkeys(OFFLINE, "1"))
    return constants is None or bool(constants.HF_HUB_OFFLINE)


def harness(offline: bool) -> ModuleType:
    """The module `harness`, which is lmms-eval, imported into a process that is fit for it.

    Raises UnsupportedError under a launcher of several ranks, ConfigError when lmms-eval is not installed.
    """
    if offline:
        go_offline()
    _require_single_rank()
    from loguru import logger
    from PIL import ImageFile

    logger.disable("lmms_eval")  # it announces every step; what goes wrong reaches us as an exception
    truncated = ImageFile.LOAD_TRUNCATED_IMAGES
    try:
        from mmkv_bench.evaluation import harness as module
    except ImportError as error:
        raise ConfigError(f"lmms-eval cannot be imported ({error}); install the versions of the lock file") from error
    # importing lmms-eval makes Pillow fill up truncated images; a damaged image has to be an error here
    ImageFile.LOAD_TRUNCATED_IMAGES = truncated
    return module


def _require_single_rank() -> None:
    ranks = os.environ.get("WORLD_SIZE", "1")
    if ranks != "1":
        raise UnsupportedError(
            f"WORLD_SIZE={ranks}: lmms-eval would split each dataset among {ranks} ranks by itself; start one process "
            "per device with python -m mmkv_bench.launch, or give each process a shard=i/n, and unset WORLD_SIZE"
        )


@contextmanager
def placeholders(**values: str) -> Iterator[None]:
    """Set those of the environment variables that are not set, and unset them again: nothing else is to see them."""
    missing = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name, value in missing.items():
            if os.environ.get(name) == value:
                del os.environ[name]


def task_home() -> dict[str, str]:
    """What 14 task files read as os.environ["HF_HOME"], without a default: the default of huggingface_hub."""
    from huggingface_hub import constants

    return {"HF_HOME": constants.HF_HOME}


def loading_environment() -> dict[str, str]:
    """The same and a key that is none: some tasks build a judge's client as soon as their YAML is loaded.

    It never reaches a judge: scoring refuses such tasks unless a real judge is configured (see judges.py).
    """
    return task_home() | {"OPENAI_API_KEY": "none"}
