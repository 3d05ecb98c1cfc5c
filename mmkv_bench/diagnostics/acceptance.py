"""Checks of a bundle (published rows with tables and a receipt) against the experiment that it was made for.

The experiment is the configuration on this machine, never the bundle's. Each check passes, refuses, or says why it was
not possible. Only weights and data on this machine are used; nothing but the bundle is downloaded.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import numpy as np

from mmkv_bench.config.schema import RunConfig
from mmkv_bench.datasets.sources import preflight
from mmkv_bench.diagnostics.receipt import receipts_of, tables_text
from mmkv_bench.diagnostics.remade_answers import DIFFERENT, draw, make_again
from mmkv_bench.diagnostics.replanned_cells import Row, reason_of_other
from mmkv_bench.errors import MMKVError, StoreError
from mmkv_bench.evaluation.environment import go_offline
from mmkv_bench.models.source import Source
from mmkv_bench.plan.cells import Cell
from mmkv_bench.plan.identity import dataset_identity
from mmkv_bench.plan.plan import DatasetShare, Plan
from mmkv_bench.plan.planner import outline
from mmkv_bench.plan.stale_answers import differing_prompts
from mmkv_bench.store.provenance import source_files, source_version
from mmkv_bench.store.publish import ENVIRONMENT, RECEIPT, TABLES, PublishLocation, fetch
from mmkv_bench.store.schema import RESAMPLING
from mmkv_bench.store.store import Store
from mmkv_bench.store.tally import tally

OK, REFUSED, NOT_CHECKED = "ok", "refused", "not checked"
ROUNDED = 4
"""In half precision one in so many new answers may differ, because other batches and devices round differently."""
_EXCERPT_LETTERS = 80
"""Characters of a table's line that a message shows."""
_MODEL_COLUMNS = ("model_fingerprint", "model_revision", "dtype", "torch", "transformers")
_MODEL_SETTINGS = ("path", "revision", "layers", "adapter", "tokenizer")
_COLUMNS_OF_SIMILAR = ("model", "dataset", "method", "protocol")


@dataclass(frozen=True)
class Finding:
    """The outcome of one check (`ok`, `refused` or `not checked`) and a sentence."""

    check: str
    outcome: str
    text: str

    def __str__(self) -> str:
        return f"{self.check:<9}{self.outcome}: {self.text}"


Outcome = tuple[str, str]
"""Outcome and sentence: `refused` and what is wrong, `not checked` and why, or `ok` and what was checked."""


def combine_outcomes(outcomes: Iterable[Outcome]) -> Outcome:
    """Return the worst outcome of a check, with at most three of its sentences."""
    texts: dict[str, dict[str, None]] = {REFUSED: {}, NOT_CHECKED: {}, OK: {}}
    for outcome, text in outcomes:
        texts[outcome][text] = None
    worst_outcome = next(outcome for outcome in texts if texts[outcome])
    more_text = f"; and {len(texts[worst_outcome]) - 3} more" if len(texts[worst_outcome]) > 3 else ""
    return worst_outcome, "; ".join([*texts[worst_outcome]][:3]) + more_text


@dataclass(frozen=True)
class Bundle:
    """A fetched bundle, and the experiment's plans.

    Attributes:
        rows: cell -> row of the table `cells`.
        plans: plans of the experiment's runs on this machine, with the weights and versions that the rows state.
        samples, seed: number of answers that are made again, and seed of their draw.
    """

    store: Store
    rows: dict[str, Row]
    plans: list[Plan]
    samples: int
    seed: int

    def parts(self) -> Iterator[tuple[Plan, DatasetShare, list[Cell]]]:
        """Yield (plan, dataset, planned cells that the bundle contains) for each dataset of each planned run."""
        for plan in self.plans:
            for part in plan.parts:
                yield plan, part, [cell for cell in part.cells if cell.cell in self.rows]


