"""KIVI decoding through whole models: attention over the oracle's numbers, step by step, alone and after eviction."""

from __future__ import annotations

import itertools

import pytest
import torch

from mmkv_bench.compression.budget import Budget
from mmkv_bench.compression.compressor import Compressor, full
from mmkv_bench.compression.decoding.kivi import KIVI
from mmkv_bench.compression.session import attach
from mmkv_bench.config.compose import method_defaults
from mmkv_bench.errors import ConfigError, UnsupportedError
from mmkv_bench.generation.unshared_generation import generate_alone
from mmkv_bench.methods.build import build_compressor
from tests import cover, reference, zoo
from tests.core import parts
from tests.each import each
from tests.generation import common
from tests.oracles import kivi as oracle

FAMILIES = ("qwen2_5_vl", "llava", "llama")
GROUP, RESIDUAL, NEW = 4, 8, 20  # small enough that prompts and answers pass through every state


def kivi(bits: int = 2, flush: str = "before", kind: str | None = None, **policy) -> Compressor:
    """KIVI alone, or after an eviction of `kind`; small groups unless told otherwise."""
    policy = KIVI(**{"bits": bits, "group": GROUP, "residual": RESIDUAL, "flush": flush} | policy)
    if kind is None:
        return Compressor("kivi", None, parts.KeepAll(), parts.TopK(), parts.Evict(), decoding=policy)
    base = parts.compressor(kind)
    return Compressor(f"{kind}_kivi", base.scorer, base.allocator, base.selector, base.reducer, decoding=policy)


def distance(ours: torch.Tensor, exact, flips: int = 3) -> float:
    """How far logits are from the nearest run of an oracle `exact(ties)`, in which numbers half-way between two levels
    may go to either one. Runs differ in at most `flips` such numbers; most cases meet none, and one run decides."""
    runs, best = [()], float("inf")
    for other in runs:
        ties = oracle.Ties(other)
        best = min(best, (ours - exact(ties)).abs().max().item())
        if best <= 2e-6:
            break
        if len(other) < flips:  # what comes before a number that goes the other way stays as it was
            runs += [(*other, place) for place in range(max(other, default=-1) + 1, ties.met)]
    return best


