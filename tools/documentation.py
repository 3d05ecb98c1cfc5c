"""Draw the stretches of documentation that `dataset=documentation` continues, from source distributions of the package index.

    pip download --no-deps --no-binary :all: -d <folder> networkx==3.6.1 ...       # VERSIONS below
    python -m tools.documentation <folder> <folder of SmolLM2's tokenizer>

Each project gives up to three stretches of its release notes that do not overlap, from the text above the first heading of 2024
or earlier. There are 40 stretches; the first stretches of all projects come first. A stretch is 1,024 tokens of SmolLM2's
tokenizer and the 512 that follow. It is cut after a line's end, so that both parts have the same tokens separately as together.
Writes `stretches.jsonl.gz` and `LICENCES.txt` into the task's folder.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TASK = Path(__file__).parents[1] / "mmkv_bench/datasets/tasks/documentation"
PROMPT, CONTINUATION, STRETCHES, COUNT = 1024, 512, 3, 40
SOURCES = {
    "aiohttp": ("3.14.5", "CHANGES.rst", "Apache-2.0"),
    "anyio": ("4.16.0", "docs/versionhistory.rst", "MIT"),
    "celery": ("5.7.0", "Changelog.rst", "BSD-3-Clause"),
    "click": ("8.5.1", "CHANGES.md", "BSD-3-Clause"),
    "coverage": ("7.17.5", "CHANGES.rst", "Apache-2.0"),
    "dask": ("2026.8.0", "docs/source/changelog.rst", "BSD-3-Clause"),
    "gunicorn": ("27.0.1", "docs/content/news.md", "MIT"),
    "ipython": ("9.18.1", "docs/source/whatsnew/version9.rst", "BSD-3-Clause"),
    "networkx": ("3.6.1", "doc/release/release_3.6.rst", "BSD-3-Clause"),
    "packaging": ("26.4", "CHANGELOG.rst", "BSD-2-Clause"),
    "pip": ("26.3", "NEWS.rst", "MIT"),
    "pydantic": ("2.14.4", "HISTORY.md", "MIT"),
    "pytest": ("9.2.0", "doc/en/changelog.rst", "MIT"),
    "scrapy": ("2.19.0", "docs/news.rst", "BSD-3-Clause"),
    "sphinx": ("9.0.4", "CHANGES.rst", "BSD-2-Clause"),
    "starlette": ("1.10.0", "docs/release-notes.md", "BSD-3-Clause"),
    "tornado": ("6.6.1", "docs/releases/v6.6.0.rst", "Apache-2.0"),
    "trio": ("0.35.0", "docs/source/history.rst", "MIT"),
    "xarray": ("2026.9.0", "doc/whats-new.rst", "Apache-2.0"),
}
LICENCE_NAMES = re.compile(r"[^/]+/LICENSE(\.BSD|\.MIT|\.txt|\.md|\.rst)?")
OLD = re.compile(r"\b20(0\d|1\d|2[0-4])\b|\b2024\.\d")


def member(archive: tarfile.TarFile, name: str) -> str:
    """Return the text of a file in an archive."""
    content = archive.extractfile(name)
    assert content is not None, name
    return content.read().decode()


def recent(text: str) -> str:
    """Return the text above the first short line that names a year before 2025."""
    lines = text.splitlines(keepends=True)
    old = (place for place, line in enumerate(lines) if place > 5 and len(line) < 70 and OLD.search(line))
    return "".join(lines[: next(old, len(lines))])


def stretches(text: str, tokenizer: Any) -> Iterator[tuple[str, str]]:
    """Yield (prompt, continuation) cut at line ends, where each part has its number of tokens, separately as together."""
    start = 0

    def ids(part: str) -> list[int]:
        return list(tokenizer(part, add_special_tokens=False)["input_ids"])

    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    while start + PROMPT + CONTINUATION <= len(offsets):
        begin, cut = offsets[start][0], offsets[start + PROMPT][0]
        end = offsets[start + PROMPT + CONTINUATION - 1][1]
        prompt, rest = text[begin:cut], text[cut:end]
        clean = re.search(r"\S\n$", prompt) and rest == rest.strip() and text[begin : begin + 1].strip()
        if (
            clean
            and (len(ids(prompt)), len(ids(rest))) == (PROMPT, CONTINUATION)
            and ids(prompt + rest) == ids(prompt) + ids(rest)
        ):
            yield prompt, rest
            start += PROMPT + CONTINUATION
        else:
            start += 1


def main() -> None:
    """Read the archives, write the two files."""
    from transformers import AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archives", type=Path)
    parser.add_argument("tokenizer")
    given = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(given.tokenizer)
    rows: list[dict[str, Any]] = []
    licences: dict[str, list[str]] = {}
    for project, (version, file, licence) in SOURCES.items():
        with tarfile.open(given.archives / f"{project}-{version}.tar.gz") as archive:
            text = member(archive, f"{project}-{version}/{file}")
            terms = max(filter(LICENCE_NAMES.fullmatch, archive.getnames()))
            licences.setdefault(member(archive, terms).strip(), []).append(
                f"=== {project} {version}: {file} ({licence})"
            )
        source = {"project": project, "version": version, "file": file, "licence": licence}
        source["sha256"] = hashlib.sha256(text.encode()).hexdigest()
        for number, (context, continuation) in zip(range(STRETCHES), stretches(recent(text), tokenizer), strict=False):
            name = {"document": f"{project}-{number}", "round": number}
            rows.append(name | source | {"context": context, "continuation": continuation})
    rows.sort(key=lambda row: (row["round"], row["project"]))
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows[:COUNT])
    (TASK / "stretches.jsonl.gz").write_bytes(gzip.compress(lines.encode(), 9, mtime=0))
    texts = ("\n".join([*projects, "", text, ""]) for text, projects in licences.items())
    (TASK / "LICENCES.txt").write_text("\n".join(texts))


if __name__ == "__main__":
    main()