def findings(
    source: PublishLocation, configs: Sequence[RunConfig], folder: Path, samples: int, seed: int
) -> Iterator[Finding]:
    """Fetch a bundle and yield the outcome of one check after the other.

    Args:
        source: where the bundle is published.
        configs: configurations of the experiment's runs.
        folder: an empty folder for the bundle.
        samples, seed: number of answers that are made again, and seed of their draw.

    Raises:
        ConfigError: there is no bundle at `source`, or the experiment cannot be planned.
    """
    try:
        files, _ = fetch(source, folder)
        store = Store(folder)
        rows = {row["cell"]: row for row in store.cells().to_pylist()}
        answers, scores = (table.num_rows for table in (store.responses(columns=["cell"]), store.samples()))
    except StoreError as error:
        yield Finding("files", REFUSED, str(error).replace(str(folder), source.shown))
        return
    yield Finding("files", OK, f"{files} files with the manifest's checksums: {answers} answers, {scores} scores")
    go_offline()
    plans = []  # with the weights and versions that the rows state, so that the cells' hashes can be compared
    for config in configs:
        newest_cell = _of_model(rows, config.model.name)[-1:]
        model_facts = {name: newest_cell[0][name] for name in _MODEL_COLUMNS} if newest_cell else None
        plans.append(outline(config.updated(out=str(folder)), model_facts))
    bundle = Bundle(store, rows, plans, samples, seed)
    for check in (_code, _model, _cells, _samples, _prompts, _budgets, _scores, _tables, _receipt, _answers):
        try:
            outcome, text = combine_outcomes(check(bundle))
        except MMKVError as error:
            outcome, text = REFUSED, str(error)
        yield Finding(check.__name__.removeprefix("_"), outcome, text.replace(str(folder), source.shown))


def _of_model(rows: dict[str, Row], name: str) -> list[Row]:
    return sorted((row for row in rows.values() if row["model"] == name), key=lambda row: row["created_at"])


def _code(bundle: Bundle) -> Iterator[Outcome]:
    versions = {row["cell"]: json.loads(row["versions"]).get("mmkv_bench") for row in bundle.rows.values()}
    commits = {row["git_commit"] for row in bundle.rows.values()} - {None}
    source = f"git checkout {min(commits)[:12]}" if commits else "ask for its commit"
    install_text, version_here = f"install the version that made it ({source})", source_version()
    stated_digests, installed_digests = _sources(bundle.store.root / ENVIRONMENT), source_files()
    differing = sorted(
        name
        for name in {**installed_digests, **(stated_digests or {})}
        if installed_digests.get(name) != (stated_digests or {}).get(name)
    )
    if stated_digests is not None and differing:
        differing_files = ", ".join(differing[:3]) + ", ..." * (len(differing) > 3)
        yield (
            REFUSED,
            f"{differing_files}: {len(differing)} files of the package differ from the installed ones ({version_here}); "
            f"{install_text}",
        )
    elif other_versions := {version for version in versions.values() if version not in (None, version_here)}:
        cells_of_others = sum(version in other_versions for version in versions.values())
        made_text = f"{cells_of_others} of {len(versions)} cells were made by mmkv_bench"
        yield REFUSED, f"{made_text} {', '.join(sorted(other_versions))}, not {version_here}; {install_text}"
    elif None in versions.values():
        yield NOT_CHECKED, "rows of an older version do not state the code that made them"
    yield OK, f"mmkv_bench {version_here} made all {len(versions)} cells and is installed here"


