"""Find the YAML files of lmms-eval's tasks by name, without importing lmms-eval and without its index, which takes 5 s."""

from __future__ import annotations

import difflib
import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import Any

from mmkv_bench.datasets.specs import TaskSpec
from mmkv_bench.errors import ConfigError, UnsupportedError

OWN_FOLDER = Path(__file__).parent / "tasks"  # for lmms-eval's --include_path
TASK_LINE = re.compile(r"^[\"']?task[\"']?\s*:[ \t]*[\"']?([^\s\"'#,\[\]]+)", re.MULTILINE)
INCLUDE_LINE = re.compile(r"^include\s*:[ \t]*[\"']?([^\s\"'#,\[\]]+)", re.MULTILINE)
GROUP_LINE = re.compile(r"^[\"']?(?:group|tag)[\"']?\s*:[ \t]*[\"']?([^\s\"'#,\[\]]+)", re.MULTILINE)


def task_file(spec: TaskSpec) -> Path:
    """Return the YAML file of a task: from `spec.include_path`, else of this project, else of lmms-eval.

    Raises ConfigError for an unknown task, UnsupportedError for a group of tasks.
    """
    if spec.is_pages:
        return OWN_FOLDER / "pages" / f"{spec.name}.yaml"
    known_tasks = own_tasks()
    if spec.include_path:
        folder = Path(spec.include_path).expanduser()
        if not folder.is_dir():
            raise ConfigError(
                f"datasets.{spec.dataset}.include_path={spec.include_path} is not a folder; give the folder with the YAML "
                "files of your tasks"
            )
        known_tasks = known_tasks | _index(folder.resolve())[0]
    if spec.name in known_tasks:
        return known_tasks[spec.name]
    tasks, groups = lmms_eval_tasks()
    if spec.name in tasks:
        return tasks[spec.name]
    if spec.name in groups:
        raise UnsupportedError(f"{spec.name!r} is a group of lmms-eval tasks; name tasks of the group instead")
    close = difflib.get_close_matches(spec.name, [*known_tasks, *tasks], n=5, cutoff=0.4)
    hint = f"did you mean {', '.join(map(repr, close))}?" if close else "list them with: lmms-eval tasks list"
    raise ConfigError(f"lmms-eval has no task {spec.name!r} (it has {len(tasks)}); {hint}")


def includes(path: Path) -> list[Path]:
    """Return the existing YAML files under the key `include` of a task's YAML."""
    named = [Path(path.parent, name) for name in INCLUDE_LINE.findall(_text(path))]
    return [file for file in named if file.is_file()]


@cache
def own_tasks() -> dict[str, Path]:
    """Map the name of each task of this project to its YAML file. The pages tasks are left out."""
    return {name: path for name, path in _index(OWN_FOLDER)[0].items() if path.parent.name != "pages"}


@cache
def lmms_eval_tasks() -> tuple[dict[str, Path], set[str]]:
    """Return (task name -> YAML file, names of groups and tags) of the installed lmms-eval."""
    return _index(lmms_eval_folder() / "tasks")


def lmms_eval_folder() -> Path:
    """Return the folder of the installed lmms-eval. Raises ConfigError when lmms-eval is not installed."""
    package = importlib.util.find_spec("lmms_eval")
    if package is None or not package.submodule_search_locations:
        raise ConfigError("lmms-eval is not installed; install this project with its dependencies (make bench does)")
    return Path(package.submodule_search_locations[0])


def _index(folder: Path) -> tuple[dict[str, Path], set[str]]:
    """Return (task name -> YAML file, names of groups and tags) of the YAML files below a folder."""
    tasks: dict[str, Path] = {}
    groups: set[str] = set()
    for path in sorted(folder.rglob("*.yaml")):
        text = _text(path)
        groups.update(GROUP_LINE.findall(text))
        names = TASK_LINE.findall(text)
        for included in [] if names else includes(path):  # the included file may name the task
            names += TASK_LINE.findall(_text(included))
        for name in names:
            tasks.setdefault(name, path)
    return tasks, groups


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8-sig", errors="replace") if path.is_file() else ""


def plain_config(path: Path) -> dict[str, Any]:
    """Return a task's YAML merged with its includes. `!function` values stay text, so no code of the task runs."""
    import yaml

    # The C parser, if it was built: a run reads its tasks' files many times.
    Loader: Any = type("Loader", (getattr(yaml, "CSafeLoader", yaml.SafeLoader),), {})
    Loader.add_multi_constructor("!function", lambda loader, suffix, node: f"!function {node.value}")
    try:
        config = Loader(_text(path)).get_single_data() or {}
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line_text = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(
            f"{path.name}{line_text} of the folder {path.parent.name} is not valid YAML: "
            f"{getattr(error, 'problem', None) or error}; correct the file"
        ) from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path.name} of the folder {path.parent.name} is not a mapping of keys; correct the file")
    included = config.pop("include", None) or []
    base: dict[str, Any] = {}
    for name in reversed([included] if isinstance(included, str) else included):  # as lmms-eval: the first one wins
        base |= plain_config(path.parent / name)
    return base | config
