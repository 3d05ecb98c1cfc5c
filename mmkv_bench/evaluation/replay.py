"""One pass of lmms-eval's loop over stored answers, which gives its scorer's results for the samples and its aggregates."""

from __future__ import annotations

import numbers
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import chdir, contextmanager
from functools import cached_property
from types import ModuleType
from typing import Any, TypeAlias

from mmkv_bench.datasets.specs import TaskSpec
from mmkv_bench.errors import DataError
from mmkv_bench.evaluation import task_scorer
from mmkv_bench.evaluation.captions import Captioned, caption_scores, holds_caption, kind_of
from mmkv_bench.evaluation.documents import Documents, documents, task_config
from mmkv_bench.evaluation.environment import lmms_eval, scoring_errors, task_environment, task_errors
from mmkv_bench.evaluation.samples import SampleRef
from mmkv_bench.judging.client import ScoringPass, proxy
from mmkv_bench.judging.questions import PAIRED, pair_score, pairs

Key: TypeAlias = Any
"""A document, or (document, number of the answer) in a pass over several answers per document."""

JAVA_FOR_EACH = (
    "lmms-eval starts Java for each caption metric: it aggregates only those that the dataset's `metrics` name"
)

OTHER_FREQUENCIES = (
    "lmms-eval's CIDEr has the document frequencies of the documents asked, ours those of the whole dataset: they compare "
    "where the whole dataset is asked"
)


