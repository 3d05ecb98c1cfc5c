"""Draw mutations, run the tests that cover them, compare two lists of what was killed.

python -m tools.mutations draw --coverage cov.data --junit junit.xml --write tools/mutations/drawn.json
python -m tools.mutations run  --coverage cov.data --junit junit.xml --write tools/mutations/after.json
python -m tools.mutations compare tools/mutations/before.json tools/mutations/after.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
from pathlib import Path

from tools.mutations.covering import Covering
from tools.mutations.kinds import Mutation, candidates, row_of
from tools.mutations.running import copies, judged, warm

HERE = Path(__file__).parent
ROOMS = ("compression", "generation", "store", "statistics", "tables")


def drawn(root: Path, covering: Covering, count: int, seed: int) -> list[Mutation]:
    """As many of each room: first a line, each as likely as every other, then what is wrong with it."""
    chance, found = random.Random(seed), []
    for number, room in enumerate(ROOMS):
        lines = []
        for path in sorted((root / "mmkv_bench" / room).rglob("*.py")):
            file = str(path.relative_to(root))
            covered = covering.lines(file)
            lines += [every for row, every in candidates(file, path.read_text()).items() if row in covered]
        share = count // len(ROOMS) + (number < count % len(ROOMS))
        found += [chance.choice(every) for every in chance.sample(lines, share)]
    return found


def read(path: Path) -> dict[str, dict]:
    """Number -> what one line of a list says."""
    return {entry.pop("n"): entry for entry in map(json.loads, path.read_text().splitlines())}


def write(path: Path, entries: dict[str, dict]) -> None:
    """One JSON object per line, in the order of their numbers."""
    lines = [json.dumps({"n": n, **entries[n]}) for n in sorted(entries, key=int)]
    path.write_text("".join(line + "\n" for line in lines))


def mutations(path: Path, moved: Path) -> dict[str, Mutation]:
    """The drawn mutations, as they read today: lines that were renamed since are in `moved`, under the same number."""
    entries = read(path)
    if moved.exists():
        entries = {n: {**entry, **read(moved).get(n, {})} for n, entry in entries.items()}
    return {n: Mutation(**entry) for n, entry in entries.items()}


def run(root: Path, wanted: dict[str, Mutation], covering: Covering, path: Path, processes: int) -> None:
    """Judge all mutations that the list at `path` does not have yet, each process in a copy of its own."""
    known = read(path) if path.exists() else {}
    missing = [n for n in wanted if n not in known]
    for n in missing:
        row_of(wanted[n], (root / wanted[n].file).read_text())  # a line that moved is told before an hour's work
    warm()
    with copies(root, processes) as places:
        children = []
        for share, copy in enumerate(places):
            children.append(os.fork())
            if not children[-1]:
                _share({n: wanted[n] for n in missing[share::processes]}, covering, copy, path)
                os._exit(0)
        ended = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(ended):
        raise SystemExit(f"a process ended with {ended}; what it judged is in {path}")
    write(path, read(path))


def _share(wanted: dict[str, Mutation], covering: Covering, copy: Path, path: Path) -> None:
    for n, mutation in wanted.items():
        said = {"n": n, **judged(mutation, covering, copy)}
        with path.open("a") as stream:
            stream.write(json.dumps(said) + "\n")
        print(json.dumps(said), mutation.file, mutation.instead.strip(), flush=True)


def compare(before: Path, after: Path) -> int:
    """Print what was killed before and is not after; exit code 1 when there is any."""
    first, second = read(before), read(after)
    lost = [n for n, said in first.items() if said["killed"] and not second[n]["killed"]]
    counts = [sum(said["killed"] for said in entries.values()) for entries in (first, second)]
    print(f"{len(first)} mutations, killed before: {counts[0]}, killed after: {counts[1]}, lost: {lost or 'none'}")
    return bool(lost)


def main() -> int:
    """Exit code of the command."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("command", choices=("draw", "run", "compare"))
    options.add_argument("lists", nargs="*", type=Path, help="for compare: before and after")
    options.add_argument("--root", type=Path, default=Path.cwd(), help="the checkout, all changes committed")
    options.add_argument("--coverage", type=Path, help="made in the checkout with --cov-context=test")
    options.add_argument("--junit", type=Path, help="of the same run")
    options.add_argument("--drawn", type=Path, default=HERE / "drawn.json")
    options.add_argument("--moved", type=Path, default=HERE / "moved.json")
    options.add_argument("--write", type=Path)
    options.add_argument("--count", type=int, default=60)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--processes", type=int, default=2)
    asked = options.parse_args()
    if asked.command == "compare":
        return compare(*asked.lists)
    covering = Covering(asked.coverage, asked.junit, asked.root)
    if asked.command == "draw":
        found = drawn(asked.root, covering, asked.count, asked.seed)
        write(asked.write, {str(n): vars(mutation) for n, mutation in enumerate(found, 1)})
    else:
        run(asked.root, mutations(asked.drawn, asked.moved), covering, asked.write, asked.processes)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
