"""Promise: pictures of diagnostics draw what rows hold, each analysis as its paper's figure has it."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest

from mmkv_bench.cli.grammar import VERBS
from mmkv_bench.errors import ConfigError
from mmkv_bench.store.files import canonical_json, checksum
from mmkv_bench.store.store import Store
from mmkv_bench.tables.diagnostic_figure import DRAWINGS, diagnostic_figure, panels
from tests.cli.setting import verb

LAYERS, HEADS, SAMPLES = 3, 2, 4


def numbers(name: str, sample: int, layer: int, part: str) -> list[tuple]:
    """(quantity, part, head, x, value) of a made-up layer."""
    up = sample / 10 + layer
    heads = range(HEADS)
    return {
        "hidden_states": [(q, p, None, None, up + (q == "std"))
                          for q in ("mean", "std") for p in ("prompt", "text", "visual", "answer")],
        "coverage": [("attention_coverage", part, None, None, (up + 1) / 8)],
        "feature_error": [("feature_error", part, None, None, up)],
        "histogram": [("density", p, None, x, 0.1 + up) for p in ("prompt", "answer") for x in (-0.125, 0.125)],
        "outlier_hits": [("outlier_hit_rate", "", None, x, up / x) for x in (1.0, 10.0)],
        "lorenz": [("lorenz", "", None, x, x**2) for x in (0.5, 1.0)] + [("gini", "", None, None, up / 4)],
        "prefix_search": [("kept_ratio", "", None, i / 10, i / 10) for i in range(1, 10)]
        + [("search_steps", "", None, 0.1, 7.0)],
        "entropy": [("cross_modal_entropy", "", None, None, up)],
        "cumulative_attention": [("top_mass", "", h, x, x * (layer + h) / 4) for h in heads for x in (0.2, 1.0)],
        "focus": [("focus", "", h, x, x * (layer + h) / 4) for h in heads for x in (0.2, 1.0)],
        "sinks": [("first_token_mass", "", h, None, up / 4) for h in heads]
        + [("activation_ratio", "", None, None, 9.0), ("sink_heads", "", None, None, 0.5)],
        "vision": [("vision", part, None, None, up / 4) for part in ("answer's attention", "neighbours")],
        "power_spectrum": [("power", p, None, x, 0.1 + up) for p in ("keys", "values") for x in (0.25, 0.75)],
    }[name]  # fmt: skip


def stored(root, name, part="", **method):
    """A measurement of an analysis; of a method where there is one."""
    settings = {"weights": "random"} | ({"method": method} if method else {})
    told = {"name": name, "model": "made", "model_fingerprint": "f" * 16, "dtype": "float32", "dataset": "things",
            "dataset_fingerprint": "d" * 16, "settings": json.dumps(settings), "versions": "{}"}  # fmt: skip
    told["measurement"] = checksum(canonical_json(told).encode())
    columns = ("quantity", "part", "head", "x", "value")
    for sample in range(SAMPLES):
        rows = [dict(zip(columns, row, strict=True)) | {"layer": layer}
                for layer in range(LAYERS) for row in numbers(name, sample, layer, part)]  # fmt: skip
        Store(root).write_diagnostics(pa.Table.from_pylist([row | told | {"sample_id": str(sample)} for row in rows]))
    return root


def lines(figure, panel: int = 0):
    """Label -> points of a panel's lines."""
    return {line.get_label(): line.get_xydata().tolist() for line in figure.axes[panel].lines}


@pytest.mark.slow
def test_every_analysis_is_drawn_and_every_panel_says_of_what(tmp_path):
    assert set(DRAWINGS) == set(VERBS["diagnose"]["arguments"]["name"]["choices"])
    for name in DRAWINGS:
        told = {"budget_kind": "entries", "budget": "64"} if name in ("coverage", "feature_error") else {}
        found = panels(stored(tmp_path / name, name, "snapkv@64" if told else "", **told), name)
        figure = diagnostic_figure(found)
        assert figure.axes[0].get_title(loc="left") == "made, things, 4 samples; random weights"
        drawn = sum(len(axes.lines) + len(axes.images) for axes in figure.axes)
        assert drawn >= (2 * LAYERS if name in ("cumulative_attention", "focus") else 1) and figure.get_supxlabel()


def test_lines_are_means_over_samples(tmp_path):
    middle = 0.15  # of the samples
    at = diagnostic_figure(panels(stored(tmp_path, "hidden_states"), "hidden_states"))
    assert lines(at)["prompt"] == [pytest.approx([layer, layer + middle]) for layer in range(LAYERS)]
    assert lines(at, 1)["visual"] == lines(at)["answer"]
    at = diagnostic_figure(panels(stored(tmp_path, "outlier_hits"), "outlier_hits"))
    assert lines(at)["gamma 10"] == [pytest.approx([layer, (layer + middle) / 10]) for layer in range(LAYERS)]
    at = diagnostic_figure(panels(stored(tmp_path, "cumulative_attention"), "cumulative_attention"))
    assert lines(at)["layer 2, head 1"] == [pytest.approx([0.2, 0.15]), pytest.approx([1.0, 0.75])]
    assert lines(at)["layer 0, head 0"] == [[0.2, 0.0], [1.0, 0.0]], "the flattest stands out too"
    stored(tmp_path, "coverage", "full")
    for budget in ("64", "128"):
        stored(tmp_path, "coverage", f"snapkv@{budget}", budget_kind="entries", budget=budget)
    at = diagnostic_figure(panels(tmp_path, "coverage"))
    assert [x for x, _ in lines(at)["snapkv"]] == [64, 128] and "full" in lines(at)
    at = diagnostic_figure(panels(stored(tmp_path, "lorenz"), "lorenz"))
    assert (
        "Gini 0.04 (layer 0)" in at.axes[0].texts[0].get_text() and "0.54 (layer 2)" in at.axes[0].texts[0].get_text()
    )


def test_the_command_draws_and_says_what_is_not_there(tmp_path, capsys):
    stored(tmp_path, "entropy")
    assert verb("plot")(["entropy", str(tmp_path), "--out", str(tmp_path / "drawn")]) == 0
    assert (tmp_path / "drawn.png").stat().st_size > 5000 and (tmp_path / "drawn.svg").is_file()
    assert verb("plot")(["focus", str(tmp_path), "--out", str(tmp_path / "drawn")]) == 2
    assert "it has: entropy" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="no dataset 'nothings'"):
        panels(tmp_path, "entropy", ["nothings"])
