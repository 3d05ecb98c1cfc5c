"""Promise: `plan scenario=efficiency` says without torch what its passes read and take, in numbers that a reader computes by
hand, and with `--memory` what the very prompts hold."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from mmkv_bench.config.compose import compose
from mmkv_bench.efficiency import forecast
from mmkv_bench.efficiency.planned import planned
from mmkv_bench.efficiency.run import missing
from mmkv_bench.forecast.forecast import Given
from mmkv_bench.store.store import Store
from tests.cli.setting import CHECKOUT, verb
from tests.each import each
from tests.run.setting import done

ASKED = ["scenario=efficiency", "model=qwen2_5_vl_7b", "method=snapkv", "budget=10%", "lengths=[2048,32768]"]
ASKED += ["repeats=3", "new_tokens=16"]
H100 = {"memory": 80 * 2**30, "bandwidth": 3.35e12, "rate": 7e14}


def test_passes_and_hours_are_those_computed_by_hand(tmp_path):
    plan = planned(compose([*ASKED, "prompts=[text,image]", f"out={tmp_path}/rows"]), outline=True)
    found = forecast.forecast(plan, Given(**H100), plan.units)
    assert [(one.dataset, one.tokens, one.source, one.new_tokens) for one in found.datasets] == [
        (f"made_up_{kind}", tokens, "asked", 16) for kind in ("text", "image") for tokens in (2048, 32768)
    ]
    long = found.datasets[1]
    assert [(line.label, line.kept) for line in long.lines] == [("full", 32768), ("10%", 3276)]
    passes = 2 * (1 + 3 + 1)  # of each cell one that counts memory, three timed, one to warm up
    prefill = 2 * (28 * 233_046_016 * 32768 + 544_997_376) + 4 * 28 * 28 * 128 * 32768 * 32769 // 2
    assert long.prefill_hours == pytest.approx(passes * prefill / 7e14 / 3600)
    read = 16 * 5 * (2 * found.read + (32768 + 3276 + 16) * 57_344)
    assert long.decode_hours == pytest.approx(read / 3.35e12 / 3600)
    assert any("vision tower" in text for text in found.missing)
    told = forecast.document(plan, plan.units)
    assert (told["passes"], told["prompt_tokens"]) == (4 * 2 * 4, 4 * 5 * (2048 + 32768))
    assert forecast.forecast(plan, Given(**H100), []).datasets[1].prefill_hours == 0


def test_the_command_loads_no_torch_and_says_what_is_done(tmp_path):
    words = ["plan", *ASKED, f"out={tmp_path}/rows", "--bandwidth", "3350", "--device-memory", "80", "--json"]
    code = f"import sys; from mmkv_bench.cli.main import main; main({words!r}); print('torch' in sys.modules)"
    environment = CHECKOUT | {"MMKV_BENCH_CACHE": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment, cwd=tmp_path
    )
    *text, document, heavy = ended.stdout.splitlines()
    assert heavy == "False", ended.stderr
    told = json.loads(document)
    assert (told["passes"], told["missing"], len(told["cells"])) == (16, 16, 2)
    assert [one["tokens"] for one in told["forecast"]["datasets"]] == [2048, 32768]
    assert any("may fit" in line for line in text) and not (tmp_path / "rows").exists()


@pytest.mark.full
def test_what_is_measured_already_is_not_foreseen_again(tmp_path):
    asked = ["scenario=efficiency", "method=snapkv", "budget=24", "lengths=40", "repeats=1", "new_tokens=3"]
    done(tmp_path, *asked)
    plan = planned(compose([*asked, "repeats=2", f"out={tmp_path}"]), outline=True)
    todo = missing(plan, Store(tmp_path).timings([cell.cell for cell in plan.cells]))
    assert len(todo) == 2 and "2 to do" in forecast.outlined(plan, todo)


@pytest.mark.full
@each(("batch", "says"), [("batch=1", False), ("batch=[1,3]", True)])
def test_memory_of_batches_is_said_to_be_counted_for_one_sequence(batch, says, tmp_path, capsys):
    words = ["scenario=efficiency", "method=full", "lengths=40", "new_tokens=3", "prompts=text", batch]
    assert verb("plan")([*words, f"out={tmp_path}/rows", "model.device=cpu", "--memory"]) == 0
    assert ("counted for one sequence, whatever batch says" in capsys.readouterr().out) is says


@pytest.mark.full
def test_memory_of_the_prompts_that_are_measured_is_counted_with_their_tower(tmp_path, capsys):
    words = [
        "scenario=efficiency",
        "method=snapkv",
        "budget=10%",
        "lengths=180",
        "new_tokens=4",
        "prompts=[text,image]",
    ]
    assert verb("plan")([*words, f"out={tmp_path}/rows", "model.device=cpu", "--memory", "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])["memory"]["cells"]
    assert {(one["cell"], one["tokens"], one["visual_tokens"] > 100) for one in told} == {
        (cell, 180, visual) for cell in ("full", "snapkv@10%") for visual in (True, False)
    }
    for one in told:
        assert ("vision" in one["peaks"]) == (one["visual_tokens"] > 0) and one["error"] is None
    done(tmp_path / "rows", *words, "repeats=1")
    rows = Store(tmp_path / "rows").timings().to_pylist()
    held = {(row["visual_tokens"], row["phase"]): row["peak_allocated"] for row in rows if row["repeat"] is None}
    for one in told:
        if one["cell"] == "full" and one["visual_tokens"]:
            assert one["peaks"]["vision"] == pytest.approx(held[one["visual_tokens"], "vision"], rel=0.1)


@each(
    ("words", "sentence"),
    [
        (["--prompt-tokens", "64"], "--prompt-tokens has no meaning under scenario=efficiency"),
        (["--image", "28x28"], "say it with lengths=[...] and prompts="),
        (["lengths=200000"], "lengths=200000 with new_tokens=16 is more than the model's context of 128000"),
        (["model=hf", "model.path=org/name"], "a plan of scenario=efficiency needs the shape of"),
    ],
)
def test_a_mistake_is_told_in_one_sentence(words, sentence, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("MMKV_BENCH_CACHE", str(tmp_path))
    assert verb("plan")([*ASKED, *words]) == 2
    printed = capsys.readouterr()
    assert sentence in printed.err and printed.err.count("\n") == 1 and printed.out == ""
