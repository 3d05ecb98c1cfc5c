"""`make size`: count lines of code per room, words of the docs, and files that the first command and the configuration reach."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "mmkv_bench"
COMMAND = ("method=mmshift", "budget=64", "limit=3")
SPACE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}

TRACED = """
import sys, threading
from inspect import CO_NEWLOCALS, CO_OPTIMIZED
package, report, *words = sys.argv[1:]
files = set()

def record(frame, event, argument):
    code = frame.f_code
    if event == "call" and code.co_flags & CO_OPTIMIZED and code.co_flags & CO_NEWLOCALS and not code.co_name.endswith(
        ("comp>", "genexpr>")
    ):
        files.add(code.co_filename)

threading.setprofile(record)
sys.setprofile(record)
from mmkv_bench.cli.main import main
ended = main(words)
sys.setprofile(None)
with open(report, "w") as out:
    out.writelines(name + "\\n" for name in sorted(files) if name.startswith(package))
sys.exit(ended)
"""


def lines_of_code(file: Path) -> int:
    """Count the lines of code of a file, without blank lines, comments and docstrings."""
    lines: set[int] = set()
    with tokenize.open(file) as source:
        for token in tokenize.generate_tokens(source.readline):
            if token.type not in SPACE:
                lines.update(range(token.start[0], token.end[0] + 1))
    for start, end in docstrings(ast.parse(file.read_bytes())):
        lines.difference_update(range(start, end + 1))
    return len(lines)


def docstrings(tree: ast.Module) -> Iterator[tuple[int, int]]:
    """Yield first and last line of each bare string: docstrings, and notes below attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.end_lineno or node.lineno


def by_room() -> dict[str, tuple[int, int, int]]:
    """Return files, lines and lines of code of each room, largest room first; files outside rooms count as `(top)`."""
    counts: dict[str, Counter[str]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(PACKAGE).parts
        room = counts.setdefault(parts[0] if len(parts) > 1 else "(top)", Counter())
        room.update(files=1, lines=len(file.read_text().splitlines()), code=lines_of_code(file))
    rows = {name: (room["files"], room["lines"], room["code"]) for name, room in counts.items()}
    return dict(sorted(rows.items(), key=lambda row: -row[1][2]))


def words() -> dict[str, int]:
    """Count the words of README and of each page of docs/, as `wc -w` does."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return {str(page.relative_to(ROOT)): len(page.read_text().split()) for page in pages}


def executed() -> list[str]:
    """Return the package's files with a function that the first command calls; class bodies and comprehensions do not count.

    Raises:
        RuntimeError: the command failed; the message has the end of its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "files"
        command = [sys.executable, "-c", TRACED, str(PACKAGE), str(report), *COMMAND, f"out={folder}/rows"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=environment)
        if ended.returncode:
            raise RuntimeError(f"{' '.join(COMMAND)} ended with {ended.returncode}: {ended.stderr[-500:]}")
        return [str(Path(name).relative_to(PACKAGE)) for name in report.read_text().splitlines()]


def mentioning(word: str) -> list[str]:
    """Return the package's files that contain a word."""
    whole = re.compile(rf"\b{word}\b")
    return [str(file.relative_to(PACKAGE)) for file in sorted(PACKAGE.rglob("*.py")) if whole.search(file.read_text())]


CONFIGURATIONS = {"DictConfig", "RunConfig"}


def config_walk(package: Path = PACKAGE) -> list[tuple[str, str, int]]:
    """Return (file, function, reads) of each function that gets the whole configuration.

    A function gets it as a parameter with that annotation, as a local name of such a value, or as the attribute `config` of an
    object (a plan) in a file that uses that type or plans. reads: attributes that the function reads of the configuration, and
    calls to which it passes the configuration.
    """
    walk = []
    for file in sorted(package.rglob("*.py")):
        text = file.read_text()
        planned = any(word in text for word in ("plan.config", "planned.config"))
        if not planned and not CONFIGURATIONS.intersection(re.findall(r"\w+", text)):
            continue
        functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
        name = str(file.relative_to(package))
        walk += [(name, one.name, reads) for one in functions if (reads := _config_reads(one))]
    return walk


def _config_reads(function: ast.FunctionDef) -> int:
    arguments = [*function.args.args, *function.args.kwonlyargs]
    named = {one.arg for one in arguments if one.annotation and CONFIGURATIONS & {*_words(one.annotation)}}
    nodes = list(ast.walk(function))
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute) and _is_config(node.value, named):
            named |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    inner = [one for node in nodes if isinstance(node, ast.Attribute | ast.Call) for one in _parts(node)]
    return len(named.intersection(one.arg for one in arguments)) + sum(_is_config(one, named) for one in inner)


def _parts(node: ast.Attribute | ast.Call) -> list[ast.expr]:
    return [node.value] if isinstance(node, ast.Attribute) else [*node.args, *(one.value for one in node.keywords)]


def _is_config(node: ast.expr, named: set[str]) -> bool:
    """Tell whether a node is a local name of the configuration, or `<plan>.config`."""
    if isinstance(node, ast.Attribute):
        return node.attr == "config" and ast.unparse(node.value).rpartition(".")[2] in ("plan", "planned", "self")
    return isinstance(node, ast.Name) and node.id in named


def _words(annotation: ast.expr) -> list[str]:
    return re.findall(r"\w+", ast.unparse(annotation))


def main() -> None:
    """Print all counts."""
    rooms = by_room()
    print(f"{'room':<16}{'files':>7}{'lines':>9}{'code':>9}")
    for name, row in rooms.items():
        print(f"{name:<16}{row[0]:>7}{row[1]:>9,}{row[2]:>9,}")
    files, lines, code = (sum(column) for column in zip(*rooms.values(), strict=True))
    print(f"{'all':<16}{files:>7}{lines:>9,}{code:>9,}\n")
    for page, count in words().items():
        print(f"{page:<32}{count:>8,} words")
    print(f"{'all':<32}{sum(words().values()):>8,} words\n")
    print(f"files that mention DictConfig: {len(mentioning('DictConfig'))} of {files}", flush=True)
    walk = config_walk()
    reached = {name for name, _, _ in walk}
    reads = sum(count for _, _, count in walk)
    print(
        f"the whole configuration reaches {len(walk)} functions in {len(reached)} files, and is read or handed on {reads} times"
    )
    called = executed()
    where = Counter(name.partition("/")[0] for name in called)
    print(f"files with a function that `{' '.join(COMMAND)}` calls: {len(called)} of {files}")
    print("  " + ", ".join(f"{room} {count}" for room, count in where.most_common()))


if __name__ == "__main__":
    main()
