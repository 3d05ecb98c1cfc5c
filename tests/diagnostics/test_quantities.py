"""Analyses of a prompt: every number against its definition written out; what is appended stands where decoding puts it."""

from __future__ import annotations

import json
import math
from statistics import fmean, pstdev
from types import SimpleNamespace

import pytest
import torch

from mmkv_bench.calibrate.measurements import read_layers, with_answer
from mmkv_bench.cli.grammar import VERBS, reader
from mmkv_bench.compression.observation import Needs
from mmkv_bench.diagnostics.quantities import BANDS, DELTAS, QUANTITIES, PromptFacts, Value, sink_heads
from mmkv_bench.errors import DataError, StoreError
from mmkv_bench.models.files import folder_fingerprint
from mmkv_bench.store.store import Store
from mmkv_bench.tiny import WEIGHTS
from tests import cover, reference, zoo
from tests.cli.setting import verb
from tests.compression import oracles

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen2_vl", "llava_next", "internvl_qwen3")
PROMPT, TOTAL = 24, 30
KEPT = {"some@3": [torch.tensor([[1, 5, 23], [-1, 0, 9]])], "all@24": [torch.arange(24).expand(2, -1)]}
TYPES = torch.tensor([0, 0, 1, 1, 1, 1, 0, 1, 1, 0, *[1] * 9, *[0] * 11])


def seen(name: str, seed: int = 0):
    """(observation, layer, prompt length, values) of a made-up layer; behind the prompt where the analysis reads answers."""
    quantity = QUANTITIES[name]
    total = TOTAL if quantity.answer else PROMPT
    layer = oracles.make_layer(total, 2, 3, seed=seed)
    obs = layer.observe(quantity.needs)
    obs.token_types = TYPES[:total]
    found = quantity.read(obs, PromptFacts(PROMPT, KEPT if quantity.methods else {}))
    return obs, layer, {(v.quantity, v.part, v.head, v.x): v.value for v in found}


