"""Single changes by somebody from outside: a byte of an input, a byte, a field or a name of what is stored.

Each must give other cells, a refusal, or the same words. What the words are of: a further run of the same command, `tables` and
`status`. A field is changed as a forger would: the file is written again with a checksum of its own.
"""

from __future__ import annotations

import contextlib
import io
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mmkv_bench.cli.main import main
from mmkv_bench.store.parts import parquet_bytes
from tests.identity.fuzz import Fuzz, Silent, said, sentence
from tests.identity.world import KINDS, World, kept_time

SAID = (
    "damage",
    "checksum",
    "without scores yet",
    "to score",
    "aggregate differs",
)  # words of a command that noticed and went on
KEPT = (".parquet", ".jsonl", ".json")


class Hunt(Fuzz):
    """Worlds as the fuzzer's, and changes of one byte, field or name in them or in their rows."""

    def mutation(self, rng: random.Random) -> tuple[str, str]:
        """Make one and look. Returns what was changed and what became of it; raises Silent."""
        kind = rng.choice((self._input, self._byte, self._field, self._name))
        return kind(rng, *self.world(rng.randrange(len(KINDS))))

    def _input(self, rng: random.Random, world: World, rows: Path, copy: Path) -> tuple[str, str]:
        file = rng.choice(sorted(path for path in world.root.rglob("*") if path.is_file() and path.stat().st_size))
        raw = bytearray(file.read_bytes())
        place = rng.randrange(len(raw))
        raw[place] ^= 1 << rng.randrange(8)
        what = f"byte {place} of {file.relative_to(world.root)}"
        self.number += 1
        mine, fresh = (self.folder / f"{word}{self.number}" for word in ("mine", "fresh"))
        shutil.copytree(rows, mine)
        try:
            with kept_time(file), file.open("r+b") as stream:
                stream.write(raw)
            outcome, truth = self.run(world, mine), self.truth(world, fresh)
            if sentence(outcome):
                return what, "refused"
            if sentence(truth) or outcome.code != truth.code:
                raise Silent(f"{what}: ended with {outcome.code}, a fresh run with {truth.code}: {truth.err}")
            new, old, now = said(fresh), said(rows), said(mine)
            if any(now.get(cell) != samples for cell, samples in new.items()):
                raise Silent(f"{what}: rows say {now}, a fresh run {new}")
            return what, "same rows" if new == old else "other cells or rows"
        finally:
            self.restore(world, copy, mine, fresh)

    def _stored(self, what: str, world: World, rows: Path, mine: Path) -> tuple[str, str]:
        """What three commands say of changed rows."""
        for name in ("tables", "status"):
            if (was := words(name, rows)) != (now := words(name, mine)):
                if now[0] == 0 and not any(word in now[1] for word in SAID):
                    raise Silent(f"{what}: {name} says {now[1]}\n, before {was[1]}")
                return what, "refused"
        before = said(rows)
        outcome = self.run(world, mine)
        if sentence(outcome):
            return what, "refused"
        if said(mine) != before:
            raise Silent(f"{what}: rows say {said(mine)}, before {before}")
        return what, "made again" if outcome.generated else "same words"

    def _copied(self, rows: Path) -> tuple[Path, list[Path]]:
        self.number += 1
        mine = self.folder / f"stored{self.number}"
        shutil.copytree(rows, mine)
        return mine, sorted(path for path in mine.rglob("*") if path.suffix in KEPT)

    def _byte(self, rng: random.Random, world: World, rows: Path, copy: Path) -> tuple[str, str]:
        mine, files = self._copied(rows)
        file = rng.choice([path for path in files if path.stat().st_size])
        raw = bytearray(file.read_bytes())
        place = rng.randrange(len(raw))
        raw[place] ^= 1 << rng.randrange(8)
        file.write_bytes(raw)
        return self._stored(f"byte {place} of rows' {file.relative_to(mine)}", world, rows, mine)

    def _field(self, rng: random.Random, world: World, rows: Path, copy: Path) -> tuple[str, str]:
        """Of scores and cells with a checksum of its own; of answers and prompts, whose measured columns nobody can know, as
        pandas writes a file."""
        mine, files = self._copied(rows)
        file = rng.choice([path for path in files if path.suffix == ".parquet"])
        table = pq.read_table(file)
        column, row = rng.choice(table.schema.names), rng.randrange(table.num_rows)
        values = table[column].to_pylist()
        before = values[row]
        kind = table.schema.field(column)
        while values[row] == before:
            values[row] = another(before, rng, values) if before is not None else made_up(kind.type)
        what = f"{column} of row {row} of {file.relative_to(mine).parts[0]}: {before!r:.60} -> {values[row]!r:.60}"
        if values[row] is None and not kind.nullable:
            return what, "same words"
        changed = table.set_column(table.schema.names.index(column), kind, [pa.array(values, kind.type)])
        changed = changed.replace_schema_metadata(None)
        if file.parent.name in ("cells", "samples", "metrics"):
            file.write_bytes(parquet_bytes(changed, compression="zstd"))
        else:
            pq.write_table(changed, file)
        return self._stored(what, world, rows, mine)

    def _name(self, rng: random.Random, world: World, rows: Path, copy: Path) -> tuple[str, str]:
        mine, files = self._copied(rows)
        file = rng.choice(files)
        way = rng.choice(("renamed", "swapped", "doubled", "gone"))
        what = f"{file.relative_to(mine)} {way}"
        place = rng.randrange(len(file.stem))
        other = file.with_name(
            file.stem[:place] + rng.choice("0123456789abcdef") + file.stem[place + 1 :] + file.suffix
        )
        if way == "renamed" and other != file:
            file.rename(other)
        elif way == "doubled" and other != file:
            shutil.copy(file, other)
        elif way == "gone":
            file.unlink()
        elif way == "swapped":
            second = rng.choice(files)
            one, two = file.read_bytes(), second.read_bytes()
            file.write_bytes(two)
            second.write_bytes(one)
            what += f" with {second.relative_to(mine)}"
        return self._stored(what, world, rows, mine)


