"""Exceptions of a task's own code as errors of ours that name the task."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mmkv_bench.datasets.messages import stated
from mmkv_bench.errors import DataError, MissingDataError, MMKVError, ScoringError


def of_one_sample(error: BaseException) -> bool:
    """True where an exception concerns the one sample that was read or asked, and is no reason to stop.

    Decoders have exceptions of their own for files that are broken or too large, tasks take fields for granted that are
    empty, and end the process for a missing video. What stops every sample alike is a package or a name that is not
    there, and what this project refuses for another reason than its data.
    """
    if isinstance(error, MMKVError):
        return isinstance(error, DataError)
    return isinstance(error, (Exception, SystemExit)) and not isinstance(error, (ImportError, NameError))


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
        todo = "the task's YAML file or the code that it names is at fault" if code else _todo(folder)
        raise MissingDataError(
            f"lmms-eval's task {task} cannot be loaded: {stated(root_cause(error))}; {todo}"
        ) from error


def _todo(folder: str | None) -> str:
    if folder:
        return f"its data are those of {folder}, which have to be whole and of the upstream schema, types included"
    return (
        "give its data as a local folder with data.root=... or dataset_path=..., take data=fixture for a trial where the "
        "dataset has one, or allow connections with offline=false"
    )


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
