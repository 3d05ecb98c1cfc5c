"""lmms-eval's task classes, its model class and its evaluation loop. Only this module imports lmms-eval.

Get this module by `environment.lmms_eval()`, inside functions: importing it takes 7 to 13 seconds and 1.3 GB.

tests/evaluation/test_hooks.py tests what this module relies on beyond lmms-eval's documented interface:
`utils.load_yaml_config` leaves YAML nodes in place of functions in mode `simple`; the constructors of the task classes; the
layout of `Instance.args`; `evaluator.evaluate`; the retrying `download` and `process_results` have their plain functions as
`__wrapped__`; the loop iterates `eval_docs_no_media` one document at a time if `process_docs_parallel` is 1; `TaskOutput`
aggregates as the loop does.
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib
import io
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml
from lmms_eval import evaluator, utils
from lmms_eval.api.instance import Instance
from lmms_eval.api.model import lmms
from lmms_eval.api.task import ConfigurableMessagesTask, ConfigurableTask
from lmms_eval.evaluator_utils import TaskOutput

from mmkv_bench.errors import UnsupportedError
from mmkv_bench.evaluation import task_code
from mmkv_bench.evaluation.task_code import of_one_sample

AnswerInstance = Callable[[Instance], str]
Score = Callable[[Any, list, Callable[[], dict[str, Any]]], dict[str, Any]]


def load_config(path: Path) -> dict[str, Any]:
    """Return a task's YAML with its includes and functions. Each function comes from a module executed anew from its source."""
    task_code.import_from_source(task_code.folders(path))
    load_function = functools.cache(_function)  # the same node under several keys gives one function

    def resolved(value: Any) -> Any:
        if isinstance(value, yaml.Node):
            return load_function(value)
        if isinstance(value, dict):
            return {key: resolved(each) for key, each in value.items()}
        return [resolved(each) for each in value] if isinstance(value, list) else value

    return resolved(utils.load_yaml_config(str(path), mode="simple"))


def _function(node: yaml.Node) -> Callable:
    """Return the function that a YAML node `!function` names: from a file beside the YAML, else from a module."""
    folder, (module_name, _, name) = Path(node.start_mark.name).parent, node.value.rpartition(".")
    module_file = Path(os.path.normpath(folder / f"{module_name}.py"))
    if module_file.exists():
        return getattr(task_code.executed(module_name, module_file, not task_code.shipped(module_file)), name)
    try:
        return getattr(importlib.import_module(module_name), name)
    except Exception as error:
        raise ImportError(
            f"{node.value}: {module_file} does not exist, and no such module can be imported: {error}"
        ) from error


class CountedDocs:
    """The documents that lmms-eval's loop iterates. `current` is the position of the present document."""

    def __init__(self, docs: Any) -> None:
        self.docs = docs
        self.current = -1

    def __len__(self) -> int:
        return len(self.docs)

    def __getitem__(self, position: int) -> Any:
        return self.docs[position]

    def __iter__(self) -> Iterator[Any]:
        for self.current, doc in enumerate(self.docs):  # noqa: B020 - the loop reads it meanwhile
            yield doc


class _MessagesTask(ConfigurableMessagesTask):
    """A task in chat form.

    The constructor reads the first document and its media before any sample is asked. If these media cannot be read, the
    constructor gets the document without them. The document then fails later as one sample, like any other.
    """

    dataset: Mapping[str, Any]
    _instances: list[Any]

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.unread: Mapping[str, Any] | None = None
        try:
            self._construct(config)
        except (Exception, SystemExit) as error:
            if not of_one_sample(error) or getattr(self, "dataset_no_image", None) is None:
                raise
            self.unread = self.dataset
            try:
                self._construct(config)
            except (Exception, SystemExit):  # noqa: BLE001 - its text is faulty or needs the media; the first error says more
                raise error from None
            self.dataset = self.unread
            self.task_docs = self.test_docs() if self.has_test_docs() else self.validation_docs()
            self.features = list(self.task_docs.features)

    def _construct(self, config: Mapping[str, Any]) -> None:
        super().__init__(config=dict(config), model_name=None)  # None selects the prompts for models in general

    def download(self, dataset_kwargs: dict | None = None) -> None:
        if self.unread is None:
            self.fetch(dataset_kwargs)
        else:
            self.dataset = self.dataset_no_image


_ARCHIVE_ARGUMENTS = ("video", "cache_dir", "force_download", "force_unzip", "local_files_only", "create_link")


