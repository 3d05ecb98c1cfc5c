"""One run from start to end: plan, print the settings, generate missing answers, score them, print the tables.

A cell is one row of the result tables: one method at one budget on one dataset (see `plan/cells.py`).
"""

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
from mmkv_bench.run.scoring import cells_to_score, score_dataset
from mmkv_bench.run.tracking import DatasetTracker, flat_config, summarise, tracker
from mmkv_bench.signals import check_stop, defer_stop_signals
from mmkv_bench.store.store import Store
from mmkv_bench.store.store_notes import name_primary
from mmkv_bench.tables.stored_rows import ReadOnce

if TYPE_CHECKING:
    from mmkv_bench.evaluation.samples import Request, SampleRef
    from mmkv_bench.store.folder import Writer
    from mmkv_bench.store.tracking import WandbTracker


def run(config: RunConfig) -> int:
    """Plan a validated configuration and carry it out. Return the exit code of `carry_out`."""
    with waiting("planning"):
        plan = make_plan(config)
    return carry_out(plan)


def carry_out(plan: Plan) -> int:
    """Generate the missing answers of a plan, score them and print the tables. Return the exit code.

    The exit code is 1 if one of the plan's stored rows is a failure, or if one of several datasets stopped because of
    an error in its data or scorer. Otherwise the exit code is 0.

    Raises:
        MMKVError: the whole run stops. The exception has the exit code.
    """
    start_time = time.perf_counter()
    is_scoring, store = plan.stage != "generate", Store(plan.out)
    store.check_writable()
    if plan.primary is not None:
        store.prepare()
        name_primary(store.root, plan.primary)
    shard, has_tracker = plan.answering.selection.shard, plan.logger.kind != "none"
    run_tracker = tracker(plan.logger, shard, store) if has_tracker else None
    judge = judge_answers(plan.judge, store.root)
    store.recover()
    changed_samples, notes_of_other_cells = changed_answers(plan, store)
    plan = plan.with_changed(changed_samples)
    rows, coverage = _read_rows(plan, store)
    _refuse_other_sharing(plan, store, coverage)
    missing_by_dataset = {part.dataset: coverage.missing(part) for part in plan.parts}
    generating = plan.stage != "score" and any(missing_by_dataset.values())
    with waiting("loading the model"):
        loaded = _load_model(plan, missing_by_dataset) if generating else None
        if loaded is not None:
            refuse_other_prompts(store, plan.names, loaded)
        prompts = _first_prompts(plan, loaded) if loaded else {}
    done_by_dataset = {part.dataset: coverage.count(part) for part in plan.parts}
    print(card(plan, done_by_dataset, prompts, loaded, notes_of_other_cells, columns(sys.stdout)), flush=True)
    spec_by_dataset = {part.dataset: part.spec for part in plan.parts}
    is_score_stage = plan.stage == "score"
    stale_cells = (
        cells_to_score(store, plan.cells, judge, rows, spec_by_dataset, undigested=is_score_stage) if is_scoring else []
    )
    if not generating:  # nothing to track
        run_tracker = None
    if run_tracker is not None:
        run_tracker.start(flat_config(plan.resolved, plan.cells))
    scored_cells, failed_rows, is_finished = 0, 0, False
    reason_by_stopped_dataset: dict[str, str] = {}
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
            store.forget_scores(changed_samples)
            with computing_with(threads_for(loaded, plan.model.threads)):
                _generate(plan, loaded, store, missing_by_dataset, run_tracker, reason_by_stopped_dataset)
            rows, coverage = _read_rows(plan, store)
            stale_cells = cells_to_score(store, plan.cells, judge, rows, spec_by_dataset) if is_scoring else []
        if stale_cells:
            del rows  # frees memory for scoring
            scored_cells = _score(store, plan.parts, stale_cells, judge, reason_by_stopped_dataset)
            rows, _ = _read_rows(plan, store)
        failed_rows = sum(coverage.failed(part) for part in plan.parts)
        is_finished = True
    finally:
        if run_tracker is not None:
            run_tracker.finish(failed=not is_finished or failed_rows > 0 or bool(reason_by_stopped_dataset))
    report = Report(plan, store, coverage, rows)
    seconds, judge_line = time.perf_counter() - start_time, judge.summary(report.metrics)
    report.close(
        missing_by_dataset if generating else dict.fromkeys(missing_by_dataset, 0),
        scored_cells,
        failed_rows,
        seconds,
        judge_line,
        reason_by_stopped_dataset,
    )
    if has_tracker and is_scoring and not reason_by_stopped_dataset and not plan.unanswered(store):
        summarise(plan.logger, shard, store, generating or bool(scored_cells))
    return 1 if failed_rows or reason_by_stopped_dataset else 0


