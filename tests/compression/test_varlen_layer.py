"""Promise: heads that keep different lengths, stored back to back, are attended to as padded ones are; nothing is padded in
memory, nothing in what a step reads, and no step copies them.

torch's kernel for it is a double (tests/varlen_double.py) with the true signature.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from mmkv_bench import devices
from mmkv_bench.compression import varlen_layer
from mmkv_bench.compression.attention_backend import _sdpa
from mmkv_bench.compression.cache import CompressedLayer
from mmkv_bench.compression.entry_counts import account, accounts
from mmkv_bench.compression.session import Session, attach
from mmkv_bench.compression.varlen_layer import VarlenLayer, attend, folds
from mmkv_bench.errors import UnsupportedError
from mmkv_bench.forecast.dry_run import dry_model, prompt_types
from mmkv_bench.generation.fidelity import ExtraMeasures
from mmkv_bench.generation.one_pass import DECODE
from tests import reference, zoo
from tests.core import parts
from tests.forecast import test_dry_run
from tests.generation import common
from tests.generation.test_storages import Storages
from tests.second_device import far, second_device, there
from tests.varlen_double import reading

B, H, G, D = 2, 3, 2, 8
TOLERANCE = 2e-6
BYTES = {"bytes_device", "bytes_metadata", "bytes_held", "bytes_padding", "bytes_read_step"}
EVERYTHING = ExtraMeasures(True, (3, 4, 5), True)


@pytest.fixture
def kernel():
    with reading() as made:
        yield made


def some(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rows(lengths: list[list[int]], seen: int = 20) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Keys, values and positions of forks whose heads keep `lengths`."""
    made = []
    for number, counts in enumerate(lengths):
        width = max(counts)
        places = torch.full((H, width), -1)
        for head, count in enumerate(counts):
            places[head, width - count :] = torch.arange(seen - count, seen)
        real = (places >= 0)[..., None]
        made.append((some(H, width, D, seed=number) * real, some(H, width, D, seed=number + 50) * real, places))
    return made


def both(lengths: list[list[int]], reserve: int) -> tuple[CompressedLayer, VarlenLayer]:
    return tuple(kind.from_rows(rows(lengths), 20, reserve) for kind in (CompressedLayer, VarlenLayer))


def step(layer: CompressedLayer, new: int, seed: int) -> Tensor:
    """Attention of the next `new` tokens `[B, new, H G, D]`, as the attention function runs it."""
    batch = layer.entries().shape[0]
    query, key, value = (some(batch, heads, new, D, seed=seed + at) for at, heads in enumerate((H * G, H, H)))
    kernel = partial(attend if isinstance(layer, VarlenLayer) and layer.folded else _sdpa, None, scaling=0.3)
    entries = layer.update(key, value)
    seen = torch.ones(new, layer.seen, dtype=torch.bool).tril(layer.seen - new)[None, None]
    return layer.attention(kernel, query, *entries, None if new == 1 else seen)[0]


def test_a_folded_layer_attends_grows_and_changes_rows_as_a_padded_one(kernel):
    padded, ours = both([[5, 0, 3], [2, 9, 1]], reserve=4)
    assert ours.folded and padded.ragged and not ours.ragged
    changes = {
        3: lambda one: one.batch_repeat_interleave(2),
        5: lambda one: one.reorder_cache(torch.tensor([3, 0, 1, 2])),
    }
    changes |= {7: lambda one: one.batch_select_indices(torch.tensor([1, 2])), 8: lambda one: one.forget(1)}
    changes |= {9: lambda one: one.replace(one.keys * 2, one.values * 3)}
    for turn in range(12):
        for one in (padded, ours):
            changes.get(turn, lambda one: None)(one)
        new = 3 if turn in (4, 10) else 1
        found, expected = step(ours, new, 7 * turn), step(padded, new, 7 * turn)
        assert (found - expected).abs().max() < 1e-6
        assert torch.equal(ours.entries(), padded.entries()) and ours.stored == padded.stored
        assert kernel.read[-1] == int(padded.entries().sum()) and kernel.widest[-1] == padded.stored
        for name in ("positions", "keys", "values"):
            assert torch.equal(getattr(ours, name), getattr(padded, name))
    assert ours.folded and ours.growths == padded.growths > 0 and ours.seen == padded.seen


def test_heads_alike_stay_as_they_are_and_rows_that_become_alike_are_no_longer_folded():
    layer = VarlenLayer.from_rows(rows([[4, 4, 4], [4, 4, 4]]), 20, 3)
    assert not layer.folded and layer.keys.shape == (B, H, 4, D)
    layer = VarlenLayer.from_rows(rows([[4, 4, 4], [4, 2, 4]]), 20, 3)
    assert layer.folded
    layer.batch_select_indices(torch.tensor([0]))
    assert not layer.folded and not layer.ragged and torch.equal(layer.keys, layer.keys)
    layer.retain(torch.tensor([[[-1, 0], [1, 2], [0, 3]]]), lambda key, value, index: (key[:, :2], value[:, :2]), 5)
    assert layer.folded and layer.entries().tolist() == [[1, 2, 2]]


