"""Write the generated pages of docs/, or compare them with the existing files."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mmkv_bench.config.files import conf_dir

Pages = Mapping[str, str]
"""Path below docs/ -> Markdown."""


def command(
    module: str, description: str | None, pages: Callable[[], Pages], arguments: Sequence[str] | None = None
) -> int:
    """Run the command line of a generator of pages.

    Pages are written, and files in their folders that are no longer generated are deleted. With `--check` nothing is written,
    and the exit code is 1 if anything would change.
    """
    parser = argparse.ArgumentParser(prog=f"python -m tools.{module}", description=description)
    parser.add_argument("folder", nargs="?", type=Path, default=conf_dir().parent / "docs", help="default: docs/")
    parser.add_argument("--check", action="store_true", help="write nothing; compare")
    options = parser.parse_args(arguments)
    made = pages()
    stale = _stale(options.folder, made)
    changed = [name for name, text in made.items() if not _same(options.folder / name, text)]
    if options.check:
        wrong = sorted([*changed, *(_name(options.folder, file) for file in stale)])
        print(f"{', '.join(wrong)}: out of date; run `make docs`" if wrong else f"{len(made)} pages are up to date")
        return 1 if wrong else 0
    for file in stale:
        file.unlink()
    for name in changed:
        (options.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (options.folder / name).write_text(made[name])
    print(f"{len(made)} pages, {len(changed)} of them written, {len(stale)} deleted")
    return 0


def _same(file: Path, text: str) -> bool:
    return file.is_file() and file.read_text() == text


def _stale(folder: Path, made: Pages) -> list[Path]:
    """Return the pages in generated folders that are no longer generated."""
    folders = {(folder / name).parent for name in made if "/" in name}
    return [file for below in sorted(folders) for file in sorted(below.glob("*.md")) if _name(folder, file) not in made]


def _name(folder: Path, file: Path) -> str:
    return file.relative_to(folder).as_posix()