def _read_rows(plan: Plan, store: Store) -> tuple[ReadOnce, Coverage]:
    """Read the stored rows of a plan's cells. Return a reader that caches rows, and which answers are stored.

    A plan with `stage=generate` reads only the columns that tell which answers are missing.
    """
    rows = ReadOnce(store, plan.names, further=COVERAGE_COLUMNS)
    return rows, plan.coverage(store, None if plan.stage == "generate" else rows.responses)


# ---------------------------------------------------------------------- before work
def _refuse_other_sharing(plan: Plan, store: Store, coverage: Coverage) -> None:
    """Raise ConfigError if this run's cells have rows with the other setting of `sharing`.

    The answers would be equal, but times and memory are measured differently.
    """
    if plan.stage == "score":
        return
    wanted_scope, switch = ("group", "on") if plan.answering.shares_prefill else ("own", "off")
    other_scopes = {*coverage.rows["measured"].unique().to_pylist()} - {wanted_scope}
    if other_scopes:
        raise ConfigError(
            f"sharing={switch} makes rows with measured={wanted_scope}, but {store.root} has rows of these cells with "
            f"measured={other_scopes.pop()}; give another folder (out=<folder>), or "
            f"sharing={'on' if switch == 'off' else 'off'}"
        )


def _load_model(plan: Plan, todo: Mapping[str, int]) -> LoadedModel:
    """Check the device, the data and the generation settings, and return the loaded model.

    todo: dataset to number of samples with missing answers.
    """
    from mmkv_bench.run.generate import decode_rules

    parts_to_answer = [part for part in plan.parts if todo[part.dataset]]
    plan.check_machine()
    for part in parts_to_answer:
        documents(part.spec, plan.limit)
    loaded = plan.load()
    for part in parts_to_answer:
        try:
            decode_rules(loaded, generation_settings(part.spec))
        except UnsupportedError as error:
            raise UnsupportedError(f"{part.dataset}: {error}") from error
    return loaded


def _first_prompts(plan: Plan, loaded: LoadedModel) -> dict[str, PromptSize]:
    """Map each dataset to the size of its first prompt. Datasets whose first prompt cannot be encoded are left out."""
    from mmkv_bench.evaluation.generating import generate
    from mmkv_bench.generation.encode import lengths_of
    from mmkv_bench.run.generate import encode_request

    protocols = list(dict.fromkeys(cell.protocol for cell in plan.cells))
    shown_protocol = next((name for name in protocols if name in WHOLE), protocols[0])
    size_by_dataset: dict[str, PromptSize] = {}
    for part in plan.parts:

        def measure(request: Request, dataset: str = part.dataset) -> str:
            with suppress(Exception):  # any failure of a processor becomes that sample's status later
                if request.error is None:
                    prompt = encode_request(loaded, plan.answering, request, "card", "cpu")
                    context = lengths_of(protocol(shown_protocol), prompt, loaded.family).reduced
                    size_by_dataset[dataset] = PromptSize(prompt.length, prompt.visual_tokens, context)
            return ""

        generate(part.spec, measure, 1)
    return size_by_dataset


