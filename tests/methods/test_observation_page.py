"""Promise: docs/observation.md names all that an observation offers, with true shapes, dtypes and needs; its examples hold."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from mmkv_bench.compression.observation import Needs, Observation
from mmkv_bench.methods import invariants, toy_layers

PAGE = (Path(__file__).parents[2] / "docs" / "observation.md").read_text()
ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if line.startswith("| `obs.")]
SIZES = {"T": 17, "Hkv": 2, "Hq": 4, "D": 8, "E": 12, "m": 3, "8": 8}
OF_THE_RUN = {"observe", "seen_by", "shared", "stream_view", "retain", "start_after_entries", "copy_statistics"}


def observation(declared: str) -> Observation:
    needs = eval(f"Needs({declared})", {"Needs": Needs})
    return toy_layers.prompt(SIZES["T"], SIZES["Hkv"], SIZES["Hq"] // SIZES["Hkv"], needs)[1]


def read(expression: str, obs: Observation):
    names = {"obs": obs, "hidden": torch.ones(3, SIZES["E"]), "offsets": torch.tensor([1, 2, 9]), "seed": 0}
    return eval(expression, names | {"name": "a name", "make": lambda: 3})


def test_the_page_names_everything_and_nothing_else():
    offered = {name for name in {*vars(observation("")), *vars(Observation)} if not name.startswith("_")}
    assert offered - OF_THE_RUN == {re.match(r"`obs\.(\w+)", row[0])[1] for row in ROWS}


def test_every_line_is_as_it_says():
    for expression, shape, dtype, need, *_ in ROWS:
        value = read(expression.strip("`"), observation(need.strip("`")))
        parts = value if isinstance(value, tuple) else (value,)
        assert len(parts) == (2 if shape.startswith("2 x") else 1), expression
        for part in parts:
            if isinstance(part, torch.Tensor):
                sizes = [SIZES[letter] for letter in re.findall(r"\w+", shape.removeprefix("2 x"))]
                known = "float32" if dtype == "model" else dtype
                assert (list(part.shape), str(part.dtype)) == (sizes, f"torch.{known}"), expression
            else:
                assert shape == "" and dtype in ("any", *(kind.__name__ for kind in type(part).__mro__)), expression
        if need:
            try:
                read(expression.strip("`"), observation(""))
            except RuntimeError as refused:
                assert "does not declare it" in str(refused)
            else:
                raise AssertionError(f"{expression} needs no declaration")


def test_every_example_keeps_the_promises_of_its_parts(tmp_path):
    examples = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    problems = [toy_layers.problem((17, 2, 2), 6), toy_layers.problem((40, 2, 3), 13)]
    for number, text in enumerate(examples):
        file = tmp_path / f"example_{number}.py"
        file.write_text(text)
        made = invariants.method(str(file))
        broken = [check.__name__ for check in invariants.CHECKS[:7] if check(made, problems=problems) is not None]
        assert broken == [], text
    kept = [int((index >= 0).sum()) for index in invariants.select(made, problems[1])]
    assert len(examples) == 4 and len({*kept}) > 1 and sum(kept) == 13 * 2 * 3, "the last one divides among layers"
