"""Promise: what README shows works as it stands there: the method of one's own runs, and every command line is valid."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from mmkv_bench import launch
from mmkv_bench.__main__ import read
from mmkv_bench.compression import scorers
from mmkv_bench.planning.compose import compose
from mmkv_bench.planning.validate import validate
from tests.run import setting
from tests.run.setting import cell_of, done, extended, responses

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"(?:^`([^`\n]+)`:\n\n)?^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
"""(file that the text before names, or "", language, content) of every code block."""

COMMANDS = [
    shlex.split(line, comments=True)
    for _, language, content in BLOCKS
    if language == "bash"
    for line in content.replace("\\\n", " ").splitlines()
    if line.strip().startswith("python ")
]


def arguments(module: str) -> list[list[str]]:
    return [words[3:] for words in COMMANDS if words[1:3] == ["-m", module]]


@pytest.fixture(scope="module")
def own_method(tmp_path_factory):
    """README's files of a method, where they can be found as if they lay in the checkout: config folder and name."""
    root = tmp_path_factory.mktemp("own_method")
    files = {name: content for name, _, content in BLOCKS if name}
    assert sorted(Path(name).suffix for name in files) == [".py", ".yaml"]
    for name, content in files.items():
        assert not (ROOT / name).exists(), f"README's example {name} is part of the package now"
        (root / name).parent.mkdir(parents=True)
        (root / name).write_text(content)
    (module,) = (Path(name) for name in files if name.endswith(".py"))
    with extended(scorers, root / module.parent):
        yield root / "conf", module.stem


def test_the_method_of_ones_own_runs_beside_the_others(own_method, tmp_path):
    conf, name = own_method
    (command,) = (words for words in arguments("mmkv_bench") if any(name in word for word in words))
    outcome = done(tmp_path, "--config-dir", str(conf), *command, "limit=2", "dataset=pages_lookup")
    lines = [line.split("|")[1].strip() for line in outcome.out.splitlines() if line.startswith("|")]
    assert f"{name} (tuned)" in lines and {"full", "snapkv"} <= set(lines)
    own = [row for (cell, _), row in responses(tmp_path).items() if cell == cell_of(tmp_path, name)]
    assert [row["status"] for row in own] == ["ok", "ok"]
    assert {row["entries_resident"] for row in own} == {row["entries_asked"] for row in own}
    other = [row for (cell, _), row in responses(tmp_path).items() if cell == cell_of(tmp_path, "snapkv")]
    assert {row["kept_digest"] for row in own}.isdisjoint(row["kept_digest"] for row in other)
    assert '"power": 2.0' in setting.cells(tmp_path)[cell_of(tmp_path, name)]["parameters"]
    again = done(tmp_path, "--config-dir", str(conf), *command, "limit=2", "dataset=pages_lookup")
    assert again.generated == 0
    default = done(
        tmp_path, "--config-dir", str(conf), f"method={name}", "budget=64", "limit=2", "dataset=pages_lookup"
    )
    assert default.generated == 2  # another power is another cell
    assert re.search(rf"^\| {name} +\|", default.out, re.MULTILINE)


def test_there_are_commands_to_check():
    assert len(arguments("mmkv_bench")) >= 6
    assert len(arguments("mmkv_bench.tables")) >= 1 and len(arguments("mmkv_bench.launch")) >= 1
    known = {"mmkv_bench", "mmkv_bench.tables", "mmkv_bench.launch"}
    assert {words[2] for words in COMMANDS if words[1] == "-m"} <= known


@pytest.mark.parametrize("command", [*arguments("mmkv_bench"), *arguments("mmkv_bench.launch")], ids=" ".join)
def test_every_run_that_readme_shows_composes_and_is_valid(command, own_method, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    conf, name = own_method
    request = read([word for word in command if not word.startswith("processes=")])
    assert request.help == ("--help" in command) and not request.flags
    further = [f"hydra.searchpath=['file://{conf}']"] if any(name in word for word in command) else []
    validate(compose([*request.overrides, *further]))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", arguments("mmkv_bench.launch"), ids=" ".join)
def test_the_number_of_processes_is_read(command, monkeypatch):
    seen = []
    monkeypatch.setattr(launch, "launch", lambda overrides, processes: seen.append((overrides, processes)) or 0)
    assert launch.main(command) == 0
    assert seen == [([word for word in command if not word.startswith("processes=")], "4")]


@pytest.mark.parametrize("command", arguments("mmkv_bench.tables"), ids=" ".join)
def test_every_table_command_of_readme_is_read(command):
    from mmkv_bench.tables.__main__ import parser

    assert parser().parse_args(command).rows == Path("runs/demo")


def test_make_targets_of_readme_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^make ([\w-]+)", README, re.MULTILINE)
    assert len(targets) >= 2
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_links_of_readme_lead_somewhere():
    links = [link for link in re.findall(r"\]\(([^)#\s]+)\)", README) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