def test_what_is_counted_is_without_padding_and_the_same_of_a_row_among_others_and_alone():
    lengths, slack = [[5, 1, 3], [2, 9, 1], [4, 4, 4]], 6
    slot = 2 * D * 4
    for kind in (CompressedLayer, VarlenLayer):
        among = accounts(kind.from_rows(rows(lengths), 20, slack + 3), slack, [2, 0, 1])
        for number, (counts, fed) in enumerate(zip(lengths, (2, 0, 1), strict=True)):
            alone = account(kind.from_rows(rows([counts]), 20, slack), fed)
            for name, value in dataclasses.asdict(alone).items():
                assert str(getattr(among[number], name)) == str(value), (kind, number, name)
        with pytest.raises(ValueError, match="5 free slots, fewer than slack=6"):
            accounts(kind.from_rows(rows(lengths), 20, slack - 1), slack, [2, 0, 1])
    whole = CompressedLayer.from_rows([(some(H, 4, D), some(H, 4, D), None)] * 2, 4, slack)
    assert whole.positions is None and accounts(whole, slack, [0, 0])[1].metadata == 0
    for counts in lengths:
        alone = account(VarlenLayer.from_rows(rows([counts]), 20, slack), 2)
        assert alone.padding == 0 and alone.device == sum(counts) * slot and alone.metadata == sum(counts) * 4
        assert alone.read == alone.useful == (sum(counts) + 3 * H) * slot
        # starts and ends of its heads, where they differ in length
        assert alone.held - (sum(counts) + H * slack) * (slot + 4) == (
            0 if len(set(counts)) == 1 else 4 * (H + 1) + 12 * H
        )


def test_a_step_makes_nothing_as_large_as_what_is_stored(kernel):
    layer = VarlenLayer.from_rows(rows([[3000, 1000, 500]], seen=3000), 3000, 8)
    step(layer, 1, 0)
    watched, query = Storages(decoding=True), some(1, H * G, 1, D)
    fresh, seen = some(1, H, 1, D), []
    with watched:
        entries = layer.update(fresh, fresh)
        layer.attention(lambda query, layer: (seen.append(layer), None), query, *entries, None)
    assert seen == [layer] and watched.largest[True][0] < 1000, watched.largest


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch's own kernel is for CUDA devices")
def test_torchs_own_kernel_attends_to_folded_heads_as_sdpa_does_to_padded_ones():
    """Not run where there is no such device; the double stands for it everywhere else."""
    cuda, lengths, width = torch.device("cuda"), [[700, 1, 300], [2, 0, 64]], 64
    made = []
    for number, counts in enumerate(lengths):
        places = torch.full((H, 700), -1)
        for head, count in enumerate(counts):
            places[head, 700 - count :] = torch.arange(count)
        entries = [some(H, 700, width, seed=number + at).to(cuda, torch.bfloat16) for at in (0, 50)]
        made.append((*entries, places.to(cuda)))
    padded, ours = (kind.from_rows(made, 700, 8) for kind in (CompressedLayer, VarlenLayer))
    module = SimpleNamespace(num_key_value_groups=G, is_causal=True)
    for turn, new in enumerate((1, 3, 1)):
        query, key, value = (
            some(len(lengths), heads, new, width, seed=9 * turn + heads).to(cuda, torch.bfloat16)
            for heads in (H * G, H, H)
        )
        seen = torch.ones(new, padded.seen + new, dtype=torch.bool, device=cuda).tril(padded.seen)[None, None]
        found, expected = (
            layer.attention(partial(kernel, module, scaling=0.3), query, *layer.update(key, value), seen)[0]
            for layer, kernel in ((ours, attend), (padded, _sdpa))
        )
        assert ours.folded and (found.float() - expected.float()).abs().max() < 0.03


# ---------------------------------------------------------------------- sessions
def ragged_cells(name: str, methods: tuple[str, ...], protocols: tuple[str, ...] = ("paper",)) -> list:
    registry = common.registry("paper", name)
    return [common.cell(registry[one], 11, protocol) for one in methods for protocol in protocols]


def assert_as_padded(name: str, asked: list, run, **options) -> list:
    """Everything but bytes is the same; of these the useful ones alone are left."""
    model, prompt = zoo.model(name), common.encoded(name)
    expected = run(model, name, prompt, asked, common.rules(model, 4), **options)
    with reading() as kernel:
        found = run(model, name, prompt, asked, common.rules(model, 4), **options)
    assert [one.status for one in found] == ["ok"] * len(asked), [one.error for one in found]
    common.assert_same(found, expected, ignore=BYTES | common.MEASURES)
    assert kernel.read
    ragged = [(ours, padded) for ours, padded in zip(found, expected, strict=True) if padded.bytes_padding]
    assert ragged and all(one.bytes_padding == 0 for one in found)
    for ours, padded in ragged:
        assert ours.bytes_device == padded.bytes_device * ours.entries_resident // entries_and_padding(padded)
        assert ours.bytes_read_step < padded.bytes_read_step and ours.bytes_held < padded.bytes_held
    return found


