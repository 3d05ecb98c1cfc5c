"""Stored answers that are generated again and compared: a random draw, all answers of some cells, or one sample.

Rows may store only counts and a digest of the kept positions. If the digests agree, the new answer keeps the same
positions.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mmkv_bench import consent
from mmkv_bench.diagnostics.replanned_cells import VERSIONS, ReplannedCells, Row, plan_again
from mmkv_bench.errors import ConfigError, MMKVError
from mmkv_bench.models.load import quiet_libraries
from mmkv_bench.run.progress import Progress
from mmkv_bench.store.store import Store

if TYPE_CHECKING:
    import pyarrow as pa

    from mmkv_bench.evaluation.samples import Request
    from mmkv_bench.generation.encode import EncodedPrompt
    from mmkv_bench.generation.result import ForkResult
    from mmkv_bench.models.load import LoadedModel

    Watch = Callable[[LoadedModel, Request, EncodedPrompt, Sequence[ForkResult]], None]

COMPARED = ("status", "prompt_hash", "answer", "token_ids", "kept", "kept_digest")
"""Columns that must agree; a column that is null in the stored row is not compared."""
_COLUMNS = ("cell", "dataset", "sample_id", "doc_id", *COMPARED)

SCORES = "scores"
"""Name of the comparison of an answer's scores, which are in the table `samples`."""

EQUAL, DIFFERENT, OTHER_VERSIONS, INTERRUPTED = "equal", "different", "other versions", "interrupted"
AT_ONCE = 50  # answers made again between two comparisons
FIRST = 4  # answers before the first comparison, so that the remaining time is known soon


@dataclass
class SampleTokens:
    """The tokens of a prompt.

    Attributes:
        tokens: number of tokens of the whole prompt.
        visual: int64 [V], positions of the visual tokens.
        places: float64 [V, 5], as in `report.terminal.KeptMap`. None if unknown (a video, an unknown family).
    """

    tokens: int
    visual: np.ndarray
    places: np.ndarray | None


@dataclass
class StoredAnswer:
    """A stored answer that is generated again.

    Attributes:
        root: folder of its store.
        row, cell: its row of `responses`, and the row of its cell.
        scores: metric -> stored value, without null values.
        scores_again: metric -> value of the new answer.
        outcome: `equal`, `different`, or why the answer was not made again.
        compared, differing: columns that were compared, and columns that differ; either may include `scores`.
        kept: per layer int32 [KV heads, m], kept positions of the prompt, ascending after padding of -1; None unless
            `remake` made the answer.
        prompt: tokens of the prompt, set by `remake`.
    """

    root: Path
    row: Row
    cell: Row
    scores: Mapping[str, float] = field(default_factory=dict)
    scores_again: Mapping[str, float] = field(default_factory=dict)
    outcome: str = ""
    compared: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    kept: list[np.ndarray] | None = None
    prompt: SampleTokens | None = None

    @property
    def same(self) -> bool:
        """True if all compared columns of the new answer equal those of the stored one."""
        return self.outcome == EQUAL

    @property
    def proven(self) -> bool:
        """True if the new answer is equal and the digest in the stored row confirms its kept positions."""
        return self.same and self.row["kept_digest"] is not None

    @property
    def cell_label(self) -> str:
        """Method, budget, protocol and reading of the answer's cell, as text."""
        budget = self.cell["budget_entries"] or self.cell["budget_fraction"]
        label_parts = (
            f"{self.cell['method']}@{budget}".removesuffix("@None"),
            self.cell["protocol"],
            self.cell["reading"],
        )
        return " ".join(filter(None, label_parts))

    @property
    def label(self) -> str:
        """Store, cell, dataset and sample of the answer, as text."""
        return f"{self.root} {self.cell_label} {self.row['dataset']} {self.row['sample_id']}"


def make_again(
    drawn: Sequence[StoredAnswer],
    other_versions: bool = False,
    watch: Watch | None = None,
    run_code: bool = False,
) -> None:
    """Generate stored answers again, compare them, and set the outcome in each object.

    Args:
        other_versions: do so even if the installed torch or transformers is not the version that made the rows.
        watch: called after each request, with the loaded model, the request, the prompt and the results.
        run_code: run method files that the rows name, if their content is unchanged; otherwise such code never runs.
    """
    quiet_libraries()
    answers_to_remake = []
    for one in drawn:
        differing = [name for name in VERSIONS if one.cell[name] != version(name)]
        version_texts = [f"{name} {one.cell[name]}, installed {version(name)}" for name in differing]
        one.outcome = f"{OTHER_VERSIONS} ({'; '.join(version_texts)})" if version_texts and not other_versions else ""
        answers_to_remake += [] if one.outcome else [one]
    loaded_models: dict[str, LoadedModel] = {}
    with Progress(len(answers_to_remake), "made again") as bar:
        try:
            for _, together in groupby(sorted(answers_to_remake, key=_run_key), key=_run_key):
                answers_of_group = sorted(together, key=lambda one: one.row["doc_id"])
                block_bounds = [0, *range(FIRST, len(answers_of_group), AT_ONCE), len(answers_of_group)]
                for part in (answers_of_group[begin:end] for begin, end in pairwise(block_bounds) if begin < end):
                    bar.relabel(f"{part[0].root.name} {part[0].row['dataset']}")
                    with consent.rows_name_files(_method_files(part) if run_code else ()):
                        _make_group_again(part, loaded_models, watch)
                    bar.advance(len(part))
        except KeyboardInterrupt:
            for one in answers_to_remake:
                one.outcome = one.outcome or INTERRUPTED


