"""Draw mutations, run the tests that cover them, compare two lists of what was killed.

python -m tools.mutations draw --coverage cov.data --write tools/mutations/drawn.jsonl
python -m tools.mutations run  --coverage cov.data --write tools/mutations/after.jsonl
python -m tools.mutations compare tools/mutations/before.jsonl tools/mutations/after.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Sequence
from pathlib import Path

from tools.mutations.covering import Covering, present
from tools.mutations.kinds import Mutation, candidates, row_of
from tools.mutations.running import copies, judged, warm

HERE = Path(__file__).parent
ROOMS = ("compression", "generation", "store", "statistics", "tables")


def drawn(root: Path, covering: Covering, rooms: Sequence[str], share: int, seed: int) -> dict[str, Mutation]:
    """As many of each room: first a line, each as likely as every other, then what is wrong with it."""
    found: dict[str, Mutation] = {}
    for room in rooms:
        chance, lines = random.Random(f"{seed} {room}"), []
        for path in sorted((root / "mmkv_bench" / room).rglob("*.py")):
            file = str(path.relative_to(root))
            covered = covering.lines(file)
            lines += [every for row, every in candidates(file, path.read_text()).items() if row in covered]
        first = 1 + share * ROOMS.index(room)
        found |= {str(first + i): chance.choice(every) for i, every in enumerate(chance.sample(lines, share))}
    return found


def read(path: Path) -> dict[str, dict]:
    """Number -> what one line of a list says."""
    return {entry.pop("n"): entry for entry in map(json.loads, path.read_text().splitlines())}


def write(path: Path, entries: dict[str, dict]) -> None:
    """One JSON object per line, in the order of their numbers."""
    lines = [json.dumps({"n": n, **entries[n]}) for n in sorted(entries, key=int)]
    path.write_text("".join(line + "\n" for line in lines))


def mutations(path: Path, moved: Path | None) -> dict[str, Mutation]:
    """The drawn mutations; what of them reads differently since is in `moved`, under the same number."""
    entries = read(path)
    if moved and moved.exists():
        entries = {n: {**entry, **read(moved).get(n, {})} for n, entry in entries.items()}
    return {n: Mutation(**entry) for n, entry in entries.items()}


def run(asked: argparse.Namespace) -> None:
    """Judge all mutations that the list does not have yet, each process in a clone of its own."""
    covering, known = Covering(asked.coverage, asked.covered), read(asked.write) if asked.write.exists() else {}
    before = read(asked.before) if asked.before else {}
    plain, today = mutations(asked.drawn, None), mutations(asked.drawn, asked.moved)
    work = {}
    for n, mutation in today.items():
        row_of(mutation, (asked.root / mutation.file).read_text())  # a line that moved is told before an hour's work
        if n not in known and (not asked.before or before.get(n, {}).get("killed")):
            row = row_of(plain[n], (asked.covered / plain[n].file).read_text())
            killer = [before[n]["by"]] if n in before and "::" in before[n]["by"] else []
            tests = killer + covering.tests(plain[n].file, row)
            work[n] = list(dict.fromkeys(tests)) if asked.covered == asked.root else present(tests, asked.root)
    warm()
    with copies(asked.root, asked.processes) as places:
        children = []
        for share, copy in enumerate(places):
            children.append(os.fork())
            if not children[-1]:
                for n in list(work)[share :: asked.processes]:
                    _append(asked.write, n, judged(today[n], work[n], copy), today[n])
                os._exit(0)
        ended = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(ended):
        raise SystemExit(f"processes ended with {ended}; what they judged is in {asked.write}")
    write(asked.write, read(asked.write))


def _append(path: Path, n: str, said: dict, mutation: Mutation) -> None:
    with path.open("a") as stream:
        stream.write(json.dumps({"n": n, **said}) + "\n")
    print(
        n,
        "killed by" if said["killed"] else "SURVIVES",
        said["by"],
        mutation.file,
        mutation.instead.strip(),
        flush=True,
    )


def compare(before: Path, after: Path) -> int:
    """Print what was killed before and is not after; exit code 1 when there is any."""
    first, second = read(before), read(after)
    killed = [n for n, said in first.items() if said["killed"]]
    lost = [n for n in killed if not second.get(n, {}).get("killed")]
    print(
        f"{len(first)} mutations, killed before: {len(killed)}, of these after: {len(killed) - len(lost)}, lost: {lost}"
    )
    return bool(lost)


def main() -> int:
    """Exit code of the command."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("command", choices=("draw", "run", "compare"))
    options.add_argument("lists", nargs="*", type=Path, help="for compare: before and after")
    options.add_argument("--root", type=Path, default=Path.cwd(), help="the checkout, all changes committed")
    options.add_argument("--covered", type=Path, help="the checkout that the coverage is of, where it is another one")
    options.add_argument("--coverage", type=Path, help="a database made with --cov-context=test")
    options.add_argument("--drawn", type=Path, default=HERE / "drawn.jsonl")
    options.add_argument("--moved", type=Path, default=HERE / "moved.jsonl")
    options.add_argument("--before", type=Path, help="an earlier list: only what was killed then, its test first")
    options.add_argument("--write", type=Path)
    options.add_argument("--rooms", nargs="+", default=ROOMS, choices=ROOMS)
    options.add_argument("--share", type=int, default=12, help="mutations of each room")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--processes", type=int, default=2)
    asked = options.parse_args()
    if asked.command == "compare":
        return compare(*asked.lists)
    asked.covered = asked.covered or asked.root
    if asked.command == "draw":
        found = drawn(asked.root, Covering(asked.coverage, asked.root), asked.rooms, asked.share, asked.seed)
        write(asked.write, {n: vars(mutation) for n, mutation in found.items()})
    else:
        run(asked)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