class FetchedTask(_MessagesTask):
    """A task that loads its data as lmms-eval does, but offline without retries, which only cost time.

    converted: the folder for files that `datasets` makes from local files; None uses its default. Media of local files are
    already in place, so nothing is unpacked for them.
    """

    def __init__(self, config: Mapping[str, Any], offline: bool, converted: Path | None = None) -> None:
        self.offline, self.converted = offline, converted
        super().__init__(config)

    def fetch(self, dataset_kwargs: dict | None) -> None:
        method = ConfigurableTask.download
        if self.converted is not None:
            other_arguments = {
                name: value for name, value in (dataset_kwargs or {}).items() if name not in _ARCHIVE_ARGUMENTS
            }
            dataset_kwargs = other_arguments | {"cache_dir": str(self.converted)}
            self.converted.mkdir(parents=True, exist_ok=True)
        (method.__wrapped__ if self.offline else method)(self, dataset_kwargs)


class GivenTask(_MessagesTask):
    """A task made from documents that are already loaded. dataset, bare: split -> documents, with media and without.

    The loop also makes an unused plain text of every document. If this fails for a document, the text is "", and the
    document fails later as one sample, when its messages are made.
    """

    building = False

    def __init__(self, config: Mapping[str, Any], dataset: Mapping[str, Any], bare: Mapping[str, Any]) -> None:
        self.loaded = dict(dataset), dict(bare)
        super().__init__(config)

    def fetch(self, dataset_kwargs: dict | None) -> None:
        self.dataset, self.dataset_no_image = self.loaded

    def build_all_requests(self, **options: Any) -> None:
        self.building = True
        try:
            super().build_all_requests(**options)
        finally:
            self.building = False

    def fewshot_context(self, *args: Any, **options: Any) -> Any:
        try:
            return super().fewshot_context(*args, **options)
        except (Exception, SystemExit) as error:
            if self.building and of_one_sample(error):
                return ""
            raise


class AskingTask(GivenTask):
    """A task for generation: every document is asked, and nothing is scored."""

    def process_results(self, doc: Any, results: list, full_docs: Any = None) -> dict[str, Any]:
        return {}


_process_results = ConfigurableTask.process_results.__wrapped__  # without retries


