"""Stored answers made again and compared: a random draw of them, or one sample with the tokens that its cells keep.

Rows may hold counts and a digest of the kept indices alone; a remade answer keeps the same ones where the digests agree.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from mmkv_bench import __version__, consent
from mmkv_bench.diagnostics.replanned_cells import VERSIONS, ReplannedCells, Row, plan_again
from mmkv_bench.errors import ConfigError, MMKVError
from mmkv_bench.models.load import quiet_libraries
from mmkv_bench.run.progress import Progress
from mmkv_bench.store.store import Store

if TYPE_CHECKING:
    import numpy as np

    from mmkv_bench.evaluation.samples import Request
    from mmkv_bench.generation.encode import EncodedPrompt
    from mmkv_bench.generation.result import ForkResult
    from mmkv_bench.models.load import LoadedModel

    RequestTimeout = Callable[[LoadedModel, Request, EncodedPrompt, Sequence[ForkResult]], None]

COMPARED = ("status", "prompt_hash", "answer", "token_ids", "kept", "kept_digest")
"""Columns that must agree; a column that is null in the stored row is not compared."""
_COLUMNS = ("cell", "dataset", "sample_id", "doc_id", *COMPARED)

EQUAL, DIFFERENT, OTHER_VERSIONS = "equal", "different", "other versions"


@dataclass
class SampleTokens:
    """A prompt as its cells read it.

    Attributes:
        tokens: of the whole prompt; visual: int64 [V], positions of the visual ones.
        places: float64 [V, 5], of every visual token its image's number, and top, bottom, left and right as parts of the image's
            sides; -1 where it shows no place. None where no rule tells them (a video, an unknown family).
    """

    tokens: int
    visual: np.ndarray
    places: np.ndarray | None


@dataclass
class StoredAnswer:
    """An answer that is made again: its store, its `responses` row and the row of its cell; then the outcome.

    Attributes:
        outcome: `equal`, `different`, or why the answer was not made again; differing: columns that are not equal.
        kept: per layer int32 [KV heads, m], kept positions of the prompt, ascending behind padding of -1; None unless `remake`
            made it. prompt: the one that it was made of.
    """

    root: Path
    row: Row
    cell: Row
    outcome: str = ""
    differing: list[str] = field(default_factory=list)
    kept: list[np.ndarray] | None = None
    prompt: SampleTokens | None = None

    @property
    def same(self) -> bool:
        """True where everything that the stored row says of the answer holds again."""
        return self.outcome == EQUAL

    @property
    def proven(self) -> bool:
        """True where the stored row has a digest of the kept positions, and `kept` has the same."""
        return self.same and self.row["kept_digest"] is not None

    @property
    def label(self) -> str:
        """Store, method at its budget, protocol, reading, dataset and sample."""
        budget = self.cell["budget_entries"] or self.cell["budget_fraction"]
        words = (f"{self.cell['method']}@{budget}".removesuffix("@None"), self.cell["protocol"], self.cell["reading"])
        return " ".join(filter(None, (str(self.root), *words, self.row["dataset"], self.row["sample_id"])))


def make_again(
    drawn: Sequence[StoredAnswer],
    other_versions: bool = False,
    watch: RequestTimeout | None = None,
    run_code: bool = False,
) -> None:
    """Make these answers again and write the outcome into each.

    Args:
        other_versions: also where torch and transformers are installed in other versions than made the rows.
        watch: called with the model, and with its answers as `run.generate.Watch` says.
        run_code: run the method files that the rows name, where their content is the rows'; else nothing that rows name runs.
    """
    quiet_libraries()
    wanted = []
    for one in drawn:
        differing = [name for name in VERSIONS if one.cell[name] != version(name)]
        other = [f"{name} {one.cell[name]}, installed {version(name)}" for name in differing]
        one.outcome = f"{OTHER_VERSIONS} ({'; '.join(other)})" if other and not other_versions else ""
        wanted += [] if one.outcome else [one]
    model: dict[str, LoadedModel] = {}
    with Progress(len(wanted), "made again", unit="answers") as bar:
        for _, together in groupby(sorted(wanted, key=_run_of), key=_run_of):
            group = list(together)
            bar.relabel(f"{group[0].root.name} {group[0].row['dataset']}")
            with consent.rows_name_files(_method_files(group) if run_code else ()):
                _repeat(group, model, watch)
            bar.advance(len(group))


def _method_files(group: Iterable[StoredAnswer]) -> set[str]:
    """List the checksums of the method files that made the answers, where their cells store one."""
    parameters = (json.loads(one.cell["parameters"] or "{}") for one in group)
    return {str(one["sha256"]) for one in parameters if "sha256" in one}


def draw(roots: Sequence[Path], k: int, seed: int) -> list[StoredAnswer]:
    """Draw k `ok` answers, evenly from each store and uniformly within it; all of a store that has fewer."""
    import numpy as np
    import pyarrow.compute as pc

    if not roots:
        raise ConfigError("no folder of rows is given; name some, or run it where results/tiny lies")
    generator = np.random.default_rng(seed)
    drawn = []
    for position, root in enumerate(sorted(roots)):
        store = Store(root)
        rows = store.responses(columns=("cell", "sample_id", "status"))
        places = np.flatnonzero(pc.equal(rows["status"], "ok").to_numpy())
        if not len(places):
            raise ConfigError(f"{root} holds no answers; give folders of rows, as runs print them")
        share = k // len(roots) + (position < k % len(roots))
        if not share:  # fewer are drawn than there are stores
            continue
        chosen = rows.take(np.sort(generator.choice(places, min(share, len(places)), replace=False))).to_pylist()
        cells = {row["cell"]: row for row in store.cells({row["cell"] for row in chosen}).to_pylist()}
        answers = store.responses(cells, _COLUMNS)
        keys_drawn = {(row["cell"], row["sample_id"]) for row in chosen}
        keys = zip(answers["cell"].to_pylist(), answers["sample_id"].to_pylist(), strict=True)
        rows = answers.take([place for place, key in enumerate(keys) if key in keys_drawn]).to_pylist()
        drawn += [StoredAnswer(root, row, cells[row["cell"]]) for row in rows]
    return drawn


def lines(drawn: Sequence[StoredAnswer]) -> Iterator[str]:
    """The report: a line per store, each difference, each reason, and the sum."""
    for root in dict.fromkeys(one.root for one in drawn):
        of = Counter(_kind(one) for one in drawn if one.root == root)
        yield f"{root}: {sum(of.values())} drawn, {', '.join(f'{count} {kind}' for kind, count in sorted(of.items()))}"
    for one in drawn:
        if one.outcome == DIFFERENT:
            yield f"different: {one.label}: {', '.join(one.differing)}{_elsewhere(one)}"
    for reason, count in Counter(one.outcome for one in drawn if one.outcome not in (EQUAL, DIFFERENT)).items():
        first = next(one for one in drawn if one.outcome == reason)
        yield f"not made again: {count} because of {reason}; first {first.label}"
    equal = [one for one in drawn if one.outcome == EQUAL]
    counts = {name: sum(one.row[name] is not None for one in equal) for name in COMPARED[2:]}
    yield f"equal: {len(equal)} of {len(drawn)} drawn ({', '.join(f'{name} in {n}' for name, n in counts.items())})"


def receipt(drawn: Sequence[StoredAnswer], seed: int) -> str:
    """A line to put beside published rows: what was compared, in which draw, under which versions."""
    from mmkv_bench.store.provenance import collect

    here = collect()
    commit = f", commit {here['git_commit'][:12]}" * bool(here["git_commit"]) + ", changed" * bool(here["git_dirty"])
    under = ", ".join(f"{name} {version(name)}" for name in VERSIONS)
    return (
        f"receipt: {len(drawn)} answers, seed {seed}; compared: {', '.join(COMPARED)}; mmkv_bench {__version__}{commit}, "
        f"{under}, on {here['cpu'] or here['device']}"
    )


def exit_code(drawn: Sequence[StoredAnswer]) -> int:
    """0: all that were made again are equal; 1: some differ; 2: none could be made again."""
    outcomes = {one.outcome for one in drawn}
    return 1 if DIFFERENT in outcomes else 0 if EQUAL in outcomes else 2


def _repeat(group: Sequence[StoredAnswer], model: dict[str, LoadedModel], watch: RequestTimeout | None) -> None:
    """Make the answers of one run's dataset again; `model` holds the one loaded last."""
    try:
        planned = plan_again([one.cell for one in group])
        for one in group:
            one.outcome = planned.refused.get(one.row["cell"], "")
        planned_answers = [one for one in group if not one.outcome]
        if not planned_answers:
            return
        rows = _answers(planned, planned_answers, model, watch)
    except consent.CodeOfRowsError as error:
        for one in group:
            one.outcome = one.outcome or str(error)
        return
    except MMKVError as error:
        for one in group:
            one.outcome = one.outcome or f"its run being refused now: {error}"
        return
    for one in planned_answers:
        now = rows[one.row["cell"], one.row["sample_id"]]
        one.differing = [name for name in COMPARED if one.row[name] is not None and one.row[name] != now[name]]
        one.outcome = DIFFERENT if one.differing else EQUAL


