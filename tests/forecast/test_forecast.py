"""Promise: what a run must take is said before anything is loaded, in numbers that a reader computes by hand."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from mmkv_bench.config.compose import compose
from mmkv_bench.errors import ConfigError
from mmkv_bench.forecast.device_speed import DeviceSpeed, save
from mmkv_bench.forecast.forecast import Assumptions, forecast, workloads_of
from mmkv_bench.forecast.prefill_counts import notes_of
from mmkv_bench.plan.planner import outline
from mmkv_bench.store.store import Store
from tests.cli.setting import CHECKOUT, verb
from tests.each import each

QWEN = ("model=qwen2_5_vl_7b", "dataset=docvqa", "budget=[64,20%]")
H100 = {"memory": 80 * 2**30, "bandwidth": 3.35e12, "rate": 7e14}


def foreseen(tmp_path, *words: str, **given):
    plan = outline(compose([*words, f"out={tmp_path}/rows"]))
    store = Store(plan.out)
    return forecast_in(plan, store, **given)


def forecast_in(plan, store, **given):
    assumptions = Assumptions(**given)
    return forecast(plan, workloads_of(plan, plan.coverage(store), store, assumptions), assumptions)


@pytest.mark.full
def test_lines_of_7b_are_those_computed_by_hand(tmp_path):
    found = foreseen(tmp_path, *QWEN, "method=[snapkv,meda,kivi]", prompt_tokens=[32768], **H100)
    assert (found.held, found.read, found.kv_per_token) == (2 * 8_292_166_656, 2 * 7_070_619_136, 57_344)
    (docvqa,) = found.datasets
    lines = {(line.label, line.scope): line for line in docvqa.lines}
    assert [*lines] == [("full", "full"), ("64", "layer"), ("20%", "layer"), ("64", "model"), ("20%", "model")]
    assert lines["20%", "layer"].kept == 6553 and lines["20%", "layer"].kv == 6553 * 57_344
    full, few = lines["full", "full"], lines["64", "layer"]
    assert full.read == 14_141_238_272 + 32768 * 57_344 and few.read == 14_141_238_272 + 64 * 57_344
    assert full.ms == pytest.approx(1000 * full.read / 3.35e12) and few.speed_up == pytest.approx(1.1326, abs=1e-4)
    # the prefill holds all of it for who decides after the last layer, one whole layer for who decides at once
    activations = 32768 * (3 * 18944 + 2 * 3584) * 2
    assert lines["64", "model"].needs == full.needs == found.held + 32768 * 57_344 + activations
    assert few.needs == pytest.approx(found.held + (27 * 64 + 32768) * 57_344 / 28 + activations)
    # prompts of 32 K whose caches fit beside the weights while the last one is prefilled
    assert full.batch == (80 * 2**30 - found.held - activations) // (32_768 * 57_344) == 34
    assert any("kivi" in text and "--memory" in text for text in found.missing)
    # 200 prefills; 32 tokens of 6 cells of which all fit one batch of forks: weights once, entries each
    passes = 2 * (28 * 233_046_016 * 32768 + 544_997_376) + 4 * 28 * 28 * 128 * 32768 * 32769 // 2
    assert docvqa.prefill_hours == pytest.approx(200 * passes / 7e14 / 3600)
    entries = 2 * (64 + 6553) + 2 * 32768 + 6 * 16
    assert docvqa.decode_hours == pytest.approx(200 * 32 * (found.read + entries * 57_344) / 3.35e12 / 3600)


@pytest.mark.full
def test_what_is_not_known_is_said_and_not_zero(tmp_path):
    nothing = foreseen(tmp_path, "model=hf", "model.path=org/name", "model.dtype=bfloat16")
    assert (nothing.held, nothing.read, nothing.datasets) == (None, None, ()) and "not here" in nothing.missing[0]
    no_device = foreseen(tmp_path, *QWEN, "method=snapkv")
    (docvqa,) = no_device.datasets
    assert (docvqa.tokens, docvqa.source) == (2048, "assumed")
    assert {line.ms for line in docvqa.lines} == {line.batch for line in docvqa.lines} == {None}
    assert docvqa.prefill_hours is None and any("--bandwidth" in text for text in no_device.missing)
    (seen,) = foreseen(tmp_path, *QWEN, images=[(1344, 896), (280, 280)]).datasets
    assert seen.tokens == 48 * 32 + 10 * 10 + 64
    fewer = foreseen(tmp_path, *QWEN, "model.weights=random", "model.layers=2")
    for words, sentence in ((), "fill 2 such devices"), (("model.device_map=auto",), "lays layers on several devices"):
        large = foreseen(tmp_path, "model=qwen2_5_vl_72b", "dataset=docvqa", "method=snapkv", *words, **H100)
        assert [sentence in text for text in large.missing if "model.device_map" in text] == [True]
    assert fewer.sizes.source == "bound" and 0 < fewer.held < no_device.held and fewer.kv_per_token == 57_344 // 14


def test_lengths_of_stored_answers_are_taken(tmp_path):
    """Of committed rows of the embedded model: their median, until another length is given."""
    words = ("dataset=pages_walk", "page_size=large", "method=[snapkv]", "budget=64", "limit=null")
    plan = outline(compose([*words, "out=results/tiny/large"]))
    store = Store(plan.out)
    stored = forecast_in(plan, store).datasets[0]
    rows = store.responses(plan.names, ["prompt_tokens"])["prompt_tokens"].to_pylist()
    assert stored.source == "stored" and stored.tokens == sorted(rows)[len(rows) // 2] > 500
    given = forecast_in(plan, store, prompt_tokens=[7]).datasets[0]
    assert (given.source, given.tokens) == ("given", 7)


@pytest.mark.full
@each(
    ("flags", "sentence"),
    [
        (["--device-memory", "much"], "--device-memory: 'much' is not a number above 0"),
        (["--device-memory", "-3"], "--device-memory: "),
        (["--bandwidth", "inf"], "--bandwidth: 'inf' is not a number above 0"),
        (["--prompt-tokens", "8k"], "--prompt-tokens: '8k' is not a whole number >= 1"),
        (["--prompt-tokens", "2048,200000"], "--prompt-tokens 200000 is beyond the context of qwen2_5_vl_7b"),
        (["--prompt-tokens", "64", "--visual-tokens", "65"], "--visual-tokens 65 exceeds --prompt-tokens 64"),
        (["--image", "large"], "--image large is not a size in pixels"),
        (["--image", "28x28", "--prompt-tokens", "9"], "--image determines the length of prompts"),
        (["model=hf", "model.path=org/name", "--image", "28x28"], "--image needs the settings of a processor"),
        (["--device", "h100"], "--device h100: no measurement of it"),
        (["model=llama_3_8b", "--visual-tokens", "3"], "llama_3_8b has no visual tokens"),
    ],
)
def test_a_mistake_is_told_in_one_sentence(flags, sentence, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("MMKV_BENCH_CACHE", str(tmp_path))
    assert verb("plan")([*QWEN, *flags]) == 2
    printed = capsys.readouterr()
    assert sentence in printed.err and printed.err.count("\n") == 1 and printed.out == ""


@pytest.mark.slow
def test_the_command_needs_no_torch_and_knows_a_measured_device(tmp_path, monkeypatch):
    monkeypatch.setenv("MMKV_BENCH_CACHE", str(tmp_path))
    save(DeviceSpeed("NVIDIA H100", "cuda", 8, 3e12, {"bfloat16": 7e14}, 80 * 2**30, "2.15.0", "2026-11-22"))
    words = ["plan", *QWEN, "method=snapkv", "--prompt-tokens", "2048", "--json"]
    code = f"import sys; from mmkv_bench.cli.main import main; main({words!r}); print('torch' in sys.modules)"
    environment = CHECKOUT | {"MMKV_BENCH_CACHE": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment, cwd=tmp_path
    )
    *text, document, heavy = ended.stdout.splitlines()
    assert heavy == "False", ended.stderr
    told = json.loads(document)["forecast"]
    assert told["given"] | {"prompt_tokens": []} == {
        "prompt_tokens": [], "visual_tokens": None, "images": [], "memory": 80 * 2**30, "bandwidth": 3e12, "rate": 7e14,
        "device": "nvidia-h100",
    }  # fmt: skip
    assert [line["label"] for line in told["datasets"][0]["lines"]] == ["full", "64", "20%"]
    assert any("1.01x" in line and "4.71" in line for line in text) and any("may fit" in line for line in text)


@pytest.mark.slow
@each(
    ("flags", "told"),
    [
        (["--device-memory", "24", "--bandwidth", "936"], (24 * 2**30, 9.36e11, None, "")),
        (["--matmul", "400"], (None, None, 4e14, "")),
        (["--device", "nvidia-h100"], (80 * 2**30, 3e12, 7e14, "nvidia-h100")),
        (
            ["--device", "nvidia-h100", "--bandwidth", "936", "--matmul", "40"],
            (80 * 2**30, 9.36e11, 4e13, "nvidia-h100 with --bandwidth and --matmul as given"),
        ),
    ],
)
def test_numbers_of_two_devices_are_not_mixed_unless_one_is_named(flags, told, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("MMKV_BENCH_CACHE", str(tmp_path))
    save(DeviceSpeed("NVIDIA H100", "cuda", 8, 3e12, {"bfloat16": 7e14}, 80 * 2**30, "2.15.0", "2026-11-22"))
    assert verb("plan")([*QWEN, "method=snapkv", f"out={tmp_path}/rows", *flags, "--json"]) == 0
    given = json.loads(capsys.readouterr().out.splitlines()[-1])["forecast"]["given"]
    assert tuple(given[name] for name in ("memory", "bandwidth", "rate", "device")) == told


def test_the_speed_up_is_that_of_the_milliseconds_beside_it_where_computing_binds_too(tmp_path):
    slow = H100 | {"rate": 5e12}
    full, few, _ = foreseen(tmp_path, *QWEN, "method=snapkv", prompt_tokens=[32768], **slow).datasets[0].lines
    assert full.ms > 1000 * full.read / slow["bandwidth"], "operations bind"
    assert few.speed_up == pytest.approx(full.ms / few.ms) and few.speed_up != pytest.approx(full.read / few.read)
    full, few, _ = foreseen(tmp_path, *QWEN, "method=snapkv", prompt_tokens=[32768]).datasets[0].lines
    assert few.ms is None and few.speed_up == pytest.approx(full.read / few.read)


@pytest.mark.slow
def test_documents_are_prefilled_once_and_replays_and_conversations_are_counted(tmp_path):
    """DocVQA states 5,349 questions on 1,286 pages: 100 of them on 25 pages. Qwen2.5-VL-7B, 32 tokens an answer."""
    words = ("model=qwen2_5_vl_7b", "dataset=docvqa", "limit=100", "budget=64")
    plan = outline(compose([*words, "method=kvzip", "protocol=[query_agnostic,query_joint]", f"out={tmp_path}/rows"]))
    store = Store(plan.out)
    (work,) = workloads_of(plan, plan.coverage(store), store, Assumptions(prompt_tokens=[5000]))
    assert work.prefills == {5000: 25 + 25}
    assert work.fed == {(2048, 5000): 2 * 2 * 25, (904, 5000): 2 * 25}, (
        "the context once more, in chunks, a page and protocol"
    )
    told = foreseen(tmp_path, *words, "method=kvzip", "protocol=query_agnostic", prompt_tokens=[5000], **H100)
    plain = foreseen(tmp_path, *words, "method=snapkv", "protocol=query_agnostic", prompt_tokens=[5000], **H100)
    fed = 2 * 28 * 233_046_016 * 5000 + 4 * 28 * 28 * 128 * (5000 * 5000 + (2 * 2048 * 2049 + 904 * 905) // 2)
    more = told.datasets[0].prefill_hours - plain.datasets[0].prefill_hours
    assert more == pytest.approx(25 * fed / 7e14 / 3600)

    plan = outline(compose([*words, "method=snapkv", "protocol=turns", f"out={tmp_path}/rows"]))
    known = Assumptions(prompt_tokens=[5000], visual_tokens=4900)
    (work,) = workloads_of(plan, plan.coverage(store), store, known)
    turn = 100 + 32  # the prompt's text and an answer
    assert work.prefills == {5000: 2 * 25} and work.fed == {(turn, 5000): 75, (turn, 64): 75}
    assert work.weight_reads == 100 * 32 * 2, "conversations decode one by one"
    earlier = 5349 / 1286 / 2 - 0.5  # turns before one: full keeps them all, snapkv 64 entries
    assert work.entry_reads == pytest.approx(100 * 32 * (5000 + earlier * turn + 64 + 2 * 16))
    unknown = outline(
        compose([*words[:1], "dataset=docvqa", "dataset.about.samples=many", *words[3:], "protocol=query_first"])
    )
    assert "every question counts as a document" in notes_of(unknown)[0] and not notes_of(plan)


def test_a_long_prompt_is_refused_before_anything_is_counted(tmp_path):
    with pytest.raises(ConfigError, match="beyond the context"):
        foreseen(tmp_path, *QWEN, prompt_tokens=[128_001])


def test_windows_are_counted_beside_what_a_budget_keeps(tmp_path):
    """Gemma 3 270M at 2,048 tokens: 3 KiB a token in 3 layers, and 511 entries of 1 KiB in each of 15."""
    words = ("model=gemma3_270m", "dataset=english_records", "method=snapkv", "budget=10%", "limit=2")
    found = foreseen(tmp_path, *words, "protocol=[paper,strict]", prompt_tokens=[2048], bandwidth=1e11)
    lines = {line.label: line for line in found.datasets[0].lines}
    windows = 15 * 511 * 1024
    assert found.kv_per_token == 3072
    assert (lines["full"].kv, lines["10%"].kv) == (2048 * 3072 + windows, 204 * 3072 + windows)
    assert lines["10%"].read == found.read + 204 * 3072 + windows
    assert lines["full"].needs > found.held + 2048 * 3072 + windows
