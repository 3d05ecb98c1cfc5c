"""Promise: what README and the pages of tasks show works as it stands: the method of one's own runs, command lines are valid."""

from __future__ import annotations

import re
import shlex
from itertools import takewhile
from pathlib import Path

import pytest

from mmkv_bench.cli.grammar import VERBS, split
from mmkv_bench.cli.main import main
from mmkv_bench.config.compose import compose
from mmkv_bench.methods import invariants
from mmkv_bench.plan.validate import validate
from tests.cli.setting import overrides
from tests.each import each
from tests.run import setting
from tests.run.setting import cell_of, done, responses

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
TASKS = ("run", "own_method", "papers", "efficiency", "deploying", "looking", "verifying", "publishing", "python")
PAGES = {"README": README, **{name: (ROOT / "docs" / f"{name}.md").read_text() for name in TASKS}}
BLOCKS = [
    block
    for page in PAGES.values()
    for block in re.findall(r"(?:^`([^`\n]+)`:\n\n)?^```(\w+)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
]
"""(file that the text before names, or "", language, content) of every code block."""

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

COMMANDS = [
    shlex.split(re.sub("^mmkv-bench ", "python -m mmkv_bench ", line), comments=True)
    for _, language, content in BLOCKS
    if language == "bash"
    for line in content.replace("\\\n", " ").splitlines()
    if line.startswith(("python ", "mmkv-bench "))
]


def arguments(verb: str) -> list[list[str]]:
    """What follows the verb in each of its commands, up to where the shell writes the output to a file."""
    found = [split(list(takewhile(">".__ne__, words[3:]))) for words in COMMANDS if words[1:3] == ["-m", "mmkv_bench"]]
    return [rest for name, rest in found if name == verb]


def of_own() -> list[str]:
    """The command that runs one's own method beside another."""
    (command,) = (words for words in arguments("run") if any("value_norm.py]" in word for word in words))
    return command


def test_every_method_of_the_package_is_in_the_section_on_methods():
    section = README.split("## Methods\n")[1].split("\n## ")[0]
    missing = [file.stem for file in (ROOT / "conf" / "method").glob("*.yaml") if f"`{file.stem}`" not in section]
    assert missing == []


def test_the_examples_are_the_files_that_they_name():
    shown = {name: content for name, _, content in BLOCKS if name}
    assert all((ROOT / name).read_text() == content for name, content in shown.items())
    assert "method=[snapkv,examples/value_norm.py]" in of_own() and len(shown) == 2
    assert all(f"(../{file.relative_to(ROOT)})" in PAGES["own_method"] for file in EXAMPLES)


@pytest.mark.full
def test_the_method_of_ones_own_runs_beside_the_others(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    few = ("budget=64", "limit=2", "dataset=pages_lookup")
    outcome = done(tmp_path, *of_own(), *few)
    lines = [line.split("|")[1].strip() for line in outcome.out.splitlines() if line.startswith("|")]
    assert "value_norm (tuned)" in lines and {"full", "snapkv"} <= set(lines)
    own = [row for (cell, _), row in responses(tmp_path).items() if cell == cell_of(tmp_path, "value_norm")]
    assert [row["status"] for row in own] == ["ok", "ok"]
    assert {row["entries_resident"] for row in own} == {row["entries_asked"] for row in own}
    other = [row for (cell, _), row in responses(tmp_path).items() if cell == cell_of(tmp_path, "snapkv")]
    assert {row["kept_digest"] for row in own}.isdisjoint(row["kept_digest"] for row in other)
    assert '"power": 2.0' in setting.cells(tmp_path)[cell_of(tmp_path, "value_norm")]["parameters"]
    assert done(tmp_path, *of_own(), *few).generated == 0
    (named,) = (words for words in arguments("run") if any(word.startswith("variants.") for word in words))
    default = done(tmp_path, *named, *few)
    assert default.generated == 2  # another power is another cell
    assert re.search(r"^\| long_values +\|", default.out, re.MULTILINE)


def test_there_are_commands_to_check():
    assert len(arguments("run")) >= 6
    assert {name for name in VERBS if arguments(name)} >= {"tables", "launch", "check", "data", "tokens"}
    assert {words[2].partition(".")[0] for words in COMMANDS if words[1] == "-m"} == {"mmkv_bench", "tools"}


@pytest.mark.slow
@each("command", arguments("run"), keep=6)
def test_every_run_that_is_shown_composes_and_is_valid(command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    validate(compose(overrides([word for word in command if word != "--help"])))
    assert [path.name for path in tmp_path.iterdir()] == ["examples"]


@each("command", arguments("check"))
def test_every_check_that_is_shown_names_a_method_that_can_be_built(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert invariants.method(command[0], command[1:]).scorer.power == 2.0


def test_the_number_of_processes_is_read(monkeypatch):
    from mmkv_bench.run import launch

    seen = []
    monkeypatch.setattr(launch, "launch", lambda overrides, processes: seen.append((overrides, processes)) or 0)
    (command,) = arguments("launch")
    assert main(["launch", *command]) == 0
    assert seen == [([word for word in command if "=" in word], 4)]
    validate(compose(seen[0][0]))


def test_every_table_command_is_read():
    from mmkv_bench.cli.grammar import reader

    for command in arguments("tables"):
        assert reader("tables")[1].read(command).rows in (
            Path("runs/demo"),
            Path("runs/speed"),
            Path("results/tiny/large"),
        )


@each(("verb", "words"), [("data", "docvqa"), ("tokens", "1,536 visual tokens")])
def test_the_commands_that_only_tell_something_tell_it(verb, words, capsys):
    (command,) = arguments(verb)
    main([verb, *command])
    assert words in capsys.readouterr().out


def test_make_targets_of_readme_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^make ([\w-]+)", README, re.MULTILINE)
    assert len(targets) >= 2
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_links_of_readme_and_docs_lead_somewhere():
    broken = [
        f"{page.relative_to(ROOT)}: {link}"
        for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
        for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)", page.read_text())
        if "://" not in link and not (page.parent / link).exists()
    ]
    assert broken == []


def test_readme_is_read_once():
    assert len(README.split()) <= 2500


def test_every_file_that_the_page_of_rooms_says_a_thing_is_in_exists():
    section = (ROOT / "docs" / "rooms.md").read_text().split("| where is ... |")[1].split("\n\n")[0]
    files = re.findall(r"`([a-z_]+/[a-z_]+\.py)`", section)
    assert len(files) >= 12
    assert [file for file in files if not (ROOT / "mmkv_bench" / file).is_file()] == []
