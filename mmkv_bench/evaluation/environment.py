"""The process around lmms-eval and its tasks: its import, the variables that they expect, their exceptions as ours."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from mmkv_bench.datasets.messages import stated
from mmkv_bench.errors import ConfigError, DataError, MissingDataError, MMKVError, ScoringError, UnsupportedError
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


def lmms_eval(offline: bool) -> ModuleType:
    """The module `lmms_eval_loop`, and with it lmms-eval, imported into a process that is fit for it.

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
        from mmkv_bench.evaluation import lmms_eval_loop as module
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
    earlier = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in earlier.items():
            if os.environ.get(name) != wanted[name]:  # the task set it to something else: not ours to undo
                continue
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def task_errors(
    task: str,
    ours: Callable[[BaseException], bool] = lambda error: False,
    folder: str | None = None,
    code: bool = False,
) -> Iterator[None]:
    """Loading and asking: a DataError instead of any exception, and instead of an exit of the process.

    ours: exceptions that are not the task's and pass unchanged.
    folder: the local folder that the data are read from, if they are.
    code: no data are read yet, only the task's own files.
    """
    try:
        yield
    except MMKVError:
        raise
    except ImportError as error:
        if ours(error):
            raise
        raise DataError(f"lmms-eval's task {task} needs a package that is not there: {error}; install it") from error
    except (Exception, SystemExit) as error:
        if ours(error):
            raise
        todo = (
            "give its data as a local folder with data.root=... or dataset_path=..., take data=fixture for a trial where the "
            "dataset has one, or allow connections with offline=false"
        )
        if folder:
            todo = f"its data are those of {folder}, which have to be whole and of the upstream schema, types included"
        if code:
            todo = "the task's YAML file or the code that it names is at fault"
        raise MissingDataError(
            f"lmms-eval's task {task} cannot be loaded: {stated(root_cause(error))}; {todo}"
        ) from error


@contextmanager
def scoring_errors(task: str, where: Callable[[], str]) -> Iterator[None]:
    """Scoring: a ScoringError; `where` tells how far the scorer had come."""
    try:
        yield
    except MMKVError:
        raise
    except ImportError as error:
        raise ScoringError(
            f"scoring lmms-eval's task {task} needs a package that is not there: {error}; install it and score the "
            "stored answers with stage=score"
        ) from error
    except NameError as error:  # tasks swallow the ImportError of what they use later
        raise ScoringError(
            f"the scorer of lmms-eval's task {task} failed at {where()}: {error}; a package that the task takes only if it "
            "is there is probably not installed: docs/datasets.md says what a dataset needs; install it and score the stored "
            "answers with stage=score"
        ) from error
    except (Exception, SystemExit) as error:
        raise ScoringError(
            f"the scorer of lmms-eval's task {task} failed at {where()}: {root_cause(error)!r}; the answers are kept, "
            "and stage=score scores them once the scorer can; data that are mended are other data, to be asked anew"
        ) from error


def root_cause(error: BaseException) -> BaseException:
    """The exception inside tenacity's RetryError or behind `datasets`' general one, else the exception itself."""
    if type(error).__name__ == "DatasetGenerationError" and error.__cause__ is not None:
        return root_cause(error.__cause__)
    attempt = getattr(error, "last_attempt", None)
    inner = attempt.exception() if attempt is not None else None
    return error if inner is None else root_cause(inner)