def _method_files(group: Iterable[StoredAnswer]) -> set[str]:
    """Return the checksums of the users' method files that made the answers; empty if shipped methods made them."""
    parameters = (json.loads(one.cell["parameters"] or "{}") for one in group)
    return {str(one["sha256"]) for one in parameters if "sha256" in one}


def draw(
    roots: Sequence[Path], count: int | None, seed: int, cells: Collection[str] | None = None, sample: str | None = None
) -> list[StoredAnswer]:
    """Draw `ok` answers at random: equally many from each store (all, if it has too few), uniformly within a store.

    Args:
        count: number of answers to draw; None: all.
        seed: seed of the draw.
        cells: hashes of the cells whose answers are drawn; None: all.
        sample: id of the only sample; None: all samples.

    Raises:
        ConfigError: no store, or a store without such answers.
    """
    import pyarrow.compute as pc

    if not roots:
        raise ConfigError(
            "no folder of rows is given; give one or more, or run the command in the folder with results/tiny"
        )
    generator = np.random.default_rng(seed)
    drawn_answers = []
    for position, root in enumerate(sorted(roots)):
        store = Store(root)
        rows = store.responses(cells, columns=("cell", "sample_id", "status"))
        eligible = pc.equal(rows["status"], "ok")
        if sample is not None:
            eligible = pc.and_(eligible, pc.equal(rows["sample_id"], sample))
        answer_positions = np.flatnonzero(eligible.to_numpy())
        if not len(answer_positions):
            if cells is None:
                raise ConfigError(f"{root} has no answers; give folders that runs printed as their rows")
            raise ConfigError(
                f"none of these cells of {root} has answered {sample or 'a sample'} with status ok; choose others"
            )
        answers_from_store = (
            len(answer_positions) if count is None else count // len(roots) + (position < count % len(roots))
        )
        if not answers_from_store:  # fewer are drawn than there are stores
            continue
        chosen_rows = rows.take(
            np.sort(generator.choice(answer_positions, min(answers_from_store, len(answer_positions)), replace=False))
        )
        drawn_answers += _stored_answers(store, {(row["cell"], row["sample_id"]) for row in chosen_rows.to_pylist()})
    return drawn_answers


def _stored_answers(store: Store, keys: Collection[tuple[str, str]]) -> list[StoredAnswer]:
    cells = {row["cell"]: row for row in store.cells({cell for cell, _ in keys}).to_pylist()}
    scores: dict[tuple[str, str], dict[str, float]] = {}
    for row in _rows_with_keys(store.samples(cells, ("cell", "sample_id", "metric", "value")), keys):
        if row["value"] is not None:
            scores.setdefault((row["cell"], row["sample_id"]), {})[row["metric"]] = row["value"]
    return [
        StoredAnswer(store.root, row, cells[row["cell"]], scores.get((row["cell"], row["sample_id"]), {}))
        for row in _rows_with_keys(store.responses(cells, _COLUMNS), keys)
    ]


def _rows_with_keys(rows: pa.Table, keys: Collection[tuple[str, str]]) -> list[Row]:
    pairs = zip(rows["cell"].to_pylist(), rows["sample_id"].to_pylist(), strict=True)
    row_numbers = [place for place, key in enumerate(pairs) if key in keys]
    return rows.take(row_numbers).to_pylist() if row_numbers else []


def _make_group_again(group: Sequence[StoredAnswer], model: dict[str, LoadedModel], watch: Watch | None) -> None:
    """Generate the answers of one dataset of one run again, and set their outcomes. model: cache of the last loaded
    model."""
    try:
        planned_cells = plan_again([one.cell for one in group])
        for one in group:
            one.outcome = planned_cells.refused.get(one.row["cell"], "")
        planned_answers = [one for one in group if not one.outcome]
        if not planned_answers:
            return
        rows = _answers(planned_cells, planned_answers, model, watch)
    except MMKVError as error:
        is_refused_code = isinstance(error, consent.CodeOfRowsError)
        for one in group:
            one.outcome = one.outcome or (str(error) if is_refused_code else f"its run cannot be planned now: {error}")
        return
    scores = _scores(planned_cells, planned_answers, rows)
    for one in planned_answers:
        key = one.row["cell"], one.row["sample_id"]
        one.compared = [name for name in COMPARED if one.row[name] is not None]
        one.differing = [name for name in one.compared if one.row[name] != rows[key][name]]
        one.scores_again = {name: value for name, value in scores.get(key, {}).items() if name in one.scores}
        if one.scores_again:
            one.compared.append(SCORES)
            has_changed_score = any(one.scores[name] != value for name, value in one.scores_again.items())
            one.differing += [SCORES] * has_changed_score
        one.outcome = DIFFERENT if one.differing else EQUAL


