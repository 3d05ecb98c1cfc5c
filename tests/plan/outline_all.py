"""Every shipped configuration as a plan, in a process of its own; what is printed of them a test judges."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator

from mmkv_bench.config.compose import compose
from mmkv_bench.config.files import conf_dir, options
from mmkv_bench.plan.planner import outline
from mmkv_bench.plan.validate import validate

WITHOUT = {"method": {"full", "custom", "kvpress"}, "dataset": {"lmms_eval"}}
"""Choices that name nothing by themselves; `full` is in every plan."""

NEEDED = {
    "hf": ["model.path=pkg://mmkv_bench/tiny/weights"],
    "matrix": ["model=qwen2_5_vl_3b", "method=[snapkv,prefixkv]"],  # its own methods name files and packages outside
}
"""What a choice leaves to its user."""


def choices(group: str) -> list[str]:
    """What names a method or dataset by itself."""
    return [name for name in options(group) if name not in WITHOUT[group]]


def answering(group: str) -> list[str]:
    """Choices of runs that answer datasets; those of scenario=efficiency are planned by tests/efficiency/test_settings.py."""
    papers = sorted(f"papers/{file.stem}" for file in (conf_dir() / group / "papers").glob("*.yaml"))
    names = [name for name in (*options(group), *papers) if not name.startswith("efficiency_")]
    return [name for name in names if not _is_fetched((conf_dir() / group / f"{name}.yaml").read_text())]


def _is_fetched(text: str) -> bool:
    """Weights that a command fetches are not here, and their models are refused."""
    files = (conf_dir() / "model").glob("*.yaml")
    fetched = [file.stem for file in files if "path: fetched://" in file.read_text()]
    return "path: fetched://" in text or any(re.search(rf"/model: {name}$", text, re.MULTILINE) for name in fetched)


def shipped(every: int = 1) -> Iterator[list[str]]:
    """The words of configurations: methods with the default model on datasets, each experiment and each model with the
    defaults of the rest; of all four every so manieth."""
    yield [f"{group}=[{','.join(choices(group)[::every])}]" for group in WITHOUT]
    for group in ("experiment", "model"):
        for name in answering(group)[::every]:
            yield [f"{group}={name}", *NEEDED.get(name, [])]


def main() -> None:
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MMKV_BENCH_CACHE"] = f"{folder}/cache"
        for words in shipped(int(sys.argv[1])):
            config = compose([*words, f"out={folder}/rows"])
            validate(config)
            plan = outline(config)
            found[words[0].partition("[")[0]] = {
                "methods": sorted({cell.method for cell in plan.cells}),
                "datasets": {part.dataset: [len(part.cells), len(part.samples), part.counted] for part in plan.parts},
                "family": plan.family is not None,
                "notes": list(plan.notes),
            }
        left = [file for _, _, files in os.walk(folder) for file in files if file != "checksums.json"]
    heavy = sorted({"torch", "transformers", "lmms_eval", "datasets"} & {*sys.modules})
    print(json.dumps({"plans": found, "heavy": heavy, "left": left}))


if __name__ == "__main__":
    main()
