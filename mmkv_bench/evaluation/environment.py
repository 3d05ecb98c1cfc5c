"""The process around lmms-eval: its import, the environment variables of tasks, and the translation of exceptions."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from mmkv_bench.datasets.messages import stated
from mmkv_bench.errors import ConfigError, DataError, MissingDataError, MMKVError, ScoringError, UnsupportedError
from mmkv_bench.judging.client import task_variables

OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")  # read only when huggingface_hub and datasets are imported


def go_offline() -> bool:
    """Make the Hugging Face libraries of this process stay offline, unless they were imported online before.

    Return whether they are offline now. A run that needs nothing from a hub calls this function first.
    """
    constants = sys.modules.get("huggingface_hub.constants")
    if constants is None:
        os.environ.update(dict.fromkeys(OFFLINE, "1"))
    return constants is None or bool(constants.HF_HUB_OFFLINE)


def lmms_eval(offline: bool) -> ModuleType:
    """Import lmms-eval and return the module `lmms_eval_loop`. offline: without connections to the hub.

    Raises:
        UnsupportedError: a launcher started several ranks. ConfigError: lmms-eval is not installed.
    """
    if offline:
        go_offline()
    require_single_rank()
    from loguru import logger
    from PIL import ImageFile

    # lmms-eval logs every step, and its tasks log each failure that they score as 0; faults reach this package otherwise.
    # "" means every module: modules of tasks have names such as `utils`. Nothing else in this package uses loguru.
    logger.disable("")
    allows_truncated_images = ImageFile.LOAD_TRUNCATED_IMAGES
    try:
        from mmkv_bench.evaluation import lmms_eval_loop as module
    except ImportError as error:
        raise ConfigError(f"lmms-eval cannot be imported ({error}); install the versions of the lock file") from error
    # Importing lmms-eval makes Pillow fill up truncated images, but a damaged image must be an error.
    ImageFile.LOAD_TRUNCATED_IMAGES = allows_truncated_images
    return module


def require_single_rank() -> None:
    ranks = os.environ.get("WORLD_SIZE", "1")
    if ranks != "1":
        raise UnsupportedError(
            f"WORLD_SIZE={ranks}: lmms-eval would split each dataset among {ranks} ranks; start one process per "
            "device with python -m mmkv_bench launch, or give each process a shard=i/n, and unset WORLD_SIZE"
        )


@contextmanager
def task_environment(media_root: str | None) -> Iterator[None]:
    """Context manager that sets the environment variables which a task's code reads.

    Variables of a judge's address are set to the proxy of this process, so a task never sees the key (see judging/client.py).

    media_root: the value of HF_HOME inside the block; the folder in which `datasets` converts data stays the same. None leaves
        HF_HOME unchanged, or sets the default of huggingface_hub if it is unset (14 task files read it without a default).
    """
    from huggingface_hub import constants

    variables = {"HF_HOME": os.environ.get("HF_HOME", constants.HF_HOME)}
    if media_root is not None:
        from datasets import config

        caches = os.environ.get("HF_DATASETS_CACHE", str(config.HF_DATASETS_CACHE))
        variables = {"HF_HOME": str(Path(media_root).expanduser().absolute()), "HF_DATASETS_CACHE": caches}
    variables |= task_variables(dict(os.environ))
    earlier_values = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in earlier_values.items():
            if os.environ.get(name) != variables[name]:  # the task changed it: leave the task's value
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
    """Context manager that turns exceptions and exits of a task's code, while it is loaded or asked, into a DataError.

    task: name of the task, for the message.
    ours: function that returns whether an exception comes from this package; such exceptions pass unchanged.
    folder: the local folder that the data are read from, if any.
    code: no data are read yet, only the task's own files.
    """
    try:
        yield
    except MMKVError:
        raise
    except ImportError as error:
        if ours(error):
            raise
        raise DataError(f"lmms-eval's task {task} needs a missing package: {error}; install it") from error
    except (Exception, SystemExit) as error:
        if ours(error):
            raise
        advice = (
            "give its data as a local folder with data.root=... or dataset_path=..., use data=fixture for a "
            "trial if the dataset has one, or allow connections with offline=false"
        )
        if folder:
            advice = (
                f"its data come from {folder}; check that they are complete and have the upstream schema, "
                "types included"
            )
        if code:
            advice = "correct the task's YAML file or the code that it names"
        raise MissingDataError(
            f"lmms-eval's task {task} cannot be loaded: {stated(root_cause(error))}; {advice}"
        ) from error


@contextmanager
def scoring_errors(task: str, where: Callable[[], str]) -> Iterator[None]:
    """Context manager that turns any exception of a scorer except MMKVError into a ScoringError. where: returns the
    scorer's progress as text."""
    try:
        yield
    except MMKVError:
        raise
    except ImportError as error:
        raise ScoringError(
            f"scoring lmms-eval's task {task} needs a missing package: {error}; install it and score the stored "
            "answers with stage=score"
        ) from error
    except NameError as error:  # tasks suppress the ImportError of an optional package and use the package later
        raise ScoringError(
            f"the scorer of lmms-eval's task {task} failed at {where()}: {error}; an optional package is probably "
            "missing; see docs/datasets.md, install it, then score the stored answers with stage=score"
        ) from error
    except (Exception, SystemExit) as error:
        raise ScoringError(
            f"the scorer of lmms-eval's task {task} failed at {where()}: {root_cause(error)!r}; the answers are "
            "kept; once the scorer works, score them with stage=score; after a change of the data, ask again"
        ) from error


def root_cause(error: BaseException) -> BaseException:
    """Return the exception inside tenacity's RetryError or behind a general exception of `datasets`; otherwise `error` itself."""
    if type(error).__name__ == "DatasetGenerationError" and error.__cause__ is not None:
        return root_cause(error.__cause__)
    last_attempt = getattr(error, "last_attempt", None)
    inner_error = last_attempt.exception() if last_attempt is not None else None
    return error if inner_error is None else root_cause(inner_error)