def _answers(
    planned: ReplannedCells, asked: Sequence[StoredAnswer], model: dict[str, LoadedModel], watch: RequestTimeout | None
) -> Mapping[tuple[str, str], Row]:
    """Answer again: (cell, sample) -> the new row."""
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
    wanted: dict[str, set[str]] = {}
    for one in asked:
        wanted.setdefault(one.row["cell"], set()).add(one.row["sample_id"])
    cells = [planned.cells[name] for name in wanted]
    done = {name: samples - ids for name, ids in wanted.items()}
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder) / "rows")
        with store.writer("verify") as writer:
            step = compiled_step(model[settings], planned.answering)
            watched = None if watch is None else partial(watch, model[settings])
            parts = model[settings], planned.answering, cells, done, writer
            answering = Answering(*parts, lambda rows: None, step=step, watch=watched)
            try:
                generate(planned.spec, answering, limit, answering.wants)
            finally:
                answering.close()
        rows = store.responses(wanted, ("cell", "sample_id", *COMPARED)).to_pylist()
    return {(row["cell"], row["sample_id"]): row for row in rows}


def _run_of(one: StoredAnswer) -> tuple[str, ...]:
    """The key of rows that are made again together."""
    return one.cell["config"], one.row["dataset"], *(one.cell[name] for name in VERSIONS)


