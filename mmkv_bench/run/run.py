"""A run, top to bottom: plan the cells, print the card, generate missing answers, score them, print the tables."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from mmkv_bench.config.schema import RunConfig
from mmkv_bench.errors import ConfigError, DataError, ScoringError, UnsupportedError
from mmkv_bench.evaluation.documents import documents, generation_settings
from mmkv_bench.evaluation.fingerprints import confirm, inputs_of
from mmkv_bench.judging.answers import JudgeAnswers, judge_answers
from mmkv_bench.models.load import LoadedModel, computing_with, threads_for
from mmkv_bench.models.source import Source
from mmkv_bench.plan.cells import stored_rows
from mmkv_bench.plan.plan import COLUMNS as COVERAGE_COLUMNS
from mmkv_bench.plan.plan import Coverage, DatasetShare, Plan
from mmkv_bench.plan.planner import make_plan
from mmkv_bench.plan.stale_answers import changed_answers
from mmkv_bench.protocols import WHOLE, protocol
from mmkv_bench.run.console_output import PromptSize, Report, card, columns
from mmkv_bench.run.dispatch import SampleQueueClient
from mmkv_bench.run.origin_checks import Inputs, refuse_other_machine, refuse_other_prompts
from mmkv_bench.run.progress import Progress, waiting
from mmkv_bench.run.scoring import score_dataset, unscored
from mmkv_bench.run.tracking import DatasetTracker, described, summarise, tracker
from mmkv_bench.signals import check_stop, deferred
from mmkv_bench.store.store import Store
from mmkv_bench.store.store_notes import name_primary
from mmkv_bench.tables.rows import ReadOnce

if TYPE_CHECKING:
    from mmkv_bench.evaluation.samples import Request, SampleRef
    from mmkv_bench.store.folder import Writer
    from mmkv_bench.store.tracking import WandbTracker


def run(config: RunConfig) -> int:
    """Plan and run a validated configuration. Return the exit code of `carry_out`."""
    with waiting("planning"):
        plan = make_plan(config)
    return carry_out(plan)


def carry_out(plan: Plan) -> int:
    """Carry out a plan: generate missing answers, score them, print tables. Return the exit code.

    The exit code is 1 if a row of the run is a failure (its row has the reason), or if one of several datasets stopped
    because of its data or scorer. Otherwise it is 0.

    Raises:
        MMKVError: the run as a whole stops. The exception has the exit code.
    """
    started = time.perf_counter()
    scoring, store = plan.stage != "generate", Store(plan.out)
    store.check_writable()
    if plan.primary is not None:
        store.prepare()
        name_primary(store.root, plan.primary)
    shard, tracks = plan.answering.selection.shard, plan.logger.kind != "none"
    track = tracker(plan.logger, shard, store) if tracks else None
    judge = judge_answers(plan.judge, store.root)
    store.recover()
    changed, beside = changed_answers(plan, store)
    plan = plan.with_changed(changed)
    rows, coverage = _read(plan, store)
    _refuse_other_sharing(plan, store, coverage)
    todo = {part.dataset: coverage.missing(part) for part in plan.parts}
    generating = plan.stage != "score" and any(todo.values())
    with waiting("loading the model"):
        loaded = _loaded(plan, todo) if generating else None
        if loaded is not None:
            refuse_other_prompts(store, plan.names, loaded)
        prompts = _first_prompts(plan, loaded) if loaded else {}
    done = {part.dataset: coverage.count(part) for part in plan.parts}
    print(card(plan, done, prompts, loaded, beside, columns(sys.stdout)), flush=True)
    specs = {part.dataset: part.spec for part in plan.parts}
    rescores = plan.stage == "score"
    stale = unscored(store, plan.cells, judge, rows, specs, undigested=rescores) if scoring else []
    if not generating:  # nothing to track
        track = None
    if track is not None:
        track.start(described(plan.resolved, plan.cells))
    scored, failed, ended = 0, 0, False
    stopped: dict[str, str] = {}
    try:
        if loaded is not None:
            unfinished = [
                cell.cell
                for part in plan.parts
                for cell, done_of in zip(part.cells, coverage.answered(part), strict=True)
                if not done_of.all()
            ]
            store.write_cells(stored_rows(plan.cells, plan.resolved, plan.provenance, loaded.prompt_format))
            refuse_other_machine(store, unfinished, plan.provenance)
            store.forget_scores(changed)
            with computing_with(threads_for(loaded, plan.model.threads)):
                _generate(plan, loaded, store, todo, track, stopped)
            rows, coverage = _read(plan, store)
            stale = unscored(store, plan.cells, judge, rows, specs) if scoring else []
        if stale:
            del rows  # frees memory for scoring
            scored = _score(store, plan.parts, stale, judge, stopped)
            rows, _ = _read(plan, store)
        failed = sum(coverage.failed(part) for part in plan.parts)
        ended = True
    finally:
        if track is not None:
            track.finish(failed=not ended or failed > 0 or bool(stopped))
    report = Report(plan, store, coverage, rows)
    seconds, asked = time.perf_counter() - started, judge.summary(report.metrics)
    report.close(todo if generating else dict.fromkeys(todo, 0), scored, failed, seconds, asked, stopped)
    if tracks and scoring and not stopped and not plan.unanswered(store):
        summarise(plan.logger, shard, store, generating or bool(scored))
    return 1 if failed or stopped else 0


def _read(plan: Plan, store: Store) -> tuple[ReadOnce, Coverage]:
    """Read the stored rows of a plan's cells. Return a reader that caches them, and which answers are stored.

    The rows are read once for coverage, scores and tables, until something is written. A run that only generates reads just
    what it needs to find missing rows.
    """
    rows = ReadOnce(store, plan.names, further=COVERAGE_COLUMNS)
    return rows, plan.coverage(store, None if plan.stage == "generate" else rows.responses)


# ---------------------------------------------------------------------- before work
def _refuse_other_sharing(plan: Plan, store: Store, coverage: Coverage) -> None:
    """Refuse to mix rows with and without a shared prefill in one cell: answers are equal, but times and memory are not."""
    if plan.stage == "score":
        return
    wanted, switch = ("group", "on") if plan.answering.shares_prefill else ("own", "off")
    found = {*coverage.rows["measured"].unique().to_pylist()} - {wanted}
    if found:
        raise ConfigError(
            f"sharing={switch} makes rows with measured={wanted}, but {store.root} has rows of these cells with "
            f"measured={found.pop()}; give another folder (out=<folder>), or "
            f"sharing={'on' if switch == 'off' else 'off'}"
        )


def _loaded(plan: Plan, todo: Mapping[str, int]) -> LoadedModel:
    """Check device and data, then load the model and return it. Unsupported generation settings are refused here, not per
    row.

    todo: dataset to number of samples with missing answers.
    """
    from mmkv_bench.run.generate import decode_rules

    parts = [part for part in plan.parts if todo[part.dataset]]
    plan.check_machine()
    for part in parts:
        documents(part.spec, plan.limit)
    loaded = plan.load()
    for part in parts:
        try:
            decode_rules(loaded, generation_settings(part.spec))
        except UnsupportedError as error:
            raise UnsupportedError(f"{part.dataset}: {error}") from error
    return loaded


def _first_prompts(plan: Plan, loaded: LoadedModel) -> dict[str, PromptSize]:
    """Map each dataset to the size of its first prompt. A dataset whose prompt cannot be made is left out; its rows report
    the error."""
    from mmkv_bench.evaluation.generating import generate
    from mmkv_bench.generation.encode import lengths_of
    from mmkv_bench.run.generate import encoded

    protocols = list(dict.fromkeys(cell.protocol for cell in plan.cells))
    shown = next((name for name in protocols if name in WHOLE), protocols[0])
    sizes: dict[str, PromptSize] = {}
    for part in plan.parts:

        def measure(request: Request, dataset: str = part.dataset) -> str:
            with suppress(Exception):  # any failure of a processor becomes that sample's status later
                if request.error is None:
                    prompt = encoded(loaded, plan.answering, request, "card", "cpu")
                    context = lengths_of(protocol(shown), prompt, loaded.family).reduced
                    sizes[dataset] = PromptSize(prompt.length, prompt.visual_tokens, context)
            return ""

        generate(part.spec, measure, 1)
    return sizes


# ---------------------------------------------------------------------- stages
def _generate(
    plan: Plan,
    loaded: LoadedModel,
    store: Store,
    todo: Mapping[str, int],
    track: WandbTracker | None,
    stopped: dict[str, str],
) -> None:
    """Generate the plan's missing answers and store them, except those that other processes answer.

    Args:
        todo: dataset to number of samples with missing answers.
        track: the tracker that shows progress, or None.
        stopped: filled by this function: dataset that could not be finished to the reason.
    """
    from mmkv_bench.evaluation.generating import generate
    from mmkv_bench.evaluation.grader import RunningScores
    from mmkv_bench.run.generate import Answering, compiled_step

    step = compiled_step(loaded, plan.answering)
    coverage, shares = plan.coverage(store), plan.answering.shares_prefill
    queue = SampleQueueClient(check_stop)

    def answer(part: DatasetShare, writer: Writer) -> None:
        follow = None
        if track is not None:
            scores = RunningScores(part.spec, plan.limit)
            follow = DatasetTracker(part, coverage, todo[part.dataset], track, scores)
        confirm(part.spec, part.cells[0].dataset_fingerprint)
        inputs = Inputs(Source.of(plan.model).files(), inputs_of(part.spec), writer)
        # Progress counts samples if cells share a prefill, otherwise answers.
        total, label = (todo[part.dataset], "cells") if shares else (coverage.left(part), "cells one by one")
        with Progress(total, f"{part.dataset}, {len(part.cells)} {label}") as bar:

            def after(rows: list[dict[str, Any]]) -> None:
                queue.done(part.dataset, rows[0]["sample_id"])
                bar.advance(int(shares))
                if follow is not None:
                    follow.add(rows)
                inputs.committed(rows)
                check_stop()

            def wanted(sample: SampleRef) -> bool:
                """Tell whether this process must answer the sample. A sample of another process is counted as progress."""
                if not answering.wants(sample):
                    return False
                mine = queue.take(part.dataset, sample.sample_id)
                if not mine:
                    bar.advance(1 if shares else answering.pending(sample.sample_id))
                return mine

            done, committed = coverage.done(part), None if shares else bar.advance
            answering = Answering(
                loaded, plan.answering, part.cells, done, writer, after, part.spec.measures, step, committed=committed
            )
            try:
                generate(part.spec, answering, plan.limit, wanted, answering.asks_groups)
            finally:
                answering.close()
                if follow is not None:
                    follow.close()
                inputs.look()

    worker = f"w{os.getpid()}-{plan.answering.selection.shard.replace('/', 'of')}"
    with deferred(), store.writer(worker) as writer:
        while True:
            for part in plan.parts:
                if todo[part.dataset]:
                    check_stop()
                    with _one_of(plan.parts, part.dataset, stopped):
                        answer(part, writer)
            if not queue.again():
                return


@contextmanager
def _one_of(parts: Sequence[DatasetShare], label: str, stopped: dict[str, str]) -> Iterator[None]:
    """Run a block that works on one dataset.

    If the run has other datasets, an error in this one's data or scorer is written into `stopped` (dataset to reason) instead
    of raised.

    parts: the run's datasets.
    label: the block's dataset.
    """
    try:
        yield
    except (DataError, ScoringError) as error:
        if len(parts) == 1:
            raise
        stopped[label] = str(error)


def _score(
    store: Store, parts: Sequence[DatasetShare], stale: Collection[str], judge: JudgeAnswers, stopped: dict[str, str]
) -> int:
    """Score the answers of the cells `stale` (scores missing or outdated). Return the number of newly scored cells.

    stopped: filled by this function: dataset that could not be scored to the reason.
    """
    done = 0
    for part in parts:
        waiting = {*stale}.intersection(cell.cell for cell in part.cells)
        if waiting:
            label = f"scoring {part.dataset}"
            with Progress(len(waiting), label) as bar, _one_of(parts, label, stopped):
                confirm(part.spec, part.cells[0].dataset_fingerprint)
                done += score_dataset(store, part.spec, part.cells, bar.advance, judge, waiting)
    return done
