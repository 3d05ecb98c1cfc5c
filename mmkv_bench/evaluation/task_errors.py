"""What a task's own code raises becomes an error of ours that names the task."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mmkv_bench.errors import DataError, MissingDataError, MMKVError, ScoringError
from mmkv_bench.evaluation.messages import stated

# Of one sample, and no reason to stop: files that are broken, and fields that are empty or of another kind than the
# task's code takes for granted. Tasks end the process for a missing video.
BROKEN_FILE = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, DataError, SystemExit)
BROKEN_FIELD = (AttributeError, TypeError, LookupError)


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
