"""The process environment that lmms-eval and its tasks expect, set for as long as they need it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from mmkv_bench.errors import ConfigError, UnsupportedError
from mmkv_bench.judging.proxy import task_variables

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
    require_single_rank()
    from loguru import logger
    from PIL import ImageFile

    # lmms-eval announces every step, and its tasks each failure they make a 0 of; what goes wrong reaches us otherwise.
    # "" is every module: those of tasks are called by their file, `utils` and the like. Nobody else here uses loguru.
    logger.disable("")
    truncated = ImageFile.LOAD_TRUNCATED_IMAGES
    try:
        from mmkv_bench.evaluation import harness as module
    except ImportError as error:
        raise ConfigError(f"lmms-eval cannot be imported ({error}); install the versions of the lock file") from error
    # importing lmms-eval makes Pillow fill up truncated images; a damaged image has to be an error here
    ImageFile.LOAD_TRUNCATED_IMAGES = truncated
    return module


def require_single_rank() -> None:
    """Raises UnsupportedError under a launcher of several ranks."""
    ranks = os.environ.get("WORLD_SIZE", "1")
    if ranks != "1":
        raise UnsupportedError(
            f"WORLD_SIZE={ranks}: lmms-eval would split each dataset among {ranks} ranks by itself; start one process "
            "per device with python -m mmkv_bench launch, or give each process a shard=i/n, and unset WORLD_SIZE"
        )


@contextmanager
def task_environment(media_root: str | None) -> Iterator[None]:
    """The variables that a task's code reads, for as long as it runs; nothing else is to see them.

    media_root: what HF_HOME has to be meanwhile; None leaves HF_HOME as it is, or sets the default of huggingface_hub
    where it is unset (14 task files read it without a default). Data that `datasets` converts go where they go anyhow.
    Where a task looks for a judge it finds the proxy of this process, and no key (see judging/proxy.py).
    """
    from huggingface_hub import constants

    wanted = {"HF_HOME": os.environ.get("HF_HOME", constants.HF_HOME)}
    if media_root is not None:
        from datasets import config

        caches = os.environ.get("HF_DATASETS_CACHE", str(config.HF_DATASETS_CACHE))
        wanted = {"HF_HOME": str(Path(media_root).expanduser().absolute()), "HF_DATASETS_CACHE": caches}
    wanted |= task_variables(dict(os.environ))
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if os.environ.get(name) != wanted[name]:  # the task set it to something else: not ours to undo
                continue
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
