"""Cases: a change, what a further run of the same command makes of it, and what a fresh store says of the truth."""

from __future__ import annotations

import importlib
import os
import random
import shutil
import sys
from collections import Counter
from pathlib import Path

from mmkv_bench.evaluation import documents, fingerprints
from mmkv_bench.methods import method_file
from mmkv_bench.run import origin_checks
from mmkv_bench.run.origin_checks import Inputs
from mmkv_bench.store.store import Store
from tests.identity.world import KINDS, VARIABLE, World
from tests.run.setting import Outcome, go

REFUSED, STOPPED, SAME, OTHER, RIGHT = "refused", "stopped", "not read", "other cells", "made or scored again"
PROMPTS = "are for other prompts than the present ones"  # the sentences that a change may end a run with
WHILE = "changed while the run was reading it"
SCORING = "the dataset or the task's prompt changed"


class Silent(AssertionError):
    """Old answers or scores stand for new content."""


def another_process() -> None:
    """Forget what a process remembers of earlier runs."""
    fingerprints._MEMORIES.clear()
    documents._LOADED.clear()
    documents.READ_AT_IMPORT.clear()
    method_file._module.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "words"]:
        del sys.modules[name]
    sys.path[:] = [place for place in sys.path if not (Path(place) / "words").is_dir()]
    importlib.invalidate_caches()


def said(root: Path) -> dict[str, dict[str, tuple]]:
    """Cell -> sample -> what its row and its score say."""
    store = Store(root)
    scores = {
        (row["cell"], row["sample_id"]): row["value"] for row in store.samples().to_pylist() if row["metric"] == "right"
    }
    found: dict[str, dict[str, tuple]] = {}
    for row in store.responses().to_pylist():
        key = row["cell"], row["sample_id"]
        found.setdefault(key[0], {})[key[1]] = (
            row["prompt_hash"],
            row["status"],
            tuple(row["token_ids"]),
            scores.get(key),
        )
    return found


def sentence(outcome: Outcome) -> str:
    """What a run that was stopped said; a run to its end with failed rows has none."""
    if "Traceback" in outcome.err:
        raise Silent(outcome.err)
    lines = [line for line in outcome.err.splitlines() if line.startswith("mmkv_bench: ")]
    return lines[-1] if outcome.code and lines else ""


class Fuzz:
    """Worlds below a folder, each with the rows of its first run."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.worlds, self.number = folder, dict[int, tuple[World, Path, Path]](), 0

    def world(self, kind: int) -> tuple[World, Path, Path]:
        """The world, its first rows, and a copy of its files."""
        if kind not in self.worlds:
            os.environ[VARIABLE] = "one"
            root = self.folder / f"world{kind}"
            root.mkdir()
            world = World(root / "live", KINDS[kind])
            before = self.run(world, root / "rows")
            assert before.code == 0, before.err
            shutil.copytree(root / "live", root / "copy")
            self.worlds[kind] = world, root / "rows", root / "copy"
        return self.worlds[kind]

    def run(self, world: World, rows: Path, *more: str) -> Outcome:
        another_process()
        return go(rows, *world.command, *more)

    def truth(self, world: World, rows: Path) -> Outcome:
        """A run in a store of its own, of the task's sources alone."""
        world.without_bytecode()
        return self.run(world, rows)

    def case(self, rng: random.Random) -> tuple[str, str]:
        """Make one change and look. Returns what was changed and what became of it; raises Silent."""
        world, rows, copy = self.world(rng.randrange(len(KINDS)))
        name, change = rng.choice(list(world.changes().items()))
        during = rng.random() < 0.3 and name != "variable"
        self.number += 1
        mine, fresh = (self.folder / f"{word}{self.number}" for word in ("mine", "fresh"))
        try:
            if during:
                outcome = self._during(world, mine, lambda: change(rng))
            else:
                shutil.copytree(rows, mine)
                change(rng)
                outcome = self.run(world, mine)
            truth = self.truth(world, fresh)
            judged = self._judged_during if during else self._judged
            ended = judged(world, outcome, mine, truth, said(rows), said(fresh))
            return f"{name} {'during' if during else 'before'} ({world.name})", ended
        finally:
            self.restore(world, copy, mine, fresh)

    def restore(self, world: World, copy: Path, *made: Path) -> None:
        """Put the world's files back from their copy, and remove the rows that a case has made."""
        os.environ[VARIABLE] = "one"
        shutil.rmtree(world.root)
        shutil.copytree(copy, world.root)
        for folder in made:
            shutil.rmtree(folder, ignore_errors=True)

    def _during(self, world: World, rows: Path, change: object) -> Outcome:
        plain, every, seen = Inputs.add_rows, origin_checks.EVERY_S, []

        def committed(self: Inputs, answered: object) -> None:
            seen.append(answered)
            if len(seen) == 1:
                change()  # type: ignore[operator]
            plain(self, answered)  # type: ignore[arg-type]

        try:
            Inputs.add_rows, origin_checks.EVERY_S = committed, 1e9  # type: ignore[method-assign]
            return self.run(world, rows)
        finally:
            Inputs.add_rows, origin_checks.EVERY_S = plain, every  # type: ignore[method-assign]

    def _judged(self, world: World, outcome: Outcome, mine: Path, truth: Outcome, old: dict, new: dict) -> str:
        """What became of a change before the run. A refusal's advice is followed: it ends at the rows of a fresh run."""
        word = None
        if ended := sentence(outcome):
            if PROMPTS not in ended or outcome.code != 2:
                raise Silent(f"ended with {outcome.code}: {ended}")
            outcome, word = self.run(world, mine, "retry=[changed]"), REFUSED
        if sentence(outcome) or sentence(truth) or outcome.code != truth.code:
            raise Silent(f"ended with {outcome.code}, a fresh run with {truth.code}: {outcome.err} {truth.err}")
        rows = said(mine)
        if any(rows.get(cell) != samples for cell, samples in new.items()):
            raise Silent(f"rows say {rows}, a fresh run {new}")
        return word or (SAME if new == old else OTHER if not new.keys() & old.keys() else RIGHT)

    def _judged_during(self, world: World, outcome: Outcome, mine: Path, truth: Outcome, old: dict, new: dict) -> str:
        """What became of a change during the run: each answer is one to a prompt of the one content or of the other."""
        rows, ended = said(mine), sentence(outcome)
        for cell, samples in rows.items():
            for sample, row in samples.items():
                right = [known[cell][sample] for known in (old, new) if sample in known.get(cell, {})]
                right += [(*answer, None) for *answer, _ in right if ended]  # it was stopped before it scored
                if row not in right and not (row[1] == "error" and WHILE in ended):
                    raise Silent(f"{sample} of {cell}: {row}, before {old.get(cell)}, now {new.get(cell)}")
        if ended and (outcome.code not in (1, 2) or not (WHILE in ended or SCORING in ended)):
            raise Silent(f"ended with {outcome.code}: {ended}")
        return STOPPED if ended else SAME if rows == old else RIGHT


def fuzz(made: Fuzz, seed: int, cases: int, report: bool = False) -> Counter[str]:
    """How cases ended, by word. Raises Silent with the seed of a case that fails."""
    ended = Counter[str]()
    for number in range(cases):
        try:
            what, word = made.case(random.Random(f"{seed} {number}"))
        except Silent as silent:
            raise Silent(f"seed {seed}, case {number}: {silent}") from None
        ended[word] += 1
        if report:
            print(f"{number}: {what}: {word}", flush=True)
    return ended