def attention(layer) -> list[list[list[float]]]:
    """Causal attention, [Hq][T][T], a row at a time."""
    rows = []
    for h in range(layer.query.shape[0]):
        rows.append(
            [
                oracles.attention(layer.query[h, i], layer.key[h // 3], layer.scaling, i).tolist()
                for i in range(layer.length)
            ]
        )
    return rows


def test_hidden_states_are_means_and_spreads_of_all_values_of_their_tokens():
    _, layer, got = seen("hidden_states")
    rows = layer.hidden.tolist()
    parts = {
        "prompt": range(PROMPT),
        "text": [i for i in range(PROMPT) if TYPES[i] == 0],
        "visual": [i for i in range(PROMPT) if TYPES[i] > 0],
        "answer": range(PROMPT, TOTAL),
    }
    assert {part for _, part, _, _ in got} == set(parts)
    for part, tokens in parts.items():
        values = [value for i in tokens for value in rows[i]]
        assert got["mean", part, None, None] == pytest.approx(fmean(values), abs=1e-6)
        assert got["std", part, None, None] == pytest.approx(pstdev(values), rel=1e-6)


def test_lorenz_curve_and_gini_are_those_of_the_attention_that_tokens_gather():
    _, layer, got = seen("lorenz")
    maps = attention(layer)
    sums = sorted(math.fsum(head[i][j] for head in maps for i in range(PROMPT)) for j in range(PROMPT))
    for point in (1, 25, 50, 99, 100):
        place = point / 100 * PROMPT
        whole = math.floor(place + 1e-9)
        part = (place - whole) * sums[whole] if whole < PROMPT else 0
        assert got["lorenz", "", None, point / 100] == pytest.approx(
            (math.fsum(sums[:whole]) + part) / math.fsum(sums), rel=1e-5
        )
    apart = fmean(abs(a - b) for a in sums for b in sums)  # half the relative mean difference
    assert got["gini", "", None, None] == pytest.approx(apart / (2 * fmean(sums)), rel=1e-5)


def test_sinks_are_the_first_tokens_attention_of_every_head_and_the_share_of_heads_above_a_threshold():
    _, layer, got = seen("sinks")
    maps = attention(layer)
    means = [fmean(head[i][0] for i in range(PROMPT // 2, PROMPT)) for head in maps]
    for number, mean in enumerate(means):
        assert got["first_token_mass", "", number, None] == pytest.approx(mean, rel=1e-5)
    values = sorted(abs(value) for row in layer.hidden.tolist()[:PROMPT] for value in row)
    median = values[(len(values) - 1) // 2]
    assert got["activation_ratio", "", None, None] == pytest.approx(values[-1] / median, rel=1e-5)
    made = [[Value("first_token_mass", mass, head=0) for mass in (0.31, 0.3, 0.29)], [Value("activation_ratio", 9.0)]]
    *_, (of_layer, share) = sink_heads(made)
    assert (of_layer, share.quantity, share.value) == (None, "sink_heads", pytest.approx(1 / 3))


def test_vision_is_the_answers_attention_to_visual_tokens_and_the_likeness_of_their_keys():
    _, layer, got = seen("vision")
    maps, visual = attention(layer), [i for i in range(PROMPT) if TYPES[i] > 0]
    answer = [[fmean(head[i][j] for i in range(PROMPT, TOTAL)) for j in visual] for head in maps]
    want = {"answer's attention": fmean(math.fsum(head) for head in answer)}
    tenth = math.ceil(len(visual) / 10)
    want["on a tenth of them"] = fmean(math.fsum(sorted(head)[-tenth:]) / math.fsum(head) for head in answer)
    gathered = [fmean(math.fsum(head[i][j] for head in maps) for i in range(j, TOTAL)) for j in visual]
    median = sorted(gathered)[(len(visual) - 1) // 2]
    want["visual sinks"] = fmean(mass >= 10 * median for mass in gathered)
    keys = [oracles.turn(head, -torch.arange(TOTAL)).double() for head in layer.key]

    def likeness(head, i, j):
        return float(head[i] @ head[j] / (head[i].norm() * head[j].norm()))

    pairs = [fmean(likeness(head, i, j) for i in visual for j in visual if i != j) for head in keys]
    beside = [(i, i + 1) for i in visual if i + 1 in visual]
    want["neighbours"] = fmean(fmean(likeness(head, *pair) for pair in beside) - all_pairs
                               for head, all_pairs in zip(keys, pairs, strict=True))  # fmt: skip
    assert got == {("vision", part, None, None): pytest.approx(value, rel=1e-4) for part, value in want.items()}
    assert 0 < want["answer's attention"] < 1


def test_vision_knows_sinks_and_the_same_place_in_the_next_picture():
    obs, layer, _ = seen("vision")
    obs.token_types = torch.tensor([0, 1, 1, 1, 0, 1, 1, 1, *[0] * (TOTAL - 8)])
    got = {value.part: value.value for value in QUANTITIES["vision"].read(obs, PromptFacts(PROMPT))}
    keys = [
        torch.nn.functional.normalize(oracles.turn(head, -torch.arange(TOTAL)).double(), dim=-1) for head in layer.key
    ]
    places = (1, 2, 3, 5, 6, 7)
    pairs = [fmean(float(head[i] @ head[j]) for i in places for j in places if i != j) for head in keys]
    same = [fmean(float(head[i] @ head[i + 4]) for i in (1, 2, 3)) for head in keys]
    assert got["next picture"] == pytest.approx(fmean(same) - fmean(pairs), rel=1e-4)
    reads = {
        name: getattr(obs, name)
        for name in ("key", "queries", "rotation", "scaling", "device", "token_types", "sinks", "reach")
    }
    heavy = obs.column_sums.clone()
    heavy[:, 2] *= 1000
    with_sink = SimpleNamespace(**reads, column_sums=heavy)
    made = {value.part: value.value for value in QUANTITIES["vision"].read(with_sink, PromptFacts(PROMPT))}
    assert made["visual sinks"] == pytest.approx(1 / 6)
    obs.token_types = torch.zeros(TOTAL)
    assert list(QUANTITIES["vision"].read(obs, PromptFacts(PROMPT))) == []


def test_cross_modal_entropy_is_that_of_the_two_mean_maps():
    _, layer, got = seen("entropy")
    text, visual = ([i for i in range(PROMPT) if (TYPES[i] > 0) == kind] for kind in (False, True))

    def half(rows, columns):
        found = []
        for i in rows:
            heads = [
                oracles.attention(layer.query[h, i], layer.key[h // 3][columns], layer.scaling, None)
                for h in range(layer.query.shape[0])
            ]
            mean = (sum(heads) / len(heads)).tolist()
            found.append(-math.fsum(p * math.log(p) for p in mean if p))
        return fmean(found)

    assert got == {
        ("cross_modal_entropy", "", None, None): pytest.approx(half(text, visual) + half(visual, text), rel=1e-5)
    }
    one = seen("entropy")[0]
    one.token_types = torch.zeros(PROMPT)
    assert list(QUANTITIES["entropy"].read(one, PromptFacts(PROMPT))) == []


def test_cumulative_attention_is_the_mean_over_text_rows_of_their_largest_probabilities():
    _, layer, got = seen("cumulative_attention")
    maps, text = attention(layer), [i for i in range(PROMPT) if TYPES[i] == 0]
    for share in (0.05, 0.3, 0.5, 1.0):
        top = math.ceil(round(share * PROMPT, 9))
        for head in range(2):
            want = fmean(
                math.fsum(sorted(maps[h][i], reverse=True)[:top]) for h in range(3 * head, 3 * head + 3) for i in text
            )
            assert got["top_mass", "", head, share] == pytest.approx(want, rel=1e-5)
    assert len(got) == 40


def test_power_spectrum_is_the_energy_of_cosines_written_out():
    _, layer, got = seen("power_spectrum")
    for part, tensor in (("keys", layer.key), ("values", layer.value)):
        power = []
        for m in range(PROMPT):
            scale = math.sqrt((1 if m == 0 else 2) / PROMPT)
            wave = torch.tensor([scale * math.cos(math.pi * m * (2 * n + 1) / (2 * PROMPT)) for n in range(PROMPT)])
            power.append(float((tensor.double() * wave.double()[None, :, None]).sum(1).square().sum()))
        for m, energy in enumerate(power):
            x = (m * BANDS // PROMPT + 0.5) / BANDS
            assert got["power", part, None, x] == pytest.approx(energy / math.fsum(power), rel=1e-4)
        assert math.fsum(v for (_, p, _, _), v in got.items() if p == part) == pytest.approx(1)


def test_coverage_is_the_answers_attention_on_what_is_kept():
    _, layer, got = seen("coverage")
    maps = attention(layer)
    for part, heads in (("some@3", ((1, 5, 23), (0, 9))), ("all@24", (range(24),) * 2), ("full", (range(24),) * 2)):
        want = fmean(math.fsum(maps[h][i][j] for j in heads[h // 3]) for h in range(6) for i in range(PROMPT, TOTAL))
        assert got["attention_coverage", part, None, None] == pytest.approx(want, rel=1e-5)
    assert got["attention_coverage", "some@3", None, None] < got["attention_coverage", "full", None, None] < 1


def test_focus_counts_are_those_of_the_largest_keys_of_every_step():
    _, layer, got = seen("focus")
    top = math.ceil(0.05 * PROMPT)
    for head in range(2):
        counts = [0] * PROMPT
        for h in range(3 * head, 3 * head + 3):
            for i in range(PROMPT, TOTAL):
                row = (layer.key[head, :PROMPT] @ layer.query[h, i]).tolist()
                for j in sorted(range(PROMPT), key=lambda j: -row[j])[:top]:
                    counts[j] += 1
        counts.sort(reverse=True)
        for x in (0.05, 0.25, 0.5, 1.0):
            want = sum(counts[: math.ceil(round(x * PROMPT, 9))]) / sum(counts)
            assert got["focus", "", head, x] == pytest.approx(want)


def test_histograms_are_shares_of_all_values_by_width():
    _, layer, got = seen("histogram")
    for part, rows in (("prompt", layer.hidden[:PROMPT]), ("answer", layer.hidden[PROMPT:])):
        values = [value for row in rows.float().tolist() for value in row]
        for low in (-1.0, 0.0, 0.75):
            want = sum(low <= value < low + 0.25 for value in values) / len(values) / 0.25
            assert got["density", part, None, low + 0.125] == pytest.approx(want)
        assert sum(v for (q, p, _, _), v in got.items() if (q, p) == ("density", part)) * 0.25 == pytest.approx(1)
        assert got["outside", part, None, None] == 0


def test_the_search_is_algorithm_1_of_all_layers_together():
    """Halve [0, 1] until the prefixes of all layers hold half of the entries but for delta layers."""
    layers = [oracles.make_layer(PROMPT, 2, 3, seed=seed) for seed in range(3)]
    quantity = QUANTITIES["prefix_search"]
    found = [list(quantity.read(layer.observe(quantity.needs), PromptFacts(PROMPT))) for layer in layers]
    got = {(layer, v.quantity, v.x): v.value for layer, v in quantity.finish(found)}
    curves = []
    for layer in layers:
        maps = attention(layer)
        sums = sorted(
            (math.fsum(head[i][j] for head in maps for i in range(PROMPT)) for j in range(PROMPT)), reverse=True
        )
        curves.append([math.fsum(sums[: j + 1]) / math.fsum(sums) for j in range(PROMPT)])
    for delta in DELTAS:
        low, high, steps = 0.0, 1.0, 0
        while True:
            p, steps = (low + high) / 2, steps + 1
            shares = [next(j + 1 for j, value in enumerate(curve) if value >= p) / PROMPT for curve in curves]
            if abs(sum(shares) - 1.5) <= delta or steps == 64:
                break
            low, high = (p, high) if sum(shares) < 1.5 else (low, p)
        assert got[None, "search_steps", delta] == steps
    for rho in (0.1, 0.5, 0.9):
        assert sum(got[layer, "kept_ratio", rho] for layer in range(3)) == pytest.approx(3 * rho)
    half = [got[layer, "kept_ratio", 0.5] for layer in range(3)]
    exact = [1.5 * share / sum(shares) for share in shares]
    assert half == pytest.approx(exact, abs=1.5 / PROMPT)


def test_outlier_channels_are_hit_by_proxies_that_reach_as_far(monkeypatch):
    from mmkv_bench.diagnostics import quantities

    monkeypatch.setattr(quantities, "OUTLIERS", 0.1)  # 5 of 48 channels
    rates = set()
    for seed in range(4):
        obs, layer, got = seen("outlier_hits", seed)
        prompt, answer = layer.hidden[:PROMPT], layer.hidden[PROMPT:]
        reach = [
            max(abs(v) for v in channel) for channel in layer.project(answer).permute(0, 2, 1).reshape(48, -1).tolist()
        ]
        top = sorted(range(48), key=lambda c: -reach[c])[:5]
        noise = torch.randn(512, 12, generator=obs.generator("mmshift", 0)).double()
        for gamma in (1.0, 10.0):
            states = prompt.mean(0) + gamma * noise * prompt.std(0, correction=0)
            far = layer.project(states).permute(0, 2, 1).reshape(48, -1).abs().amax(1).tolist()
            rate = fmean(far[c] >= reach[c] for c in top)
            assert got["outlier_hit_rate", "", None, gamma] == pytest.approx(rate)
            rates.add(rate)
    assert len(rates) > 1


# ---------------------------------------------------------------- against real decoding


@cover.few("family", FAMILIES, keep=2)
def test_an_appended_answer_stands_and_looks_as_when_it_is_decoded(family):
    """Inputs and rotations of every attention module, of prompt and answer: those of stock generate(), mrope too."""
    model, inputs = zoo.model(family), zoo.prompt(family)
    calls: dict[int, list] = {layer: [] for layer in range(zoo.LAYERS)}

    def note(module, args, kwargs):
        calls[module.layer_idx].append(
            (kwargs["hidden_states"][0], *(part[0] for part in kwargs["position_embeddings"]))
        )

    hooks = [block.self_attn.register_forward_pre_hook(note, with_kwargs=True) for block in model.get_decoder().layers]
    with torch.no_grad():
        whole = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    for hook in hooks:
        hook.remove()
    length = inputs["input_ids"].shape[1]
    bare = {name: tensor for name, tensor in inputs.items() if name != "attention_mask"}
    longer, types = with_answer(bare, torch.zeros(1, length), whole[0, length:-1])
    got = read_layers(model, longer, types, Needs(states=True), lambda obs: (obs.states, *obs.rotation))
    for layer, found in enumerate(got):
        for ours, steps in zip(found, zip(*calls[layer], strict=True), strict=True):
            want = torch.cat(steps)
            assert ours.shape == want.shape == (length + 5, want.shape[1])
            assert (ours - want).abs().max() <= 2e-5
    assert (got[0][1][length:] != got[0][1][length - 1]).any(1).all(), "positions that do not move tell nothing"


# ---------------------------------------------------------------- the command and its rows


def test_the_command_writes_rows_of_every_layer_that_read_back(tmp_path, capsys):
    out = tmp_path / "rows"
    words = ["lorenz", "dataset=pages_lookup", "dataset.split=dev", "--samples", "2", f"out={out}"]
    assert verb("diagnose")(words) == 0
    said = capsys.readouterr().out
    rows = Store(out).diagnostics().to_pandas()
    assert f"wrote {len(rows)} numbers of 2 samples" in said and len(rows) == 2 * 4 * 101
    assert set(rows["layer"]) == {0, 1, 2, 3} and rows["sample_id"].nunique() == 2
    assert set(rows["model_fingerprint"]) == {folder_fingerprint(WEIGHTS)} and set(rows["dataset"]) == {
        "pages_lookup_small_dev"
    }
    assert rows[rows["x"] == 1]["value"].tolist() == pytest.approx([1] * 8)
    assert rows[rows["quantity"] == "gini"]["value"].between(0.2, 1).all()


@pytest.mark.full
def test_what_was_measured_is_kept_packed_and_not_measured_again(tmp_path, capsys, monkeypatch):
    """More samples and methods measure these alone; an interrupted command loses the sample in flight; a finished one loads
    no model; packed rows are the same rows, and what comes later stands beside them."""
    from mmkv_bench.diagnostics import analysis

    words = ["coverage", "method=snapkv", "budget=8", "dataset=pages_lookup", "dataset.split=dev", f"out={tmp_path}"]
    read, seen = analysis.layers_of, []

    def noted(loaded, name, sample, tokens, methods=()):
        seen.append((sample.sample_id, tuple(one.label for one in methods)))
        if len(seen) == 2:
            raise DataError("the disk is gone")
        return read(loaded, name, sample, tokens, methods)

    monkeypatch.setattr(analysis, "layers_of", noted)
    assert verb("diagnose")([*words, "--samples", "3"]) != 0 and len(seen) == 2
    first = Store(tmp_path).diagnostics()
    assert set(first["part"].to_pylist()) == {"full", "snapkv@8"} and len(first) == 8
    assert verb("diagnose")([*words, "--samples", "3"]) == 0
    assert "wrote 16 numbers of 2 samples" in capsys.readouterr().out
    assert len({sample for sample, _ in seen}) == 3 and len(seen) == 4
    words[1] = "method=[streamingllm,snapkv]"
    assert verb("diagnose")([*words, "--samples", "3"]) == 0
    assert [labels for _, labels in seen[4:]] == [("streamingllm@8",)] * 3
    rows = Store(tmp_path).diagnostics()
    assert len(rows) == 3 * 4 * 3 and set(first["committed_at"].to_pylist()) < set(rows["committed_at"].to_pylist())
    assert verb("pack")([str(tmp_path)]) == 0
    (packed,) = (tmp_path / "diagnostics").iterdir()
    assert packed.name.startswith("packed-")
    order = [(name, "ascending") for name in ("measurement", "sample_id", "layer")]
    assert Store(tmp_path).diagnostics().sort_by(order) == rows.sort_by(order)
    assert verb("diagnose")([*words, "--samples", "4"]) == 0
    assert len(seen) == 8 and len(Store(tmp_path).diagnostics()) == len(rows) + 12
    monkeypatch.setattr(analysis, "layers_of", None)
    monkeypatch.setattr("mmkv_bench.models.source.Source.load", None)
    assert verb("diagnose")([*words, "--samples", "2"]) == 0
    assert "wrote 0 numbers of 0 samples" in capsys.readouterr().out


@pytest.mark.slow
def test_coverage_of_methods_at_budgets_of_a_run(tmp_path):
    out = tmp_path / "rows"
    words = ["method=[snapkv,streamingllm]", "budget=[8,32]", "dataset=pages_lookup", "dataset.split=dev"]
    assert verb("diagnose")(["coverage", *words, "--samples", "1", f"out={out}"]) == 0
    rows = Store(out).diagnostics().to_pandas()
    assert set(rows["part"]) == {"full", "snapkv@8", "snapkv@32", "streamingllm@8", "streamingllm@32"}
    mean = rows.groupby("part")["value"].mean()
    assert mean["snapkv@8"] < mean["snapkv@32"] < mean["full"] <= 1 and mean["streamingllm@32"] < mean["snapkv@32"]
    told = {part: json.loads(own["settings"].iloc[0]) for part, own in rows.groupby("part")}
    assert "method" not in told["full"] and told["full"]["weights"] == "folder" and told["full"]["tokens"] == 64
    own = told["snapkv@8"]["method"]
    assert (own["base"], own["reading"], own["budget_kind"], own["budget"]) == ("snapkv", "paper", "entries", "8")
    assert own["parameters"]["window"] == 32 and rows["measurement"].nunique() == 5
    # The model holds 2 KiB a token and KV head of all layers: the bytes of 32 entries, and a method that feeds the prompt again.
    words = ["method=[snapkv,kvzip]", "budget=64KiB", *words[2:]]
    assert verb("diagnose")(["coverage", *words, "--samples", "1", f"out={out}"]) == 0
    further = Store(out).diagnostics().to_pandas()
    assert set(further["part"]) - set(rows["part"]) == {"kvzip@32"}, "snapkv@32 was measured"
    assert 0 < further[further["part"] == "kvzip@32"]["value"].mean() < mean["full"]


def test_outputs_of_layers_are_those_of_feeding_fulls_answer_with_the_evicted_entries_masked():
    """The full cache: one forward over prompt and answer. A method: the same with what it evicted masked while decoding."""
    from mmkv_bench.calibrate.samples import page
    from mmkv_bench.compression.budget import Budget
    from mmkv_bench.config.compose import method_defaults
    from mmkv_bench.config.schema import Model
    from mmkv_bench.diagnostics.analysis import ComparedMethod, decoded_outputs, encoded, fed_tokens, kept_entries
    from mmkv_bench.methods.build import build_compressor
    from mmkv_bench.models.load import load_model

    loaded = load_model(Model(name="tiny", device="cpu"), str(WEIGHTS))
    prompt = encoded(loaded, page("lookup", "small", "train", 0))
    fed = fed_tokens(loaded, prompt, 5, endless=True)
    assert len(fed) == 4
    made = build_compressor("snapkv", method_defaults(["snapkv"])["snapkv"], "paper")
    method = ComparedMethod("snapkv@16", "snapkv", made, Budget.parse(16), "{}")
    full, less = (decoded_outputs(loaded, prompt, fed, one) for one in (None, method))
    longer, _ = with_answer(prompt.inputs, prompt.types, fed)
    kept = reference.keep_of([layer[None] for layer in kept_entries(loaded, prompt, method)], prompt.length)
    everything = [torch.ones_like(layer) for layer in kept]
    for got, keep in ((full, everything), (less, kept)):
        want = outputs_masked(loaded.model, longer, keep, prompt.length)
        assert max(float((a - b).abs().max()) for a, b in zip(got, want, strict=True)) <= 1e-4
    (error,) = QUANTITIES["feature_error"].read(SimpleNamespace(layer=3), PromptFacts(0, {}, {"full": full, "a": less}))
    want = fmean(abs(a - b) for a, b in zip(less[3].flatten().tolist(), full[3].flatten().tolist(), strict=True))
    assert error.value == pytest.approx(want, rel=1e-5) and error.part == "a" and error.value > 1e-3


def outputs_masked(model, inputs, keep, cut) -> list[torch.Tensor]:
    """Outputs of the decoder layers for the tokens behind `cut`, which see of the prompt only what `keep` has."""
    outputs: list[torch.Tensor] = []
    hooks = [
        block.register_forward_hook(
            lambda m, a, out: outputs.append((out[0] if isinstance(out, tuple) else out)[0, cut:])
        )
        for block in model.get_decoder().layers
    ]
    with torch.no_grad(), reference.masked(model, reference.visible(keep, cut)) as cache:
        model(**inputs, past_key_values=cache, use_cache=True)
    for hook in hooks:
        hook.remove()
    return outputs


def test_the_help_names_every_analysis():
    assert set(VERBS["diagnose"]["arguments"]["name"]["choices"]) == set(QUANTITIES)
    assert all(quantity.figures and quantity.read.__doc__ for quantity in QUANTITIES.values())
    assert reader("diagnose")[1].read(["entropy", "dataset=docvqa"]).overrides == ["dataset=docvqa"]


def test_what_an_analysis_does_not_take_is_refused(capsys, tmp_path):
    assert verb("diagnose")(["lorenz", "method=snapkv", f"out={tmp_path}"]) == 2
    assert "method=snapkv has no effect on lorenz" in capsys.readouterr().err


def test_rows_that_are_not_the_tables_are_refused(tmp_path):
    import pyarrow as pa

    with pytest.raises(StoreError, match="is missing or null"):
        Store(tmp_path).write_diagnostics(pa.table({"value": [1.0]}))
    with pytest.raises(StoreError, match="unknown column 'values'"):
        Store(tmp_path).write_diagnostics(pa.table({"values": [1.0]}))