class Replay:
    """One pass of lmms-eval's loop over the answered documents, around a new task.

    values: score of each document and metric ({doc_id: {metric: score}}).
    parts: in the same form, the numbers from which corpus scores are computed.
    unaggregated: metric to the reason why lmms-eval has no aggregate of it.
    With several filters, metrics are named "metric,filter".
    """

    def __init__(self, spec: TaskSpec, docs: Documents, texts: Mapping[int, str], scoring_pass: ScoringPass) -> None:
        self.spec, self.docs, self.texts, self.scoring_pass = spec, docs, texts, scoring_pass
        self.values: dict[Key, dict[str, float]] = {}
        self.parts: dict[Key, dict[str, tuple[float, ...]]] = {}
        self.unaggregated: dict[str, str] = {}
        self.captions: dict[str, dict[int, Captioned]] = {}  # metric -> doc_id -> caption
        self.halves: dict[str, dict[int, Mapping[str, Any]]] = {}  # metric of pairs -> doc_id -> the scorer's result
        self.unheard: set[int] = set()  # documents whose choice a judge should have read
        self.position: SampleRef | None = None
        self.passes: dict[Key, int] = {}  # index of the last filter whose output was scored

    def run(self, with_aggregates: bool, over_samples: bool = True) -> dict[str, float]:
        """Run lmms-eval's loop over the stored answers, and return metric -> lmms-eval's aggregate.

        with_aggregates: compute aggregates; otherwise the result is empty.
        over_samples: also score metrics that combine several samples; otherwise these are only named (`names_of`).
        """
        config = task_config(self.spec)
        with scorer_surroundings(self.spec) as module:
            self.open(config, with_aggregates)
            with scoring_errors(self.spec.name, self._where):
                results = module.run_loop(
                    self.task,
                    module.Respondent(lambda instance: self.texts[instance.doc_id]),
                    limit=len(self.docs.refs),
                )
                if over_samples:
                    self._score_captions()
                    self._score_pairs()
        count_parsed(self.values, self.unheard)
        aggregates = self.aggregates(results) if with_aggregates else {}
        self.close()
        return aggregates

    def close(self) -> None:
        """Drop the task, which refers to this object, so that Python frees both, with all answers, at once."""
        self.task.close()
        del self.task

    def names_of(self, doc_id: int) -> list[str]:
        """Return the metrics that the scorer gave a sample, including metrics that combine several samples."""
        collected_names = [
            name for each in (self.captions, self.halves) for name, of_docs in each.items() if doc_id in of_docs
        ]
        return list(dict.fromkeys([*self.values.get(doc_id, {}), *collected_names]))

    def open(self, config: Mapping[str, Any], with_aggregates: bool) -> None:
        """Make a new task object from a configuration.

        Raises:
            ScoringError: the task's scorer asks a judge at another address than the proxy's.
        """
        with task_errors(self.spec.name):
            module = lmms_eval(self.spec.offline)
            self.task = module.ScoringTask(config, self.docs.bare, set(self.texts), with_aggregates, self._score)
        if self.spec.metrics:  # this package's caption metrics use the same Java programs, started once for all
            names = [name for name in self.task.metric_functions if name not in self.spec.metrics and kind_of(name)]
            self.task.left_out = names
        if not self.spec.is_pages:
            proxy().listen()
            task_scorer.refuse_other_judges(self.spec.name, self.task, proxy().root)

    def _doc(self, key: Key) -> int:
        """Return the doc_id that belongs to a key of `values`. Here the key is the doc_id; subclasses have other keys."""
        return int(key)

    def _score(self, key: Key, results: list, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Score one sample, and return the values that lmms-eval may aggregate.

        Questions to a judge are recorded for the sample. Values made from an unanswered question are not returned.

        run: function that returns the scorer's result for the sample's answer. results: the filtered answer.
        """
        doc_id = self._doc(key)
        with self.scoring_pass.of([doc_id]):
            try:
                self.position = self.docs.refs[doc_id]
                task_scorer.untouched(self.identity(doc_id))  # computed before seeding, because it sets the generators
                task_scorer.seed(self.identity(doc_id))
                metrics = run()
                self._after(key, metrics, results)
            except (Exception, SystemExit):
                if self.scoring_pass.lacks(doc_id):
                    return {}
                raise
        unjudged_metrics = self.scoring_pass.unanswered.get(doc_id, {})
        return {
            name: value
            for name, value in metrics.items()
            if name not in unjudged_metrics and None not in unjudged_metrics
        }

    def identity(self, doc_id: int) -> str:
        """Return the text from which the random generators are seeded before a document is scored."""
        return f"{self.spec.name}/{doc_id}"

    def _after(self, key: Key, metrics: Mapping[str, Any], results: list) -> None:
        doc_id = self._doc(key)
        pass_number = self.passes[key] = self.passes.get(key, -1) + 1
        functions = self.task.metric_functions
        identity = self.identity(doc_id)
        has_drawn = task_scorer.drawn() != task_scorer.untouched(identity)
        is_guess = has_drawn and task_scorer.guessed(identity, metrics, lambda: self.task.scored(doc_id, results))
        if not has_drawn:
            task_scorer.seed(identity)  # as the scorer left it
        values = self.values.setdefault(key, {})
        for metric, raw in metrics.items():
            if metric not in functions and metric not in task_scorer.BESIDE:
                continue
            name = self._name(metric, pass_number)
            if kind_of(metric) and holds_caption(raw):
                self.captions.setdefault(name, {})[key] = Captioned(raw["pred"], tuple(raw["answer"]))
                continue
            if metric in PAIRED:
                self.halves.setdefault(name, {})[key] = raw
                continue
            value = task_scorer.sample_value(metric, raw, functions.get(metric))
            if value is None:  # a metric over many samples
                continue
            # A guess keeps its drawn score if lower values of the metric are better.
            is_lower_better = metric not in task_scorer.BESIDE and self.task.higher_is_better().get(metric) is False
            values[name] = 0.0 if is_guess and not is_lower_better else value
            if isinstance(raw, Mapping) and "parts" in raw:  # a task of ours whose metric is no mean
                self.parts.setdefault(key, {})[name] = tuple(map(float, raw["parts"]))
        if task_scorer.tells_right_only(metrics):
            if self.scoring_pass.lacks(doc_id):
                self.unheard.add(key)  # only the judge can say which choice was read
            else:
                right_under_no_key = task_scorer.right_under_no_key(
                    metrics, lambda key: self.task.scored(doc_id, results, key)
                )
                values[self._name(task_scorer.PARSE_FAILED, pass_number)] = float(right_under_no_key)
        elif is_guess or self._may_draw or not task_scorer.UNREAD.keys().isdisjoint(metrics):
            values[self._name(task_scorer.PARSE_FAILED, pass_number)] = float(is_guess or task_scorer.unread(metrics))

    @cached_property
    def _may_draw(self) -> bool:
        return task_scorer.may_draw(self.task.config.process_results)

    def _name(self, metric: str, number: int) -> str:
        filters = self.task.filter_names
        return metric if len(filters) == 1 else f"{metric},{filters[number]}"

    def _score_captions(self) -> None:
        """Score the collected captions of each filter, with the references of all documents."""
        for suffix in {name.partition(",")[2] for name in self.captions}:
            name_parts = {name: name.partition(",") for name in self.captions}
            names = {name: kind for name, (of, _, it) in name_parts.items() if it == suffix and (kind := kind_of(of))}
            captions = self.captions[next(iter(names))]
            all_captions = {
                ref.doc_id: captions.get(ref.doc_id) or self._without_caption(ref.doc_id) for ref in self.docs.refs
            }
            captions_not_asked = {doc_id: self._without_caption(doc_id) for doc_id in self._unasked(names.values())}
            scored = caption_scores(names.values(), all_captions, captions_not_asked)
            for name, kind in names.items():
                for doc_id, (value, parts) in scored[kind].items():
                    if value is not None:
                        self.values.setdefault(doc_id, {})[name] = value
                    if parts is not None:
                        self.parts.setdefault(doc_id, {})[name] = parts

    def _unasked(self, kinds: Collection[str]) -> range:
        """Return the documents that this cell was not asked about; none unless `kinds` has CIDEr, whose document
        frequencies cover the whole dataset."""
        count = len(self.docs.refs)
        return range(count, len(documents(self.spec, None).refs) if "CIDEr" in kinds else count)

    def _score_pairs(self) -> None:
        """Score pairs of samples, and give both samples the score. Pairs are formed from all documents, answered or not."""
        docs = self.docs.bare[self.docs.split]
        for name, halves in self.halves.items():
            metric = task_scorer.base_metric(name)
            for pair in pairs([docs[ref.doc_id][PAIRED[metric]] for ref in self.docs.refs]):
                if not halves.keys() >= set(pair):
                    continue
                with self.scoring_pass.of(pair):
                    value = pair_score(halves[pair[0]], halves[pair[1]], self.task.metric_functions[metric])
                for doc_id in pair:
                    self.values[doc_id][name] = value

    def _without_caption(self, doc_id: int) -> Captioned:
        """Return the references of a document without an answer, as the scorer returns them for an empty answer."""
        for metric, raw in self.task.scored(doc_id, [""]).items():
            if kind_of(metric) and holds_caption(raw):
                return Captioned(None, tuple(raw["answer"]))
        raise DataError(f"document {doc_id} of task {self.spec.name} has no reference captions")

    def _where(self) -> str:
        return f"sample {self.position.sample_id}" if self.position else "its start"

    def aggregates(self, results: Mapping[str, Any]) -> dict[str, float]:
        """Return metric -> number in lmms-eval's report, and put the reasons of metrics without a number into
        `unaggregated`."""
        numeric_aggregates = {}
        for key, value in results.items():  # "metric,filter" -> number, and more that is none
            metric, comma, _ = key.partition(",")
            if comma and metric in self.task.metric_functions and isinstance(value, numbers.Real):
                numeric_aggregates[metric if len(self.task.filter_names) == 1 else key] = float(value)
        self.unaggregated |= dict.fromkeys(self.task.left_out, JAVA_FOR_EACH)
        kind_of_name = {name: kind_of(task_scorer.base_metric(name)) for name in self.captions}
        partial_ciders = [name for name, kind in kind_of_name.items() if kind == "CIDEr" and self._unasked(["CIDEr"])]
        for name in numeric_aggregates.keys() & partial_ciders:
            del numeric_aggregates[name]
            self.unaggregated[name] = OTHER_FREQUENCIES
        for metric, error in self.task.aggregation_errors.items():
            self.unaggregated[metric] = f"lmms-eval's aggregation failed: {error!r}"
        return numeric_aggregates


def count_parsed(values: Mapping[int, dict[str, float]], unheard: Collection[int] = ()) -> None:
    """If any sample has `parse_failed`, add the value 0 to all other samples. values: doc_id -> metric -> score,
    changed in place.

    unheard: documents whose choice a judge should have read; these get no value.
    """
    for name in [name for name in set().union(*values.values()) if name.startswith(task_scorer.PARSE_FAILED)]:
        for doc_id, scores in values.items():
            if doc_id not in unheard:
                scores.setdefault(name, 0.0)


@contextmanager
def scorer_surroundings(spec: TaskSpec) -> Iterator[ModuleType]:
    """Context manager in which a task's scorer may run. It yields the module `lmms_eval_loop`.

    Nothing is printed, the scorer's environment variables are set, and the working folder is temporary. The state of
    the random generators is restored afterwards.
    """
    module = lmms_eval(spec.offline)
    with (
        module.quiet(),
        task_environment(spec.media_root),
        task_scorer.state_kept(),
        tempfile.TemporaryDirectory(prefix="mmkv_bench_") as folder,
        chdir(folder),
    ):
        yield module