# ---------------------------------------------------------------------- stages
def _generate(
    plan: Plan,
    loaded: LoadedModel,
    store: Store,
    todo: Mapping[str, int],
    track: WandbTracker | None,
    stopped: dict[str, str],
) -> None:
    """Generate and store the plan's missing answers. Samples that other processes of the run take are left out.

    Args:
        todo: dataset to number of samples with missing answers.
        track: the tracker that shows progress, or None.
        stopped: this function adds each dataset that could not be finished, with the reason.
    """
    from mmkv_bench.evaluation.generating import generate
    from mmkv_bench.evaluation.grader import RunningScores
    from mmkv_bench.run.generate import Answering, compiled_step

    step = compiled_step(loaded, plan.answering)
    coverage, shares_prefill = plan.coverage(store), plan.answering.shares_prefill
    queue = SampleQueueClient(check_stop)

    def answer(part: DatasetShare, writer: Writer) -> None:
        dataset_tracker = None
        if track is not None:
            running_scores = RunningScores(part.spec, plan.limit)
            dataset_tracker = DatasetTracker(part, coverage, todo[part.dataset], track, running_scores)
        confirm(part.spec, part.cells[0].dataset_fingerprint)
        inputs = Inputs(Source.of(plan.model).files(), inputs_of(part.spec), writer)
        # Progress counts samples if cells share a prefill, otherwise answers.
        progress_total = todo[part.dataset] if shares_prefill else coverage.left(part)
        label = f"{part.dataset}, {len(part.cells)} cells" + ("" if shares_prefill else " one by one")
        with Progress(progress_total, label) as bar:

            def after(rows: list[dict[str, Any]]) -> None:
                queue.done(part.dataset, rows[0]["sample_id"])
                bar.advance(int(shares_prefill))
                if dataset_tracker is not None:
                    dataset_tracker.add(rows)
                inputs.add_rows(rows)
                check_stop()

            def wanted(sample: SampleRef) -> bool:
                """Tell whether this process answers the sample. Samples of other processes advance the progress bar."""
                if not answering.wants(sample):
                    return False
                is_own = queue.take(part.dataset, sample.sample_id)
                if not is_own:
                    bar.advance(1 if shares_prefill else answering.pending(sample.sample_id))
                return is_own

            done, measures = coverage.done(part), part.spec.measures
            committed = None if shares_prefill else bar.advance
            answering = Answering(
                loaded, plan.answering, part.cells, done, writer, after, measures, step, committed=committed
            )
            try:
                generate(part.spec, answering, plan.limit, wanted, answering.asks_groups)
            finally:
                answering.close()
                if dataset_tracker is not None:
                    dataset_tracker.close()
                inputs.check()

    worker = f"w{os.getpid()}-{plan.answering.selection.shard.replace('/', 'of')}"
    with defer_stop_signals(), store.writer(worker) as writer:
        while True:
            for part in plan.parts:
                if todo[part.dataset]:
                    check_stop()
                    with _catch_dataset_error(plan.parts, part.dataset, stopped):
                        answer(part, writer)
            if not queue.again():
                return


@contextmanager
def _catch_dataset_error(parts: Sequence[DatasetShare], label: str, stopped: dict[str, str]) -> Iterator[None]:
    """Store a data or scorer error of the block in `stopped[label]`. In a run with one dataset, raise it."""
    try:
        yield
    except (DataError, ScoringError) as error:
        if len(parts) == 1:
            raise
        stopped[label] = str(error)


def _score(
    store: Store, parts: Sequence[DatasetShare], stale: Collection[str], judge: JudgeAnswers, stopped: dict[str, str]
) -> int:
    """Score the answers of the cells `stale`. Return the number of newly scored cells.

    stopped: this function adds `scoring <dataset>` with the reason for each dataset that could not be scored.
    """
    newly_scored = 0
    for part in parts:
        stale_of_part = {*stale}.intersection(cell.cell for cell in part.cells)
        if stale_of_part:
            label = f"scoring {part.dataset}"
            with Progress(len(stale_of_part), label) as bar, _catch_dataset_error(parts, label, stopped):
                confirm(part.spec, part.cells[0].dataset_fingerprint)
                newly_scored += score_dataset(store, part.spec, part.cells, bar.advance, judge, stale_of_part)
    return newly_scored