def entries_and_padding(result) -> int:
    slot = result.bytes_full // (result.context_tokens * sum(map(len, result.kept)))
    return result.bytes_device // slot


RAGGED = ("adakv", "mmshift_adakv", "madakv")


def test_forks_are_answered_and_measured_as_padded_ones():
    assert_as_padded("qwen2_5_vl", ragged_cells("qwen2_5_vl", RAGGED), common.together, extras=EVERYTHING)


def test_a_question_is_fed_to_folded_heads_as_to_padded_ones_alone_too():
    asked = ragged_cells("internvl", ("adakv",), ("strict", "query_agnostic"))
    forked = assert_as_padded("internvl", asked, common.together)
    common.assert_same(assert_as_padded("internvl", asked, common.alone), forked, ignore=common.PATH)


@pytest.mark.full
@pytest.mark.parametrize("name", zoo.MULTIMODAL)
def test_ragged_methods_of_every_family_answer_as_padded(name):
    asked = ragged_cells(name, RAGGED, ("paper", "strict", "query_agnostic", "masked"))
    assert_as_padded(name, asked, common.together, extras=EVERYTHING)
    assert_as_padded(name, asked, common.alone)


@pytest.mark.parametrize("name", ["llama", pytest.param("qwen3_vl", marks=pytest.mark.full)])
def test_a_left_padded_batch_equals_masked_full_attention(kernel, name):
    model = zoo.model(name)
    inputs = zoo.batch([zoo.prompt(name, 0), zoo.prompt(name, 1, before=2), zoo.prompt(name, 2, after=4)])
    length = inputs["input_ids"].shape[1]
    with attach(model, parts.compressor("all_ragged"), budget=parts.budget(9)) as session:
        run = reference.generate(model, inputs, 5)
        kept = session.kept()
    masked = reference.masked_generate(model, inputs, reference.keep_of(kept, length), length, 5)
    assert (run.logits - masked.logits).abs().max() <= TOLERANCE and torch.equal(run.tokens, masked.tokens)
    assert kernel.read[-1] == int(session.cache.layers[-1].entries().sum())


def test_a_second_question_with_padding_of_its_own_is_refused(kernel):
    model, prompt = zoo.model("llama"), zoo.batch([zoo.prompt("llama", 0), zoo.prompt("llama", 1)])
    with attach(model, parts.compressor("all_ragged"), budget=parts.budget(9)) as session, torch.no_grad():
        model(**prompt, use_cache=True)
        seen = prompt["input_ids"].shape[1]
        real = torch.ones(2, seen + 3, dtype=torch.int64)
        model(input_ids=torch.full((2, 3), 5), attention_mask=real, past_key_values=session.cache)
        real = torch.ones(2, seen + 6, dtype=torch.int64)
        real[1, seen + 3] = 0
        with pytest.raises(UnsupportedError, match="hides tokens of a question .* without padding"):
            model(input_ids=torch.full((2, 3), 5), attention_mask=real, past_key_values=session.cache)


def test_on_a_second_device_heads_are_folded_in_half_precision_and_padded_in_float32():
    name = "qwen2_5_vl"
    model, prompt, asked = zoo.build(name), common.encoded(name), ragged_cells(name, ("adakv",))
    half = zoo.build(name).to(torch.bfloat16)
    images = {key: one.bfloat16() if one.is_floating_point() else one for key, one in prompt.inputs.items()}
    with second_device(), reading((torch.bfloat16,)) as kernel:
        whole = common.together(there(model), name, far(prompt), asked)[0]
        assert whole.status == "ok" and whole.bytes_padding > 0 and not kernel.read
        found = common.together(there(half), name, far(dataclasses.replace(prompt, inputs=images)), asked)[0]
        assert found.status == "ok", found.error
        assert kernel.read and found.bytes_padding == 0


def test_who_folds():
    """CUDA devices, in half precision, heads that the kernel takes; nowhere with attention=eager, nor for a compiled step."""
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    assert (
        not folds(cpu, torch.bfloat16, 64) and not folds(cuda, torch.float32, 64) and not folds(cuda, torch.float16, 20)
    )
    assert folds(cuda, torch.bfloat16, 128) == devices.at(cuda).reads_heads_back_to_back
    model = zoo.model("llama")
    with reading():
        kinds = [
            Session(model, **told).new_cache().layers[0] for told in ({}, {"attention": "eager"}, {"packs": False})
        ]
    assert [isinstance(one, VarlenLayer) for one in kinds] == [True, False, False]


@pytest.mark.full
def test_a_dry_run_of_a_cuda_device_counts_folded_heads(monkeypatch):
    kinds, held = prompt_types(test_dry_run.TOKENS, 300), []
    for dtypes in (varlen_layer.DTYPES, ()):
        monkeypatch.setattr(varlen_layer, "DTYPES", dtypes)
        with dry_model(test_dry_run.config(), "bfloat16", "sdpa", "cuda") as dry:
            held.append(dry.peaks(test_dry_run.compressor("adakv"), test_dry_run.BUDGET, kinds)[DECODE])
    assert held[0] < held[1]
