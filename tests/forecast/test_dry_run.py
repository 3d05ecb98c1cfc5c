"""Promise: what a dry run counts is what the same code holds when it computes: every phase of every method within 10 %."""

from __future__ import annotations

import copy
import functools
from importlib.resources import files
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor, Qwen2Config, Qwen2ForCausalLM

from mmkv_bench.calibrate.artefact import StandIns
from mmkv_bench.compression.budget import Budget
from mmkv_bench.compression.numerics.tiles import ends_only, row_blocks
from mmkv_bench.config.compose import method_defaults
from mmkv_bench.config.files import options
from mmkv_bench.devices.live_storages import LiveStorages
from mmkv_bench.families.facts import model_facts
from mmkv_bench.forecast.dry_run import DryModel, dry_model, prompt_types, without_numbers
from mmkv_bench.generation import one_pass as phases
from mmkv_bench.generation.encode import encode, from_tensors
from mmkv_bench.methods.build import build_compressor
from mmkv_bench.tiny.pages import make_sample
from tests import zoo
from tests.each import each

CPU, TOKENS = torch.device("cpu"), 384
OUTSIDE = {
    "custom",
    "kvpress",
    "snapkv_kvpress",
    "pixels",
    "cut_prompt",
}  # name files and packages of their users; compress no cache
NAMES = sorted(set(options("method")) - OUTSIDE)
BUDGET = Budget.parse(0.2)


@functools.cache
def config() -> Qwen2Config:
    return Qwen2Config(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        attn_implementation="sdpa",
    )


@functools.cache
def model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(config()).eval()


def compressor(name: str):
    family = SimpleNamespace(num_layers=3, num_query_heads=8, num_kv_heads=2)
    return build_compressor(name, method_defaults([name])[name], "paper", calibrations=StandIns("none", "0", family))


