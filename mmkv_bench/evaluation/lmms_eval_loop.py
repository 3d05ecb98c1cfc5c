"""lmms-eval itself: its task classes, its model class and its evaluation loop. Only this module imports it.

Get it by `environment.lmms_eval()`, inside functions: importing it takes 7 to 13 seconds and 1.3 GB.

What it relies on beyond lmms-eval's documented interface is held by tests/evaluation/test_hooks.py:
that `utils.load_yaml_config` leaves its nodes in place of functions in mode `simple`, the constructors of the task
classes, the layout of `Instance.args`, `evaluator.evaluate`, that the retrying `download` and `process_results` carry
their plain functions as `__wrapped__`, that the loop iterates `eval_docs_no_media` one document at a
time when `process_docs_parallel` is 1, and that `TaskOutput` aggregates as the loop does.
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
    """A task's YAML with its includes and functions, each function from a module executed anew, and from its source alone."""
    task_code.import_from_source(task_code.folders(path))
    function = functools.cache(_function)  # one node, though several keys may hold it

    def resolved(value: Any) -> Any:
        if isinstance(value, yaml.Node):
            return function(value)
        if isinstance(value, dict):
            return {key: resolved(each) for key, each in value.items()}
        return [resolved(each) for each in value] if isinstance(value, list) else value

    return resolved(utils.load_yaml_config(str(path), mode="simple"))


def _function(node: yaml.Node) -> Callable:
    """The function of a `!function` node: of a file beside the YAML, else of a module that can be imported."""
    folder, (module_name, _, name) = Path(node.start_mark.name).parent, node.value.rpartition(".")
    file = Path(os.path.normpath(folder / f"{module_name}.py"))
    if file.exists():
        return getattr(task_code.executed(module_name, file, not task_code.shipped(file)), name)
    try:
        return getattr(importlib.import_module(module_name), name)
    except Exception as error:
        raise ImportError(f"{node.value}: there is no {file}, and no such module: {error}") from error


class CountedDocs:
    """The documents as the loop gets them; `current` is the position of the current one."""

    def __init__(self, docs: Any) -> None:
        self.docs = docs
        self._current: int | None = None

    @property
    def current(self) -> int:
        assert self._current is not None, "the loop works on no document yet"
        return self._current

    def __len__(self) -> int:
        return len(self.docs)

    def __getitem__(self, position: int) -> Any:
        return self.docs[position]

    def __iter__(self) -> Iterator[Any]:
        for position, doc in enumerate(self.docs):
            self._current = position
            yield doc


class _MessagesTask(ConfigurableMessagesTask):
    """A task in chat form. The constructor looks at the first document with its media, before any sample is asked; a
    document whose media cannot be read is shown to it without them, and meets its fault as a sample like the others."""

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
            except (Exception, SystemExit):  # noqa: BLE001 - its text is at fault or needs the media; the first says more
                raise error from None
            self.dataset = self.unread
            self.task_docs = self.test_docs() if self.has_test_docs() else self.validation_docs()
            self.features = list(self.task_docs.features)

    def _construct(self, config: Mapping[str, Any]) -> None:
        super().__init__(config=dict(config), model_name=None)  # None: the prompts for models in general

    def download(self, dataset_kwargs: dict | None = None) -> None:
        if self.unread is None:
            self.fetch(dataset_kwargs)
        else:
            self.dataset = self.dataset_no_image


_OF_ARCHIVES = ("video", "cache_dir", "force_download", "force_unzip", "local_files_only", "create_link")


class FetchedTask(_MessagesTask):
    """Loads its data as lmms-eval does; offline without its retries, which only cost time.

    converted: where `datasets` keeps what it makes of local files; None: in its usual place. Media of local files lie there
    already, so nothing is unpacked for them.
    """

    def __init__(self, config: Mapping[str, Any], offline: bool, converted: Path | None = None) -> None:
        self.offline, self.converted = offline, converted
        super().__init__(config)

    def fetch(self, dataset_kwargs: dict | None) -> None:
        method = ConfigurableTask.download
        if self.converted is not None:
            others = {name: value for name, value in (dataset_kwargs or {}).items() if name not in _OF_ARCHIVES}
            dataset_kwargs = others | {"cache_dir": str(self.converted)}
            self.converted.mkdir(parents=True, exist_ok=True)
        (method.__wrapped__ if self.offline else method)(self, dataset_kwargs)