def _scores(
    planned: ReplannedCells, answers: Sequence[StoredAnswer], rows: Mapping[tuple[str, str], Row]
) -> dict[tuple[str, str], dict[str, float]]:
    """Return (cell, sample id) -> metric -> score of the new `ok` answers, for cells with stored scores. No judge is
    asked."""
    from mmkv_bench.evaluation.samples import Answer
    from mmkv_bench.evaluation.scoring import score

    scores: dict[tuple[str, str], dict[str, float]] = {}
    for cell in dict.fromkeys(one.row["cell"] for one in answers if one.scores):
        answers_again = {
            one.row["sample_id"]: Answer(
                new_row["answer"], new_row["status"], one.row["doc_id"], new_row["prompt_hash"]
            )
            for one in answers
            if one.row["cell"] == cell and (new_row := rows[cell, one.row["sample_id"]])["status"] == "ok"
        }
        for scored in score(planned.spec, answers_again).samples if answers_again else ():
            if scored.value is not None:
                scores.setdefault((cell, scored.sample_id), {})[scored.metric] = scored.value
    return scores


def _answers(
    planned: ReplannedCells, asked: Sequence[StoredAnswer], model: dict[str, LoadedModel], watch: Watch | None
) -> Mapping[tuple[str, str], Row]:
    """Answer the prompts again. Return (cell, sample id) -> the new row of `responses`."""
    from mmkv_bench.evaluation.documents import sample_refs
    from mmkv_bench.evaluation.generating import generate
    from mmkv_bench.models.source import Source
    from mmkv_bench.run.generate import Answering, compiled_step

    settings = str(planned.answering.model)
    if settings not in model:
        model.clear()
        model[settings] = Source.of(planned.answering.model).load()
    limit = 1 + max(one.row["doc_id"] for one in asked)
    samples = {ref.sample_id for ref in sample_refs(planned.spec, limit)}
    samples_by_cell: dict[str, set[str]] = {}
    for one in asked:
        samples_by_cell.setdefault(one.row["cell"], set()).add(one.row["sample_id"])
    cells = [planned.cells[name] for name in samples_by_cell]
    done_samples = {name: samples - ids for name, ids in samples_by_cell.items()}
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder) / "rows")
        with store.writer("verify") as writer:
            compiled_decode = compiled_step(model[settings], planned.answering)
            watch_function = None if watch is None else partial(watch, model[settings])
            answering_arguments = model[settings], planned.answering, cells, done_samples, writer
            answering = Answering(*answering_arguments, lambda rows: None, step=compiled_decode, watch=watch_function)
            try:
                generate(planned.spec, answering, limit, answering.wants, answering.asks_groups)
            finally:
                answering.close()
        rows = store.responses(samples_by_cell, ("cell", "sample_id", *COMPARED)).to_pylist()
    return {(row["cell"], row["sample_id"]): row for row in rows}


def _run_key(one: StoredAnswer) -> tuple[str, ...]:
    """Return a sort key that is equal for answers of one run: configuration, dataset and versions."""
    return one.cell["config"], one.row["dataset"], *(one.cell[name] for name in VERSIONS)


def remake(
    root: Path, cells: Collection[str], sample_id: str, other_versions: bool = False, run_code: bool = False
) -> dict[str, StoredAnswer]:
    """Answer one sample again with some cells of a store. Return hash of a cell -> its answer, with kept positions and
    prompt.

    Args:
        root: folder of the store.
        cells: hashes of the cells.
        other_versions, run_code: as in `make_again`.

    Raises:
        ConfigError: none of the cells has answered that sample.
    """
    from mmkv_bench.run.generate import visual_places

    answers_drawn = draw([root], None, 0, cells, sample_id)
    by_cell = {answer_of_cell.row["cell"]: answer_of_cell for answer_of_cell in answers_drawn}

    def watch(loaded: LoadedModel, request: Request, encoded: EncodedPrompt, results: Sequence[ForkResult]) -> None:
        visual = np.flatnonzero(encoded.types[0].cpu().numpy() > 0)
        token_boxes = visual_places(loaded, encoded, request)
        boxes = None if token_boxes is None else np.reshape(token_boxes, (-1, 6))[:, 1:]
        prompt = SampleTokens(encoded.length, visual, boxes)
        for result in results:
            answer_of_cell = by_cell[result.cell]
            answer_of_cell.kept = None if result.selected is None else [layer.numpy() for layer in result.selected]
            answer_of_cell.prompt = prompt

    make_again(answers_drawn, other_versions, watch, run_code)
    return by_cell