def counted(name: str, of=None, inputs=None, types=None) -> dict[str, int]:
    """Of real tensors, on the CPU."""
    method, of = compressor(name), of or model()
    if inputs is None:
        inputs = {"input_ids": torch.randint(0, 999, (1, TOKENS), generator=torch.Generator().manual_seed(1))}
        types = prompt_types(TOKENS, 4 * TOKENS // 5)
    tally = LiveStorages(CPU, [*of.parameters(), *of.buffers(), *inputs.values()])
    with tally:
        peaks = phases.Peaks(tally)
        phases.run(of, inputs, method, None if method.unbudgeted else BUDGET, peaks, types=types)
    return {phase: peak.allocated for phase, peak in peaks.of.items()}


def planned(names: list[str]) -> dict[str, dict[str, int]]:
    """Of none, for the same device."""
    tally, methods, kinds = (
        LiveStorages(CPU),
        {name: compressor(name) for name in names},
        prompt_types(TOKENS, 4 * TOKENS // 5),
    )
    with without_numbers(tally) as numbers:
        dry = DryModel(config(), torch.float32, "sdpa", tally, numbers)
        return {
            name: dry.peaks(method, None if method.unbudgeted else BUDGET, kinds) for name, method in methods.items()
        }


def agree(names: list[str]) -> None:
    told, wrong = planned(names), {}
    for name in names:
        held = counted(name)
        assert set(held) == set(told[name]) and {phases.PREFILL, phases.DECODE} <= set(held)
        assert compressor(name).unbudgeted or {phases.SCORE, phases.SELECT, phases.REDUCE} <= set(held)
        off = {
            phase: told[name][phase] / held[phase] for phase in held if abs(told[name][phase] / held[phase] - 1) > 0.1
        }
        wrong |= {name: off} if off else {}
        parameters = sum(one.numel() for one in model().parameters()) * 4
        assert parameters < told[name][phases.LOAD] < 1.01 * parameters
    assert wrong == {}


@pytest.mark.full
def test_a_dry_run_counts_what_a_real_one_holds():
    """One that keeps all, ragged heads evicted at once, a decision after the last layer, quantisation."""
    agree(["full", "adakv", "meda", "kivi"])


@pytest.mark.full
def test_a_vision_tower_is_a_phase_that_counts_what_it_holds():
    """The embedded model and a page; tiles of which the model leaves out those that are padding."""
    folder = files("mmkv_bench") / "tiny" / "weights"
    tiny = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="sdpa").eval()
    processor, page = AutoProcessor.from_pretrained(folder), make_sample("lookup", "large", "test", 0)
    content = [{"type": "image"}, {"type": "text", "text": page.question}]
    prompt = encode(processor, model_facts(tiny.config), "page", [{"role": "user", "content": content}], page.images)
    tiles = zoo.model("smolvlm")
    for of, given in (
        (tiny, prompt),
        (tiles, from_tensors("tiles", zoo.prompt("smolvlm"), model_facts(tiles.config))),
    ):
        held = counted("snapkv", of, given.inputs, given.types)
        with dry_model(of.config, "float32", "sdpa", "cpu") as dry:
            told = dry.peaks(compressor("snapkv"), BUDGET, given.types, given.inputs)
        assert set(told) == set(held) == {*phases.PHASES}
        assert {phase: round(told[phase] / held[phase], 1) for phase in held} == dict.fromkeys(held, 1.0)


@pytest.mark.full
@each("name", NAMES)
def test_a_dry_run_of_every_method_counts_what_a_real_one_holds(name):
    agree([name])


@pytest.mark.full
def test_a_prefill_keeps_of_every_layer_its_entries_alone():
    """Peaks of four layers and of two differ by the entries of two, whatever the layers were given. On a device that is not
    here; one layer's plain scores would take 1 GiB."""
    above, prompt = [], prompt_types(8192, 0)
    for layers in (2, 4):
        shape = copy.deepcopy(config())
        shape.num_hidden_layers, shape.layer_types = layers, ["full_attention"] * layers
        with dry_model(shape, "bfloat16", "sdpa", "cuda") as dry:
            peaks = dry.peaks(compressor("full"), None, prompt)
            above.append(peaks[phases.PREFILL] - peaks[phases.LOAD])
    assert above[1] < 8192 * 20 * 512 * 2
    assert above[1] - above[0] == pytest.approx(2 * 2 * 2 * (8192 + 32) * 32 * 2, rel=0.01)


def test_numbers_are_true_where_they_can_be_and_made_up_where_they_cannot():
    with without_numbers(LiveStorages(CPU)) as made:
        known = made.hold(KNOWN, CPU)
        assert (known > 1).sum().item() == 2 and known[known > 1].tolist() == [2, 5]
        assert known.sort(descending=True).indices.tolist() == [2, 1, 0]
        base = torch.zeros(4, dtype=torch.int64)
        base[1:3] = known[:2]
        assert base.tolist() == [0, 1, 2, 0]
        made.carries = False
        unknown = torch.empty(3, 4, device="cuda")
        made.carries = True
        assert not bool((unknown > 0).any())  # nothing is known, and a mask has no member then
        made.invents = True
        scores = unknown.sum(-1)
        assert scores.shape == (3,) and 0 <= scores.min().item() <= scores.max().item() <= 1
        assert scores.argsort().sort().values.tolist() == [0, 1, 2]
        made.invents = False
        base[2:] = unknown.sum(0)[:2].long()  # overwritten by what nobody knows
        assert base.sum().item() == 0


KNOWN = torch.tensor([1, 2, 5])


def test_ends_stand_for_all_blocks_only_where_they_are_asked_to():
    every = list(row_blocks(10, 2**20 // 2, CPU))
    assert every == [(0, 2), (2, 4), (4, 6), (6, 8), (8, 10)]
    with ends_only():
        assert list(row_blocks(10, 2**20 // 2, CPU)) == [(0, 2), (6, 8), (8, 10)]
        assert list(row_blocks(5, 2**20 // 2, CPU)) == [(0, 2), (2, 4), (4, 5)]
    assert list(row_blocks(10, 2**20 // 2, CPU)) == every
