"""Promise: `plan scenario=efficiency` says without torch what its passes read and take, in numbers that a reader computes by
hand, and with `--memory` what the very prompts hold."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mmkv_bench.config.compose import compose
from mmkv_bench.efficiency.plan import plan_passes
from mmkv_bench.efficiency.planned_workloads import document, notes_of, text, workloads_of
from mmkv_bench.efficiency.run import missing_passes, stored_outcomes
from mmkv_bench.forecast.forecast import Assumptions, forecast
from mmkv_bench.store.store import Store
from tests.cli.setting import CHECKOUT, verb
from tests.each import each
from tests.run.setting import done

ROOT = Path(__file__).parents[2]
ASKED = ["scenario=efficiency", "model=qwen2_5_vl_7b", "method=snapkv", "budget=10%", "lengths=[2048,32768]"]
ASKED += ["repeats=3", "new_tokens=16"]
H100 = {"memory": 80 * 2**30, "bandwidth": 3.35e12, "rate": 7e14}


def test_passes_and_hours_are_those_computed_by_hand(tmp_path):
    plan = plan_passes(compose([*ASKED, "prompts=[text,image]", f"out={tmp_path}/rows"]), outline=True)
    found = forecast(plan, workloads_of(plan, plan.units), Assumptions(**H100), notes_of(plan))
    assert [(one.dataset, one.tokens, one.source, one.new_tokens) for one in found.datasets] == [
        (f"made_up_{kind}", tokens, "lengths", 16) for kind in ("text", "image") for tokens in (2048, 32768)
    ]
    long = found.datasets[1]
    assert [(line.label, line.kept) for line in long.lines] == [("full", 32768), ("10%", 3276)]
    passes = 2 * (1 + 3 + 1)  # of each cell one that counts memory, three timed, one to warm up
    prefill = 2 * (28 * 233_046_016 * 32768 + 544_997_376) + 4 * 28 * 28 * 128 * 32768 * 32769 // 2
    assert long.prefill_hours == pytest.approx(passes * prefill / 7e14 / 3600)
    read = 16 * 5 * (2 * found.read + (32768 + 3276 + 16) * 57_344)
    assert long.decode_hours == pytest.approx(read / 3.35e12 / 3600)
    assert any("vision tower" in text for text in found.missing)
    told = document(plan, plan.units)
    assert (told["passes"], told["prompt_tokens"]) == (4 * 2 * 4, 4 * 5 * (2048 + 32768))
    assert forecast(plan, workloads_of(plan, []), Assumptions(**H100)).datasets[1].prefill_hours == 0


@pytest.mark.slow
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
    assert any("largest batch on 80 GiB" in line for line in text) and not (tmp_path / "rows").exists()


def test_what_a_budget_gives_a_service_is_computed_by_hand(tmp_path, capsys):
    """Of Qwen2.5-VL-7B at 16 sequences: time, rate, peak and the largest batch, from its numbers of parameters, 28 layers of 4 KV
    heads of 128 and the device's bandwidth; the lines are full's first, and carry the sign of a bound."""
    words = [*ASKED, "batch=[1,16]", "lengths=32768", f"out={tmp_path}/rows"]
    assert verb("plan")([*words, "--bandwidth", "3350", "--device-memory", "80", "--json"]) == 0
    *text, document = capsys.readouterr().out.splitlines()
    lines = [line.split("|")[1:-1] for line in text if line.startswith("| ")]
    assert [[cell.strip() for cell in line[:3]] for line in lines[1:]] == [
        [*cell, batch] for batch in ("1", "16") for cell in (("full", "all"), ("snapkv", "10%"))
    ]
    assert lines[3][6].strip() == "≥ 47.4" and "prefills the whole prompt" in "".join(text)
    told = {(one["budget"], one["batch"], one["name"]): one for one in json.loads(document)["deployment"]}
    held, read, kv = 2 * 8_292_166_656, 2 * 7_070_619_136, 28 * 4 * 128 * 2 * 2
    activations = 32768 * (3 * 18944 + 2 * 3584) * 2
    prompt = {"all": 32768 * kv, "10%": (27 * 3276 + 32768) * kv / 28}
    for budget, kept in (("all", 32768), ("10%", 3276)):

        def peak(batch, budget=budget, kept=kept):
            ended = (kept + 16) * kv
            joined = batch * (kept * kv + ended / 28) if batch > 1 else 0
            return held + max(batch * ended, joined, prompt[budget] + activations + (batch - 1) * kept * kv)

        largest = next(batch for batch in range(1, 10_000) if peak(batch + 1) > 80 * 2**30)
        for batch in (1, 16):
            seconds = (read + batch * kept * kv) / 3.35e12
            expected = {"step_s": seconds, "tokens_s": batch / seconds, "nbytes": peak(batch), "largest": largest}
            found = {name: told[budget, batch, name]["value"] for name in expected}
            assert found == pytest.approx(expected) and told[budget, batch, "nbytes"]["source"] == "forecast, at least"
    assert told["10%", 16, "speed_up"]["value"] == pytest.approx((read + 16 * 32768 * kv) / (read + 16 * 3276 * kv))


@pytest.mark.full
def test_what_is_measured_already_is_not_foreseen_again(tmp_path):
    asked = ["scenario=efficiency", "method=snapkv", "budget=24", "lengths=40", "repeats=1", "new_tokens=3"]
    done(tmp_path, *asked)
    plan = plan_passes(compose([*asked, "repeats=2", f"out={tmp_path}"]), outline=True)
    todo = missing_passes(plan, stored_outcomes(plan, Store(tmp_path).timings(plan.names)))
    assert len(todo) == 2 and "2 to do" in text(plan, todo)


@pytest.mark.full
def test_a_forecast_of_a_batch_is_computed_by_hand(tmp_path):
    """Keys and values of 16 prompts, weights once a step, 16 prefills a pass, one layer twice while caches are joined."""
    words = ["batch=[1,16]", "lengths=32768", f"out={tmp_path}/rows"]
    plan = plan_passes(compose([*ASKED, *words]), outline=True)
    alone, batch = forecast(plan, workloads_of(plan, plan.units), Assumptions(**H100)).datasets
    assert (alone.sequences, batch.sequences) == (1, 16) and batch.prefill_hours == pytest.approx(
        16 * alone.prefill_hours
    )
    weights, read, kv = (
        2 * 8_292_166_656,
        2 * 7_070_619_136,
        28 * 4 * 128 * 2 * 2,
    )  # layers, KV heads, head size, K and V, bytes
    for line, one, kept in zip(batch.lines, alone.lines, (32768, 3276), strict=True):
        assert (line.kept, line.kv, line.read) == (kept, 16 * kept * kv, read + 16 * kept * kv)
        assert line.ms == pytest.approx(1000 * line.read / 3.35e12) and line.batch == one.batch > 16
    full, few = batch.lines
    assert few.speed_up == pytest.approx(full.ms / few.ms) and few.speed_up > 2 > alone.lines[1].speed_up
    activations = 32768 * (3 * 18944 + 2 * 3584) * 2
    prefill, joined = 32768 * kv + activations + 15 * 32768 * kv, 16 * kv * (32768 + (32768 + 16) / 28)
    assert full.needs == pytest.approx(weights + max(prefill, joined))
    assert alone.lines[0].needs == pytest.approx(weights + 32768 * kv + activations)
    together = plan_passes(compose([*ASKED, *words, "batch_prefill=together"]), outline=True)
    needs = forecast(together, workloads_of(together, []), Assumptions()).datasets[1].lines[0].needs
    assert needs == pytest.approx(weights + 16 * (32768 * kv + activations))


@pytest.mark.full
@each("way", ["one_by_one", "together"])
def test_memory_of_a_batch_is_near_to_what_its_passes_hold(way, tmp_path, capsys):
    words = [
        "scenario=efficiency",
        "method=snapkv",
        "budget=64",
        "lengths=256",
        "new_tokens=3",
        "prompts=text",
        "batch=8",
    ]
    words += [f"batch_prefill={way}", f"out={tmp_path}/rows", "model.device=cpu"]
    assert verb("plan")([*words, "--memory", "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    forecasts = told["memory"]["cells"]
    assert {one["source"] for one in told["deployment"] if one["name"] == "nbytes"} == {"dry run"}
    done(tmp_path / "rows", *words, "repeats=1")
    assert verb("plan")([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])["deployment"]
    assert {one["source"] for one in told if one["name"] in ("step_s", "tokens_s", "nbytes")} == {"measured"}
    assert verb("plan")([*words, "--bandwidth", "100", "--json"]) == 0
    *text, document = capsys.readouterr().out.splitlines()
    assert {one["source"] for one in json.loads(document)["deployment"] if one["name"] == "step_s"} == {
        "forecast, at least"
    }
    assert any("were measured on cpu, not on the device" in line for line in text)
    store = Store(tmp_path / "rows")
    method = {row["cell"]: row["method"] for row in store.cells().to_pylist()}
    rows = [row for row in store.timings().to_pylist() if row["repeat"] is None and row["phase"] == "total"]
    held = {method[row["cell"]]: row["peak_allocated"] for row in rows}
    for one in forecasts:
        assert one["batch"] == 8 and one["largest"] == pytest.approx(held[one["cell"].partition("@")[0]], rel=0.1)


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
        (["--prompt-tokens", "64"], "--prompt-tokens does not work with scenario=efficiency"),
        (["--image", "28x28"], "give lengths=[...] and prompts="),
        (["lengths=200000"], "lengths=200000 with new_tokens=16 is more than the model's context of 128000"),
        (["model=hf", "model.path=org/name"], "scenario=efficiency cannot plan"),
    ],
)
def test_a_mistake_is_told_in_one_sentence(words, sentence, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("MMKV_BENCH_CACHE", str(tmp_path))
    assert verb("plan")([*ASKED, *words]) == 2
    printed = capsys.readouterr()
    assert sentence in printed.err and printed.err.count("\n") == 1 and printed.out == ""


@pytest.mark.slow
def test_the_page_on_deploying_shows_what_its_commands_print(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("MMKV_BENCH_CACHE", str(tmp_path))  # no device was measured
    page = (ROOT / "docs" / "deploying.md").read_text()
    printed = re.findall(r"```bash\nmmkv-bench plan (.*?)\n```.*?```text\n(.*?)```", page, re.DOTALL)
    assert len(printed) == 2
    for command, shown in printed:
        assert verb("plan")(shlex.split(command)) == 0
        assert shown in capsys.readouterr().out
