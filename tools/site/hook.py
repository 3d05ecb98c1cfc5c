"""What the site adds to docs/: README and its neighbours as pages, an API page per room from the docstrings, and links to
files outside of docs/ as names of files, since a site built offline has no repository to point to."""

from __future__ import annotations

import ast
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "mmkv_bench"
TOP = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "results/tiny/large/cells.md": "cells.md",
}
STYLE = ".doc-contents details p { white-space: pre-line; }\n"  # lists of class attributes, one a line
WORKER = "assets/iframe-worker.js"
DEFINITION = re.compile(r"^\[(?P<name>\w+)\]: (?P<target>\S+)\n", re.MULTILINE)
LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]+)\]\((?P<target>[^)\s]+)\)")
PICTURE = re.compile(r"!\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that do not lie in docs/."""
    for name, page in TOP.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    listed = []
    for room in rooms():
        file = PACKAGE / room / "__init__.py" if (PACKAGE / room).is_dir() else PACKAGE / f"{room}.py"
        sentence = (ast.get_docstring(ast.parse(file.read_text())) or "").split("\n\n")[0]
        listed.append(f"- [{room}]({room}.md): {sentence}".replace("\n", " "))
        text = f"# mmkv_bench.{room}\n\n::: mmkv_bench.{room}\n"
        files.append(File.generated(config, f"api/{room}.md", content=text))
    text = "# The rooms of the package\n\nMade from the docstrings.\n\n" + "\n".join(listed) + "\n"
    files.append(File.generated(config, "api/index.md", content=text))
    files.append(File.generated(config, "assets/site.css", content=STYLE))
    files.append(File.generated(config, WORKER, content=(Path(__file__).parent / "iframe-worker.js").read_text()))
    config.nav = [*(entry for entry in config.nav if "API" not in entry), {"API": api_pages()}]
    return files


def rooms() -> list[str]:
    """Folders of the package that are packages themselves, and the file of the protocols."""
    return sorted(["protocols", *(file.parent.name for file in PACKAGE.glob("*/__init__.py"))])


def api_pages() -> list:
    """The entries of the API's part of the navigation."""
    return [{"Rooms": "api/index.md"}, *({room: f"api/{room}.md"} for room in rooms())]


def on_page_markdown(markdown: str, page, config: MkDocsConfig, files: Files) -> str:
    """Links as the site's pages need them."""
    here = page.file.src_uri
    if here.startswith("api/"):
        return markdown
    source = next((name for name, made in TOP.items() if made == here), f"docs/{here}")
    up = "../" * here.count("/")

    def linked(found: re.Match[str]) -> str:
        target, _, anchor = found["target"].partition("#")
        if not target or "://" in target:
            return found[0]
        place = normal(PurePosixPath(source).parent / target)
        if place in TOP:
            return f"[{found['text']}]({up}{TOP[place]}{'#' * bool(anchor)}{anchor})"
        if place.startswith("docs/"):
            return f"[{found['text']}]({up}{place.removeprefix('docs/')}{'#' * bool(anchor)}{anchor})"
        if not (ROOT / place).exists():
            raise FileNotFoundError(f"{source} links to {target}, which is not there")
        return found["text"] if found["text"].strip("`") == place else f"{found['text']} (`{place}`)"

    def shown(found: re.Match[str]) -> str:
        return f"![{found['text']}]({found['target'].removeprefix('docs/')})"

    targets = {found["name"]: found["target"] for found in DEFINITION.finditer(markdown)}
    markdown = re.sub(r"\]\[(\w+)\]", lambda found: f"]({targets[found[1]]})", DEFINITION.sub("", markdown))
    parts = re.split(r"(^```.*?^```)", markdown, flags=re.MULTILINE | re.DOTALL)  # code stays as it is
    return "".join(part if part.startswith("```") else PICTURE.sub(shown, LINK.sub(linked, part)) for part in parts)


def normal(path: PurePosixPath) -> str:
    """A path without `..`."""
    steps: list[str] = []
    for step in path.parts:
        if step == "..":
            steps.pop()
        elif step != ".":
            steps.append(step)
    return "/".join(steps)