class ScoringTask(GivenTask):
    """A task for scoring. Only documents with an answer have requests, so only these reach the scorer.

    score(doc_id, results, run) scores a document's (filtered) answer by calling `run`, the task's scorer, and returns the
    scores for the aggregation. With `aggregates` False lmms-eval's aggregation is skipped. Metrics in `left_out` are not
    aggregated. If an aggregation raises, its metric has no aggregate and the exception is kept in `aggregation_errors`, so
    that the samples' scores are not lost.
    """

    left_out: Collection[str] = ()

    def __init__(
        self,
        config: Mapping[str, Any],
        docs: Mapping[str, Any],
        answered: set[int],
        aggregates: bool,
        score: Score = lambda key, results, run: run(),
    ) -> None:
        self.answered, self.aggregates, self.score = answered, aggregates, score
        self.counted: CountedDocs | None = None
        self.aggregation_errors: dict[str, BaseException] = {}
        super().__init__(config, docs, docs)

    @property
    def eval_docs_no_media(self) -> CountedDocs:
        if self.counted is None:
            self.counted = CountedDocs(super().eval_docs_no_media)
        return self.counted

    def build_all_requests(self, **options: Any) -> None:
        super().build_all_requests(**options)
        self._instances = [instance for instance in self._instances if instance.doc_id in self.answered]

    def apply_filters(self) -> None:
        # Filters pair answers and documents by position, so give them only the answered documents.
        self.task_docs = self.task_docs.select([instance.doc_id for instance in self._instances])
        super().apply_filters()

    def process_results(self, doc: Any, results: list, full_docs: Any = None) -> dict[str, Any]:
        return self._score(self.eval_docs_no_media.current, doc, results, full_docs)

    def _score(self, key: Any, doc: Any, results: list, full_docs: Any) -> dict[str, Any]:
        return self.score(key, results, lambda: _process_results(self, doc, results, full_docs))

    def scored(self, doc_id: int, results: list, changed: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the scorer's result for an answer. The document is read anew, because scorers may change it.

        results: the filtered answer. changed: columns of the document that are replaced.
        """
        doc = self.eval_docs_no_media[doc_id]
        return _process_results(self, dict(doc) | dict(changed) if changed else doc, results)

    def aggregation(self) -> dict[str, Callable]:
        functions = self.metric_functions if self.aggregates else {}
        return {name: self._kept_error(name, fn) for name, fn in functions.items() if name not in self.left_out}

    def close(self) -> None:
        """Drop references to the pass and to the requests, so that all are freed at once."""
        self._instances = []
        del self.score

    def _kept_error(self, metric: str, function: Callable) -> Callable:
        @functools.wraps(function)  # the loop reads the signature
        def aggregate(*args: Any, **options: Any) -> Any:
            try:
                return function(*args, **options)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - the task's own code; reported with the scores
                self.aggregation_errors[metric] = error
                return None

        return aggregate

    def aggregated(self, metrics: Mapping[tuple[str, str], list]) -> dict[str, Any]:
        """Return "metric,filter" -> aggregate over the samples, computed as in the last step of lmms-eval's loop.

        metrics: (metric, filter) -> results of the samples.
        """
        output = TaskOutput(task=self, task_name=self.config.task)
        output.sample_metrics.update(metrics)
        output.calculate_aggregate_metric(bootstrap_iters=0)
        return dict(output.agg_metrics)

    def score_answers(self, answers: Sequence[tuple[int, str]]) -> None:
        """Score several answers (doc_id, text) as lmms-eval's loop does: filters, then the scorer with a copy of the
        document.

        The function `score` gets (doc_id, number of the answer) as key.
        """
        docs, doc_ids = self.eval_docs_no_media, [doc_id for doc_id, _ in answers]
        metadata = {"task": self.config.task, "repeats": 1}
        instances = [
            Instance("generate_until", (), number, metadata | {"doc_id": doc_id}, resps=[text])
            for number, (doc_id, text) in enumerate(answers)
        ]
        for ensemble in self._filters:
            ensemble.apply(instances, self.task_docs.select(doc_ids))
            for doc_id, of_document in groupby(instances, lambda instance: instance.doc_id):
                doc = docs[doc_id]
                for instance in of_document:
                    results = [instance.filtered_resps[ensemble.name]]
                    self._score((doc_id, instance.idx), copy.deepcopy(doc), results, None)

    @property
    def metric_functions(self) -> dict[str, Callable]:
        """Metric -> function that aggregates its samples. Other values that a scorer returns are no metrics."""
        return super().aggregation()

    @property
    def filter_names(self) -> list[str]:
        """Names of the filters whose outputs are scored one after another."""
        return [ensemble.name for ensemble in self._filters]


class Respondent(lmms):
    """The model that lmms-eval calls. It passes each request to the function `answer`, sorted by the key `order` if
    given.

    An exception of that function, KeyboardInterrupt included, ends the loop; `raised` recognises the exception.
    """

    is_simple = False  # the chat form: requests carry messages
    accelerator = None  # otherwise the loop sets up accelerate; one process has one rank

    def __init__(self, answer: AnswerInstance, order: Callable[[Instance], Any] | None = None) -> None:
        super().__init__()
        self.answer, self.order = answer, order
        self.interruption: BaseException | None = None

    def generate_until(self, requests: list[Instance]) -> list[str]:
        try:
            sort_key, request_numbers = self.order, range(len(requests))
            ordered_numbers = (
                request_numbers
                if sort_key is None
                else sorted(request_numbers, key=lambda place: sort_key(requests[place]))
            )
            answers = {place: self.answer(requests[place]) for place in ordered_numbers}
            return [answers[place] for place in request_numbers]
        except BaseException as error:
            self.interruption = error
            raise

    def raised(self, error: BaseException) -> bool:
        return error is self.interruption

    def generate_until_multi_round(self, requests: list[Instance]) -> list[str]:
        raise UnsupportedError("questions of several rounds cannot be run; choose a task with one question per sample")

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        raise UnsupportedError("scores by likelihood cannot be run; choose a task that generates its answers")

    def clean(self) -> None:
        """Do nothing. The base class would delete the model's modules between two datasets."""


@contextmanager
def quiet() -> Iterator[Callable[[], Any]]:
    """Context manager that suppresses lmms-eval's printing (progress bars, scorers' tables) in the whole process.

    It yields a function that returns a context manager in which printing works as before.
    """
    out, err = sys.stdout, sys.stderr

    @contextmanager
    def loud() -> Iterator[None]:
        with redirect_stdout(out), redirect_stderr(err):
            yield

    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        yield loud


def run_loop(task: ConfigurableMessagesTask, respondent: Respondent, limit: int) -> dict[str, Any]:
    """Run lmms-eval's evaluation loop over one task, and return its report: aggregates by "metric,filter" and further
    facts.

    `simple_evaluate` is not used: it replaces functions of other libraries, starts git, and scores in four threads with
    one shared random generator.
    """
    name = task.config.task
    task.set_config("num_fewshot", task.config.num_fewshot or 0)
    task.set_fewshot_seed(seed=0)
    respondent.task_dict[name] = task.dataset
    cli_args = argparse.Namespace(output_path=".", process_with_media=False, reasoning_tags=None)
    results = evaluator.evaluate(
        lm=respondent,
        task_dict={name: task},
        limit=limit,
        bootstrap_iters=0,
        log_samples=False,
        cli_args=cli_args,
        process_docs_parallel=1,
    )
    return results["results"].get(name, {})