class GivenTask(_MessagesTask):
    """A fresh task around data that are loaded already: `dataset` and `bare` map splits to documents, `bare` without
    media.

    The loop makes a plain text of every document beside its messages, which nobody reads here; a document whose fields do
    not give one shows that where its messages are made, as its own fault and not the dataset's.
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
    """A task for generation: every document is asked, nothing is scored."""

    def process_results(self, doc: Any, results: list, full_docs: Any = None) -> dict[str, Any]:
        return {}


class ScoringTask(GivenTask):
    """For scoring: only the documents with an answer have requests, so that no other one reaches the scorer.

    score(doc_id, results, run) scores a document's (filtered) answer by `run`, the task's scorer, and says which of the scores
    the aggregation gets. `aggregates` False leaves out lmms-eval's aggregation; an aggregation that raises gives no aggregate
    and is kept in `aggregation_errors`, so that it does not take the samples' scores with it. Metrics in `left_out` are not
    aggregated.
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
        # filters pair answers and documents by position: give them the documents that were answered
        self.task_docs = self.task_docs.select([instance.doc_id for instance in self._instances])
        super().apply_filters()

    def process_results(self, doc: Any, results: list, full_docs: Any = None) -> dict[str, Any]:
        return self._score(self.eval_docs_no_media.current, doc, results, full_docs)

    def _score(self, key: Any, doc: Any, results: list, full_docs: Any) -> dict[str, Any]:
        return self.score(
            key, results, lambda: ConfigurableTask.process_results.__wrapped__(self, doc, results, full_docs)
        )

    def scored(self, doc_id: int, results: list, changed: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The scorer's result for an answer to a document, which is read anew: scorers may change what they get.

        changed: columns of the document that are replaced.
        """
        doc = self.eval_docs_no_media[doc_id]
        return ConfigurableTask.process_results.__wrapped__(
            self, dict(doc) | dict(changed) if changed else doc, results
        )

    def aggregation(self) -> dict[str, Callable]:
        functions = self.metric_functions if self.aggregates else {}
        return {name: self._kept_error(name, fn) for name, fn in functions.items() if name not in self.left_out}

    def close(self) -> None:
        """Drop the references that keep this task alive: the pass around it and its requests."""
        self._instances = []
        del self.score

    def _kept_error(self, metric: str, function: Callable) -> Callable:
        @functools.wraps(function)  # the loop reads the signature
        def aggregate(*args: Any, **options: Any) -> Any:
            try:
                return function(*args, **options)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - the task's own code; told with the scores
                self.aggregation_errors[metric] = error
                return None

        return aggregate

    def aggregated(self, metrics: Mapping[tuple[str, str], list]) -> dict[str, Any]:
        """Aggregate as the loop's last step does: (metric, filter) -> results of the samples; returns them by "metric,filter"."""
        output = TaskOutput(task=self, task_name=self.config.task)
        output.sample_metrics.update(metrics)
        output.calculate_aggregate_metric(bootstrap_iters=0)
        return dict(output.agg_metrics)

    def score_answers(self, answers: Sequence[tuple[int, str]]) -> None:
        """Score several answers to each document, (doc_id, text), as the loop would score one: filters, then the scorer, which
        gets a copy of its document to change. `score` gets (doc_id, place among the answers)."""
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
        """Metric -> the function that aggregates it over samples; what a scorer returns beyond them is no metric."""
        return super().aggregation()

    @property
    def filter_names(self) -> list[str]:
        """The filters whose outputs are scored one after the other."""
        return [ensemble.name for ensemble in self._filters]


class Respondent(lmms):
    """The model lmms-eval sees: it hands each request to a function, one at a time, in their order or by the key `order`.

    An exception of that function, KeyboardInterrupt included, ends the loop; `raised` tells it from other exceptions.
    """

    is_simple = False  # the chat form: requests carry messages
    accelerator = None  # else the loop sets up accelerate; one process has one rank

    def __init__(self, answer: AnswerInstance, order: Callable[[Instance], Any] | None = None) -> None:
        super().__init__()
        self.answer, self.order = answer, order
        self.interruption: BaseException | None = None

    def generate_until(self, requests: list[Instance]) -> list[str]:
        try:
            places = list(range(len(requests)))
            if self.order is not None:
                key = self.order
                places.sort(key=lambda place: key(requests[place]))
            answers = {place: self.answer(requests[place]) for place in places}
            return [answers[place] for place in range(len(requests))]
        except BaseException as error:
            self.interruption = error
            raise

    def raised(self, error: BaseException) -> bool:
        """True where the exception came out of the answering function."""
        return error is self.interruption

    def generate_until_multi_round(self, requests: list[Instance]) -> list[str]:
        raise UnsupportedError("questions of several rounds cannot be run; choose a task that asks one")

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        raise UnsupportedError("scores by likelihood cannot be run; choose a task that generates its answers")

    def clean(self) -> None:
        """Do nothing: the base class would delete the model's modules between two datasets."""


@contextmanager
def quiet() -> Iterator[Callable[[], Any]]:
    """Swallow what lmms-eval prints (progress bars of its own, tables of its scorers), in the whole process.

    Yields a function that gives a context in which printing works as before.
    """
    out, err = sys.stdout, sys.stderr

    @contextmanager
    def loud() -> Iterator[None]:
        with redirect_stdout(out), redirect_stderr(err):
            yield

    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        yield loud


def run_loop(task: ConfigurableMessagesTask, respondent: Respondent, limit: int) -> dict[str, Any]:
    """lmms-eval's evaluation loop over one task: requests, answers, filters, scores, aggregates.

    Returns what it reports of the task: aggregates by "metric,filter", and more.

    `evaluate` and not `simple_evaluate`: the latter replaces functions of other libraries, starts git, and scores in
    four threads that share one random generator.
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