def another(value: Any, rng: random.Random, values: list) -> Any:
    """Another value of the same type, one that could stand there."""
    others = [one for one in values if one != value]
    if others and rng.random() < 0.5:
        return rng.choice(others)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + rng.choice((1, -1, 0.5) if isinstance(value, float) else (1, -1, 7))
    if isinstance(value, str):
        place = rng.randrange(len(value) + 1)
        return value[:place] + rng.choice("0a_") + value[place + 1 :]
    if isinstance(value, list) and value:
        place = rng.randrange(len(value))
        return [*value[:place], another(value[place], rng, []), *value[place + 1 :]]
    return None


def made_up(kind: pa.DataType) -> Any:
    """A value where there was none."""
    if pa.types.is_list(kind):
        return [made_up(kind.value_type)]
    if pa.types.is_boolean(kind):
        return True
    return 0.5 if pa.types.is_floating(kind) else 1 if pa.types.is_integer(kind) else "a"


def words(name: str, rows: Path) -> tuple[int, str]:
    """A command's exit code and words over a store, without the store's own place."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([name, str(rows)])
    if "Traceback" in err.getvalue():
        raise Silent(err.getvalue())
    return code, (out.getvalue() + err.getvalue()).replace(str(rows), "ROWS")


def hunt(made: Hunt, seed: int, cases: int, report: bool = False) -> Counter[str]:
    """How changes ended, by word. Raises Silent with the number of one that nobody noticed."""
    ended = Counter[str]()
    for number in range(cases):
        try:
            what, word = made.mutation(random.Random(f"{seed} {number}"))
        except Silent as silent:
            raise Silent(f"seed {seed}, change {number}: {silent}") from None
        ended[word] += 1
        if report:
            print(f"{number}: {what}: {word}", flush=True)
    return ended