def _kind(one: StoredAnswer) -> str:
    return one.outcome.partition(" (")[0].partition(":")[0]


def _elsewhere(one: StoredAnswer) -> str:
    from mmkv_bench.store.provenance import collect

    here, there = collect()["cpu"], one.cell["cpu"]
    return "" if here == there or there is None else f" (made on {there}, here {here})"


def remake(
    root: Path, cells: Collection[str], sample_id: str, other_versions: bool = False, run_code: bool = False
) -> dict[str, StoredAnswer]:
    """Answer one sample again with these cells of a store, and return each answer by its cell's hash.

    Args:
        other_versions: also where other versions of torch or transformers are installed than made the rows.
        run_code: see `make_again`.

    Raises:
        ConfigError: none of the cells has answered that sample.
    """
    stored = stored_answers(Store(root), cells, sample_id)
    if not stored:
        raise ConfigError(f"none of these cells of {root} has answered {sample_id}; there is nothing to make again")
    by_cell = {one.row["cell"]: one for one in stored}

    def watch(loaded: LoadedModel, request: Request, encoded: EncodedPrompt, results: Sequence[ForkResult]) -> None:
        prompt = _sample_tokens(loaded, request, encoded)
        for result in results:
            one = by_cell[result.cell]
            one.kept = None if result.selected is None else [layer.numpy() for layer in result.selected]
            one.prompt = prompt

    make_again(stored, other_versions, watch, run_code)
    return by_cell


def stored_answers(store: Store, cells: Collection[str], sample_id: str) -> list[StoredAnswer]:
    """The `ok` answers of these cells to the sample."""
    import pyarrow.compute as pc

    rows = store.responses(cells, _COLUMNS)
    rows = rows.filter(pc.and_(pc.equal(rows["sample_id"], sample_id), pc.equal(rows["status"], "ok")))
    described = {row["cell"]: row for row in store.cells(rows["cell"].to_pylist()).to_pylist()}
    return [StoredAnswer(store.root, row, described[row["cell"]]) for row in rows.to_pylist()]


def _sample_tokens(loaded: LoadedModel, request: Request, encoded: EncodedPrompt) -> SampleTokens:
    import numpy as np

    from mmkv_bench.run.prompt_rows import visual_places

    visual = np.flatnonzero(encoded.types[0].cpu().numpy() > 0)
    places = visual_places(loaded, encoded, request)
    return SampleTokens(encoded.length, visual, None if places is None else np.reshape(places, (-1, 6))[:, 1:])