@pytest.mark.full
@cover.few("name", FAMILIES, first=2)
def test_decoding_is_attention_over_the_oracles_numbers(name):
    """Alone and on what ragged evictions kept; paper, strict and query-agnostic; both bits; both orders of a step."""
    model, prompt = zoo.model(name), common.encoded(name)
    protocols = common.PROTOCOLS if name in zoo.MULTIMODAL else common.PROTOCOLS[:2]
    modes = ((2, "before"), (4, "before"), (2, "after"))
    cases = [(*mode, *rest) for mode, *rest in itertools.product(modes, protocols, (None, "all_ragged"))]
    context = {"paper": prompt.length, "strict": prompt.length - 1, "query_agnostic": prompt.length - 6}
    moved = 0.0
    for bits, flush, protocol, kind in cases:
        budget = None if kind is None else Budget.parse(prompt.length // 2)
        options = {"max_new_tokens": NEW, "context": context[protocol] if protocol == "query_agnostic" else None}
        out = generate_alone(model, prompt.inputs, kivi(bits, flush, kind), budget, protocol, **options)
        kept = [index[0] for index in out.session.kept()]
        mode = (bits, GROUP, GROUP, RESIDUAL, flush == "before")

        def exact(ties, kept=kept, cut=context[protocol], mode=mode):
            return oracle.generate(model, prompt.inputs, kept, cut, NEW, lambda: oracle.Head(*mode, ties))

        ours = torch.cat(out.logits)
        assert distance(ours, exact) <= 2e-6, (bits, flush, protocol, kind)
        if kind is None:
            stock = generate_alone(model, prompt.inputs, full(), None, protocol, **options)
            moved = max(moved, (torch.cat(stock.logits) - ours).abs().max().item())
    assert moved > 0.01, "quantising must have changed something"


@pytest.mark.full
@cover.few("name", FAMILIES, first=2)
def test_kivi_alone_and_after_any_eviction_forks_as_it_runs_alone(name):
    model, prompt = zoo.model(name), common.encoded(name)
    protocols = common.PROTOCOLS if name in zoo.MULTIMODAL else common.PROTOCOLS[:2]
    cells = [common.cell(kivi(b), None, p, name=f"kivi{b}/{p}") for b in (2, 4) for p in protocols]
    for kind in ("uniform", "all_ragged"):
        for budget in (1, 9, "40%", prompt.length + 3):  # the last one evicts nothing and still quantises
            cells += [common.cell(kivi(4, kind=kind), budget, p) for p in protocols]
    forks = common.assert_forks_equal_alone(model, name, prompt, cells, common.rules(model, 12))
    for one, fork in zip(cells, forks, strict=True):
        assert fork.tokens_from_compressed >= 11
        few = min(one.entries(fork.context_tokens), fork.context_tokens) < RESIDUAL
        assert ("within_residual" in fork.fallback) == few, "who asks for bits and gets none is told"
        if one.budget is None:
            assert fork.budget_entries is None and fork.entries_asked is None and fork.fallback == []
            assert fork.entries_resident == fork.context_tokens * len(fork.kept) * len(fork.kept[0])


def test_what_never_fills_a_residual_is_the_full_cache():
    """T + answer < R: nothing is quantised, and the answer is that of the full cache."""
    name = "qwen2_5_vl"
    model, inputs = zoo.model(name), zoo.prompt(name)
    with attach(model, kivi(2, group=4, residual=256)) as session:
        run, layers = reference.generate(model, inputs, 8), session.cache.layers
    assert (run.logits - reference.generate(model, inputs, 8).logits).abs().max() <= 2e-6
    for layer in layers:
        data, metadata = layer.nbytes()
        entries = int(layer.entries().sum())
        assert data == entries * 2 * zoo.HEAD_DIM * 4 and metadata == entries * 4  # positions alone


@each("bits", [2, 4, 8])
def test_bytes_are_counted_from_the_packed_tensors(bits):
    """T = 41, R = 8, G = 4, D = 16, float32: 40 keys and 33 values are packed in every head."""
    model, inputs = zoo.model("qwen2_5_vl"), zoo.prompt("qwen2_5_vl")
    assert inputs["input_ids"].shape[1] == 41
    with attach(model, kivi(bits)) as session:
        model(**inputs, use_cache=True, logits_to_keep=1)
        layer = session.cache.layers[0]
    heads, dim = 2, zoo.HEAD_DIM
    packed, rest = heads * dim * (40 + 33) * bits // 8, heads * dim * (1 + 8) * 4
    groups = heads * (40 // 4 * dim + 33 * dim // 4)
    assert layer.nbytes() == (packed + rest, groups * 2 * 4 + heads * 41 * 4)
    stored = [*layer._keys.packed.parts, layer._keys.rest, *layer._values.packed.parts, layer._values.rest]
    held = sum(t.untyped_storage().nbytes() for t in stored)
    slack = layer.capacity - layer.stored + RESIDUAL  # room for all that will be packed
    assert held <= sum(layer.nbytes()) + slack * heads * dim * (2 * bits / 8 + 2 * 2 * 4 / 4), "nothing is held twice"


@each("dtype", [torch.float32, torch.bfloat16])
def test_no_padding_slot_enters_a_group(dtype):
    """Heads of 3, 16, 0 and 29 entries: each is quantised as if it stood alone."""
    from mmkv_bench.compression.context import Context
    from mmkv_bench.compression.decoding.base import Start

    counts, dim = [3, 16, 0, 29], 8
    key, value = torch.randn(2, 4, 40, dim, generator=torch.Generator().manual_seed(0)).to(dtype)
    index = torch.full((4, 29), -1)
    for row, count in enumerate(counts):
        index[row, 29 - count :] = torch.randperm(40)[:count].sort().values
    kept_key, kept_value = parts.Evict().reduce(key, value, index)

    def layer_of(rows: slice):
        start = Start(
            0, 1, key[rows], value[rows], index[rows], kept_key[rows], kept_value[rows], None, Context(20, 40), 0, 40,
            40, 0.3, 64,
        )  # fmt: skip
        return KIVI(2, GROUP, RESIDUAL).layer(start)

    together = layer_of(slice(None))
    alone = [layer_of(slice(row, row + 1)) for row in range(4)]
    for step in range(40):
        new_key, new_value = torch.randn(2, 1, 4, 1, dim, generator=torch.Generator().manual_seed(step)).to(dtype)
        ours = together.update(new_key, new_value)
        assert all(part.dtype == dtype for part in ours)
        assert together.entries().tolist() == [[count + step + 1 for count in counts]]
        for row, layer in enumerate(alone):
            theirs = layer.update(new_key[:, row : row + 1], new_value[:, row : row + 1])
            for a, b in zip(ours, theirs, strict=True):
                n = counts[row] + step + 1
                assert torch.equal(a[0, row, -n:], b[0, 0, -n:]) and not a[0, row, :-n].any()
        for layer in (together, *alone):
            layer.attended(None, 0.3)


@each(
    ("arguments", "words"),
    [({"bits": 3}, "2, 4, 8"), ({"group": 6}, "multiples of 4"), ({"group": 32, "residual": 100}, "multiples of group=32"),
     ({"residual": 0}, "at least one group"), ({"flush": "never"}, "after, before")],
)  # fmt: skip
def test_parameters_that_make_no_groups_are_refused(arguments, words):
    with pytest.raises(ConfigError, match=words):
        KIVI(**arguments)


def test_heads_that_groups_do_not_divide_are_refused_with_both_numbers():
    with pytest.raises(UnsupportedError, match="group=12 .* heads of 16 channels"):
        KIVI(2, group=12, residual=24).value_group(16)
    assert KIVI(2, group=32).value_group(16) == 16  # a smaller head is one group
    assert KIVI(2, group=32).value_group(128) == 32


def test_the_registered_method_has_no_budget_and_its_readings_differ_in_the_flush():
    node = method_defaults(["kivi"])["kivi"]
    paper, released = (build_compressor("kivi", node, reading) for reading in ("paper", "released"))
    assert paper.unbudgeted and not paper.is_full and paper.quantises
    assert paper.decoding == KIVI(2, 32, 128, "before") and released.decoding == KIVI(2, 32, 128, "after")
