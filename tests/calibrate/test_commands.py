"""`python -m mmkv_bench calibrate`: the same command writes the same bytes; what it measures is what the papers define."""

from __future__ import annotations

import dataclasses
import json
import shlex
from fractions import Fraction
from pathlib import Path
from statistics import fmean, pstdev

import pytest
import torch

from mmkv_bench.calibrate import measurements
from mmkv_bench.calibrate.artefact import METHODS, load
from mmkv_bench.calibrate.command import measured
from mmkv_bench.calibrate.measurements import MEASUREMENTS
from mmkv_bench.cli.grammar import VERBS, reader
from mmkv_bench.cli.verbs.measure import SAMPLES, with_defaults
from mmkv_bench.models.files import folder_fingerprint
from mmkv_bench.tiny import WEIGHTS
from tests import cover
from tests.cli.setting import verb
from tests.each import each

main = verb("calibrate")


def options(*words: str):
    return with_defaults(reader("calibrate")[1].read(words))


def test_the_help_names_every_method_and_what_is_measured(capsys):
    measured = VERBS["calibrate"]["arguments"]["method"]["choices"]
    assert set(measured) == set(SAMPLES) == set(METHODS)
    assert main(["--help"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert all(f"{name}: {text}" in told for name, text in measured.items())
    assert ", ".join(f"{number} for {name}" for name, number in SAMPLES.items()) in told


def test_a_flag_of_another_method_is_refused(capsys):
    assert main(["sparsemm", "--delta", "0.1"]) == 2
    assert "--delta is only for prefixkv; sparsemm takes no such flag; drop --delta" in capsys.readouterr().err


@pytest.mark.full
@cover.few("method", METHODS)
def test_the_same_command_writes_the_same_bytes(method, tmp_path, capsys):
    files = [tmp_path / name for name in ("first.json", "second.json")]
    for file in files:
        assert main([method, "--samples", "2", "--kinds", "lookup,chain3", "--out", str(file)]) == 0
        torch.rand(5)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert f"wrote {files[0]}" in capsys.readouterr().out
    made = load(method, str(files[0]), "tiny", folder_fingerprint(WEIGHTS))
    assert made.samples == ["lookup-small-train-000000", "chain3-small-train-000000"]
    assert made.settings["samples"] == 2 and made.dataset == "small train pages of the kinds lookup, chain3, in turn"


ONE_ENTRY = 1 / 274  # of the longest of its prompts


@pytest.mark.full
def test_the_committed_prefix_configuration_comes_from_its_command():
    """But for the versions it was made with, and for what another CPU's rounding can do: the search counts whole entries,
    so that a sum that rounds otherwise moves an entry from one layer to another, in some of ten prompts."""
    committed = load("prefixkv", "auto", "tiny", folder_fingerprint(WEIGHTS))
    again = measured(options("prefixkv"))
    numbers = {name: (again.data.pop(name), committed.data.pop(name)) for name in ("ratios", "std")}
    assert dataclasses.replace(again, versions=committed.versions, checksum="") == dataclasses.replace(
        committed, checksum=""
    )
    for found, expected in numbers.values():
        assert len(found) == len(expected) == 100
        for shares, known in zip(found, expected, strict=True):
            assert shares == pytest.approx(known, abs=ONE_ENTRY)


@pytest.mark.full
@each(
    ("words", "message"),
    [
        (["prefixkv", "--samples", "0"], "--samples: '0' is not a whole number >= 1"),
        (["sparsemm", "--kinds", "look_up"], "did you mean 'lookup'"),
        (["hybridkv", "--name", "a/b"], "is not a plain name"),
        (["hybridkv", "--samples", "1", "--quantile", "2"], "--quantile 2.0 is not a quantile; allowed: 0 to 1"),
        (["prefixkv", "--path", "./nowhere"], "model.path=./nowhere does not exist"),
    ],
)
def test_wrong_options_are_one_sentence_and_exit_code_2(words, message, capsys, tmp_path):
    assert main([*words, "--out", str(tmp_path / "none.json")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "none.json").exists()


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("mmkv_bench.calibrate.command.measured", lambda *_: pytest.fail("measured all the same"))
    (tmp_path / "file").write_text("x")
    for out, message in (
        (tmp_path / "file" / "below" / "a.json", f"{tmp_path / 'file'} is not a folder"),
        (Path("/proc/nowhere/a.json"), "cannot write in /proc"),
        (tmp_path, f"--out {tmp_path} is a folder; name a file in it"),
    ):
        assert main(["prefixkv", "--samples", "1", "--out", str(out)]) == 2
        printed = capsys.readouterr().err
        assert message in printed and printed.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_test_pages_are_no_choice(capsys):
    assert main(["prefixkv", "--split", "test"]) == 2
    assert "invalid choice: 'test'" in capsys.readouterr().err


# ---------------------------------------------------------------- PrefixKV


def naive_shares(importance: list[list[float]], rho: Fraction) -> list[float]:
    """R_l of one prompt: halve [0, 1] until the prefixes add up, then scale to the budget with nobody above 1."""
    layers, n = len(importance), len(importance[0])
    curves = []
    for row in importance:
        ordered, total, run = sorted(row, reverse=True), sum(row), 0.0
        curves.append([])
        for value in ordered:
            run += value / total
            curves[-1].append(run)
    low, high = 0.0, 1.0
    for _ in range(64):
        p = (low + high) / 2
        counts = [next((i + 1 for i, value in enumerate(curve) if value >= p), n) for curve in curves]
        if sum(counts) == rho * layers * n:
            break
        low, high = (p, high) if sum(counts) < rho * layers * n else (low, p)
    shares, budget = [Fraction(count, n) for count in counts], rho * layers
    closed: set[int] = set()
    while True:
        factor = (budget - len(closed)) / sum(s for i, s in enumerate(shares) if i not in closed)
        over = {i for i, s in enumerate(shares) if i not in closed and s * factor > 1}
        if not over:
            return [1.0 if i in closed else float(s * factor) for i, s in enumerate(shares)]
        closed |= over


@pytest.mark.full
def test_prefix_shares_are_those_of_the_attention_that_the_model_reports():
    from mmkv_bench.calibrate.samples import page
    from mmkv_bench.config.schema import Model
    from mmkv_bench.generation.encode import encode
    from mmkv_bench.models.load import load_model

    loaded, sample = load_model(Model(name="tiny", device="cpu"), str(WEIGHTS)), page("lookup", "small", "train", 1)
    got = measurements.prefix_shares(loaded, sample, {"delta": 0.0, "steps": 0})
    prompt = encode(loaded.processor, loaded.family, "page", sample.messages, sample.images)
    loaded.model.set_attn_implementation({"text_config": "eager"})
    with torch.no_grad():
        attentions = loaded.model(**prompt.inputs, output_attentions=True, use_cache=False).attentions
    importance = [layer[0].double().sum((0, 1)).tolist() for layer in attentions]
    n = prompt.length
    for i in (0, 9, 19, 49, 79, 98):
        want = naive_shares(importance, Fraction(i + 1, 100))
        # float32 sums may order near ties otherwise and so move a prefix by an entry
        assert got[i] == pytest.approx(want, abs=1.5 / n)
        assert sum(got[i]) == pytest.approx(4 * (i + 1) / 100, abs=1e-12)


def test_shares_are_averaged_and_scaled_to_the_budget():
    found = [[[0.2, 0.4]] * 100, [[0.4, 0.4]] * 100]
    data = measurements.prefix_profile(found, {}, 1)
    assert data["grid"] == [i / 100 for i in range(1, 101)] and data["layers"] == 2
    at = data["grid"].index(0.35)
    assert data["ratios"][at] == pytest.approx([0.3, 0.4])
    assert data["ratios"][data["grid"].index(0.7)] == pytest.approx([0.6, 0.8])
    assert data["ratios"][data["grid"].index(0.9)] == pytest.approx([0.8, 1.0])  # nobody keeps more than everything
    assert data["ratios"][-1] == [1.0, 1.0]
    assert data["std"][at] == pytest.approx([0.1, 0.0])


def test_every_committed_row_adds_up_to_its_budget():
    data = load("prefixkv", "auto", "tiny", folder_fingerprint(WEIGHTS)).data
    assert len(data["grid"]) == len(data["ratios"]) == len(data["std"]) == 100
    for rho, row in zip(data["grid"], data["ratios"], strict=True):
        assert len(row) == data["layers"] == 4
        assert sum(row) == pytest.approx(4 * rho, abs=4e-6) and max(row) <= 1


# ---------------------------------------------------------------- HybridKV and MM-ShiftKV


def test_theta_is_the_quantile_of_all_heads_and_samples():
    found = [[[0.1, 0.9], [0.5, 0.7]], [[0.3, 0.8], [0.6, 1.0]]]
    values = sorted([0.1, 0.9, 0.5, 0.7, 0.3, 0.8, 0.6, 1.0])
    for q in (0.0, 0.3, 0.5, 1.0):
        data = measurements.sparsity_threshold(found, {"quantile": q}, 2)
        want = torch.quantile(torch.tensor(values, dtype=torch.float64), q).item()
        assert data["theta"] == pytest.approx(want)
    assert data["sparsity"] == [pytest.approx([0.2, 0.85]), pytest.approx([0.55, 0.85])]
    assert data["std"][0] == pytest.approx([0.1, 0.05])
    assert data["quantiles"]["0.00"] == 0.1 and data["quantiles"]["1.00"] == 1.0 and len(data["quantiles"]) == 21


def test_spread_of_answers_against_prompts():
    states = torch.tensor([[1.0, 3.0], [5.0, 7.0], [0.0, 8.0], [8.0, 0.0]])
    mean, prompt, answer = measurements.moments(states, 2)
    assert mean == [3.0, 5.0]
    assert prompt == pytest.approx(pstdev([1, 3, 5, 7])) and answer == pytest.approx(4.0)
    data = measurements.state_statistics([[(mean, prompt, answer)], [([1.0, 1.0], 1.0, 2.0)]], {}, 1)
    assert data["mean"] == [[2.0, 3.0]]
    assert data["gamma"] == pytest.approx([fmean([answer, 2.0]) / fmean([prompt, 1.0])])


@pytest.mark.slow
def test_artefacts_are_plain_json_with_sorted_keys(tmp_path):
    file = tmp_path / "one.json"
    assert main(["hybridkv", "--samples", "1", "--kinds", "lookup", "--out", str(file)]) == 0
    text = file.read_text()
    assert list(json.loads(text)) == sorted(json.loads(text)) and str(tmp_path) not in text


def test_the_documented_commands_are_commands():
    """Each names options that exist; the plain ones made the committed files."""
    text = (Path(__file__).parents[2] / "docs" / "calibration.md").read_text()
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith("python -m mmkv_bench calibrate ")]
    made = [options(*shlex.split(line)[4:]) for line in lines]
    assert len(made) >= 7
    for method in METHODS:
        (plain,) = [one for one, line in zip(made, lines, strict=True) if line.endswith(f"calibrate {method}")]
        committed = load(method, "auto", "tiny", folder_fingerprint(WEIGHTS))
        assert plain.samples == len(committed.samples) == committed.settings["samples"]
        own = MEASUREMENTS[method].options
        assert {name: committed.settings[name] for name in own} == {name: getattr(plain, name) for name in own}


def test_an_unknown_model_is_refused_by_name(tmp_path, capsys):
    assert main(["prefixkv", "--model", "internvl3_2", "--out", str(tmp_path / "no.json")]) == 2
    assert "did you mean 'internvl3_2b'" in capsys.readouterr().err


@pytest.mark.full  # a model of its true width
def test_a_configured_model_is_measured_as_a_run_of_it_finds_it(tmp_path):
    from mmkv_bench.config.files import content
    from mmkv_bench.config.schema import Model
    from mmkv_bench.models.source import Source

    words = ["prefixkv", "--model", "internvl3_2b", "--weights", "random", "--layers", "1", "--samples", "1"]
    assert main([*words, "--kinds", "lookup", "--out", str(tmp_path / "artefact.json")]) == 0
    found = json.loads((tmp_path / "artefact.json").read_text())
    node = Model(**content("model", "internvl3_2b") | {"weights": "random", "layers": 1})
    assert (found["model"], found["model_fingerprint"]) == ("internvl3_2b", Source.of(node).fingerprint()[0])
    assert found["data"]["layers"] == 1