def _sources(file: Path) -> dict[str, str] | None:
    """Return file of the package -> checksum, as the bundle recorded them; None if it has no such file."""
    try:
        recorded_checksums = json.loads(file.read_bytes())["source"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        raise StoreError(f"{ENVIRONMENT} does not list the package's files; ask for a new bundle") from None
    return dict(recorded_checksums) if isinstance(recorded_checksums, dict) else {}


def _model(bundle: Bundle) -> Iterator[Outcome]:
    """Compare the bundle's models with the experiment's by fingerprint, or by settings if the model is not on this
    machine."""
    names = []
    for plan in bundle.plans:
        name, source = plan.model.name, Source.of(plan.model)
        rows = _of_model(bundle.rows, name)
        fingerprints = ", ".join(sorted({row["model_fingerprint"] for row in rows}))
        other_kinds = {row["weights"] for row in rows} - {None, source.kind}
        expected_fingerprint = source.outlined()[1]
        names.append(f"{name} ({fingerprints})")
        if not rows:
            models_in_bundle = ", ".join(sorted({row["model"] for row in bundle.rows.values()})) or "none"
            yield REFUSED, f"no answers of {name}; the bundle has answers of: {models_in_bundle}"
        elif expected_fingerprint is not None and fingerprints != expected_fingerprint:
            yield (
                REFUSED,
                f"the weights of {name} have fingerprint {fingerprints}, those of the experiment {expected_fingerprint}",
            )
        elif other_kinds:
            yield REFUSED, f"the weights of {name} are of kind {', '.join(other_kinds)}, the experiment's {source.kind}"
        elif expected_fingerprint is None:
            model_settings = [json.loads(row["config"])["model"] for row in rows]
            for key in {
                key for key in _MODEL_SETTINGS for node in model_settings if node.get(key) != getattr(plan.model, key)
            }:
                yield REFUSED, f"{key} of {name} is not the experiment's {getattr(plan.model, key)}"
            commits = ", ".join(sorted({row["model_revision"] or "none" for row in rows}))
            yield NOT_CHECKED, f"{name} is not on this machine; the rows name {plan.model.path} at commit {commits}"
    yield OK, f"{', '.join(names)}, as the experiment names"


def _cells(bundle: Bundle) -> Iterator[Outcome]:
    """Compare the hashes of the bundle's cells, each one (method, budget) setting on one dataset, with the planned
    ones."""
    planned_hashes = {cell.cell for plan in bundle.plans for cell in plan.cells}
    further_rows = [row for row in bundle.rows.values() if row["cell"] not in planned_hashes]
    for plan in bundle.plans:
        for cell in plan.cells:
            if cell.cell in bundle.rows:
                continue
            similar_rows = [
                row for row in further_rows if all(row[name] == getattr(cell, name) for name in _COLUMNS_OF_SIMILAR)
            ]
            cells_of_dataset = [one for one in plan.cells if one.dataset == cell.dataset]
            reason = reason_of_other(similar_rows[0], cells_of_dataset) if similar_rows else "not in the bundle"
            yield REFUSED, f"{cell.model} {cell.label} on {cell.dataset}: {reason}"
    further_text = f"; {len(further_rows)} further cells are not part of the experiment" if further_rows else ""
    yield OK, f"all {len(planned_hashes)} cells of the experiment{further_text}"


def _samples(bundle: Bundle) -> Iterator[Outcome]:
    count, failures = 0, 0
    for plan, part, cells in bundle.parts():
        statuses = plan.coverage(bundle.store).statuses(part)[[cell in cells for cell in part.cells]]
        missing_answers = np.argwhere(statuses < 0)
        if part.counted == "unknown":
            yield NOT_CHECKED, f"the number of samples of {part.dataset} is unknown without its data"
        if len(missing_answers):
            cell, sample = missing_answers[0]
            missing_text = (
                f"{len(missing_answers)} of {statuses.size} answers of {plan.model.name} to {part.dataset} are missing"
            )
            yield REFUSED, f"{missing_text} (first: {cells[cell].label}, {part.samples[sample]})"
        count, failures = count + statuses.size, failures + int((statuses > 0).sum())
    yield OK, f"{count} answers, none missing" + (f", {failures} of them failures" if failures else "")


def _prompts(bundle: Bundle) -> Iterator[Outcome]:
    count = 0
    for plan, part, cells in bundle.parts():
        names = [cell.cell for cell in cells]
        try:
            preflight(part.spec)
            dataset_fingerprint = dataset_identity(part.spec).fingerprint
            changed_prompts, unreadable_prompts = differing_prompts(bundle.store, part, names, plan.limit)
        except MMKVError as error:
            yield NOT_CHECKED, str(error)
            continue
        if any(bundle.rows[name]["dataset_fingerprint"] != dataset_fingerprint for name in names):
            yield REFUSED, f"the data of {part.dataset} differ from the data on this machine ({dataset_fingerprint})"
        if changed_prompts.num_rows:
            first_changed = changed_prompts["sample_id"][0]
            yield (
                REFUSED,
                f"{changed_prompts.num_rows} answers to {part.dataset} are to other prompts (first: {first_changed})",
            )
        if unreadable_prompts.num_rows:
            yield NOT_CHECKED, f"{unreadable_prompts.num_rows} prompts of {part.dataset} cannot be read on this machine"
        count += len(part.samples)
    yield OK, f"{count} prompts, equal to the prompts made on this machine"


def _budgets(bundle: Bundle) -> Iterator[Outcome]:
    """Check each answer's budget against its cell's, and the number of kept entries against the number asked."""
    count = 0
    columns = ("sample_id", "status", "context_tokens", "budget_entries", "entries_asked", "entries_resident")
    for _, part, cells in bundle.parts():
        for cell in cells:
            if cell.budget is None:
                continue
            rows = bundle.store.responses([cell.cell], columns).to_pandas()
            rows = rows[(rows["status"] == "ok") & rows["budget_entries"].notna()]
            wrong_budgets = rows[rows["budget_entries"] != rows["context_tokens"].map(cell.budget.entries_for)]
            rows_over_budget = rows[rows["entries_resident"] > rows["entries_asked"]]
            may_exceed = (
                cell.base in RESAMPLING or cell.reading == "released" or json.loads(cell.parameters).get("over_budget")
            )
            cell_place, count = f"{cell.label} on {part.dataset}", count + len(rows)
            for row in wrong_budgets.head(1).itertuples():
                yield REFUSED, f"{cell_place}, {row.sample_id}: planned with {row.budget_entries:.0f} entries per head"
            for row in rows_over_budget.head(0 if may_exceed else 1).itertuples():
                entries_text = f"{row.entries_resident:.0f} entries for {row.entries_asked:.0f} asked"
                yield REFUSED, f"{cell_place}, {row.sample_id}: {entries_text}"
    yield OK, f"{count} answers under a budget, none with more entries than asked"


def _scores(bundle: Bundle) -> Iterator[Outcome]:
    """Check that the scores belong to the stored answers. If the data are on this machine, score the answers again."""
    digests = tally(bundle.store).digests
    digest_of_scores = {row["cell"]: row["answers_digest"] for row in bundle.store.metrics().to_pylist()}
    scores_compared = 0
    for _, part, cells in bundle.parts():
        for cell in cells:
            if cell.cell not in digest_of_scores:
                yield REFUSED, f"{cell.label} on {part.dataset} has no scores"
            elif digest_of_scores[cell.cell] not in (None, digests.get(cell.cell, (0, ""))[1]):
                scores_text = f"the scores of {cell.label} on {part.dataset}"
                yield REFUSED, f"{scores_text} belong to other answers than the stored ones"
        try:
            preflight(part.spec)
            for cell in cells:
                count, other = _compare_scores(bundle.store, part, cell.cell)
                scores_compared += count
                if other:
                    yield REFUSED, f"{cell.label} on {part.dataset}: {other}"
        except MMKVError as error:
            yield NOT_CHECKED, str(error)
    yield OK, f"{len(digest_of_scores)} cells, scored from the stored answers; {scores_compared} scores made again"


def _compare_scores(store: Store, part: DatasetShare, cell: str) -> tuple[int, str]:
    """Score the answers of a cell again, without a judge. Return their number and the first difference ("": none)."""
    from mmkv_bench.evaluation.samples import Answer
    from mmkv_bench.evaluation.scoring import score

    rows = store.responses([cell], ("sample_id", "answer", "status", "doc_id", "prompt_hash")).to_pylist()
    answers = {row["sample_id"]: Answer(*list(row.values())[1:]) for row in rows if row["status"] == "ok"}
    recomputed = (
        {(one.sample_id, one.metric): one.value for one in score(part.spec, answers).samples} if answers else {}
    )
    stored = store.samples([cell], ("sample_id", "metric", "value")).to_pylist()
    comparable_rows = [row for row in stored if recomputed.get((row["sample_id"], row["metric"])) is not None]
    differing = [row for row in comparable_rows if row["value"] != recomputed[row["sample_id"], row["metric"]]]
    if not differing:
        return len(comparable_rows), ""
    first_differing = differing[0]
    value = recomputed[first_differing["sample_id"], first_differing["metric"]]
    return len(comparable_rows), (
        f"{len(differing)} scores differ from those of the stored answers (first: {first_differing['metric']} of "
        f"{first_differing['sample_id']} is {first_differing['value']}, made again {value})"
    )


def _tables(bundle: Bundle) -> Iterator[Outcome]:
    file = bundle.store.root / TABLES
    if not file.exists():
        yield NOT_CHECKED, f"no {TABLES} in it: `mmkv-bench pack --publish <folder> --receipt <file>` writes one"
        return
    stored_lines, lines_now = file.read_text(encoding="utf-8").splitlines(), tables_text(bundle.store.root).splitlines()
    for number, pair in enumerate(zip_longest(stored_lines, lines_now, fillvalue=""), 1):
        stored_line, line_now = (re.sub(r"\s+|-{2,}", " ", line) for line in pair)  # without the padding of columns
        if stored_line != line_now:
            first_difference = next(at for at, (a, b) in enumerate(zip_longest(stored_line, line_now)) if a != b)
            excerpt_start = max(0, first_difference - _EXCERPT_LETTERS // 2)
            excerpt = slice(excerpt_start, excerpt_start + _EXCERPT_LETTERS)
            yield (
                REFUSED,
                f"line {number} of {TABLES} is '{stored_line[excerpt]}', but the rows give '{line_now[excerpt]}'",
            )
            return
    if stored_lines != lines_now:
        yield REFUSED, f"{TABLES} has different spaces from the tables of the rows"
    yield OK, f"{len(lines_now)} lines, made again to the last digit"


def _receipt(bundle: Bundle) -> Iterator[Outcome]:
    file = bundle.store.root / RECEIPT
    if file.exists():
        entries = receipts_of([file], [bundle.store.root])[bundle.store.root].values()
        answers_again, answers_equal = (sum(entry[name] for entry in entries) for name in ("made_again", "equal"))
        yield OK, f"is about these rows: {answers_again} answers were made again, {answers_equal} of them equal"
    else:
        yield NOT_CHECKED, f"no {RECEIPT} in it"


def _answers(bundle: Bundle) -> Iterator[Outcome]:
    if not bundle.samples:
        yield NOT_CHECKED, "no answer was to be made again (--samples 0)"
        return
    answers_drawn = draw([bundle.store.root], bundle.samples, bundle.seed)
    make_again(answers_drawn)
    answers_again = [one for one in answers_drawn if one.compared]
    different_answers = [one for one in answers_drawn if one.outcome == DIFFERENT]
    allowed_by_rounding = sum(one.cell["dtype"] != "float32" for one in answers_again) // ROUNDED
    certain_differences = [one for one in different_answers if {"status", "prompt_hash"}.intersection(one.differing)]
    reasons = Counter(one.outcome for one in answers_drawn if not one.compared)
    differences = [
        f"{one.cell_label} {one.row['sample_id']}: another {', '.join(one.differing)}" for one in different_answers
    ]
    problems = [
        (REFUSED, text) for text in differences if certain_differences or len(different_answers) > allowed_by_rounding
    ]
    problems += [(NOT_CHECKED, f"{count} of {len(answers_drawn)} answers: {why}") for why, count in reasons.items()]
    outcome, text = combine_outcomes([*problems, (OK, "")])
    if outcome != REFUSED and answers_again:
        differ_text = f", {len(different_answers)} differ as half precision may" if different_answers else ""
        rest_text = f"; not made again: {text}" if text else ""
        equal_count = len(answers_again) - len(different_answers)
        outcome, text = OK, f"{len(answers_again)} made again, {equal_count} equal{differ_text}{rest_text}"
    yield outcome, f"{text}; --seed {bundle.seed} draws the same"
