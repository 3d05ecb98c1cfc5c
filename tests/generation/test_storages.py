"""Promise: no decode step copies the cache, nothing in a run is quadratic in the prompt or as large as prompt x vocabulary."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace

import pytest
import torch
import transformers as tf
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mmkv_bench.compression.attention_backend import _sdpa
from mmkv_bench.compression.compressor import Compressor
from mmkv_bench.config.files import content, options
from mmkv_bench.families.facts import ModelFacts, model_facts
from mmkv_bench.generation.encode import EncodedPrompt, from_tensors
from mmkv_bench.generation.engine import Engine
from mmkv_bench.generation.result import ForkResult
from mmkv_bench.methods.build import build_compressor
from tests import zoo
from tests.calibrate import synthetic
from tests.each import each
from tests.generation import common

HEADS, KV_HEADS, HEAD_DIM, VOCABULARY, FRACTION = 8, 2, 32, 2000, 0.25
TOKENS, LAYERS = 4, 2
BLOCK = 64  # slots that are moved at a time where an entry goes
COPY = ("kivi", "kivi_prefixkv", "hybridkv")
"""What these store is no keys that a kernel could read: packed numbers are unpacked, chunks fetched from the host. Nothing else
may be as large, and neither may be larger than keys and values together."""


@dataclass
class Storages(TorchDispatchMode):
    """The largest storages that operations make, apart while a prompt is fed and while single tokens are."""

    decoding: bool = False
    largest: dict[bool, tuple[int, str]] = field(default_factory=lambda: {False: (0, ""), True: (0, "")})

    def __post_init__(self):
        super().__init__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in given:
                size = tensor.untyped_storage().nbytes()
                self.largest[self.decoding] = max(
                    self.largest[self.decoding], (size, f"{function} {tuple(tensor.shape)} {tensor.dtype}")
                )
        return made

    def begins(self, model, args, kwargs):
        self.decoding = kwargs["input_ids"].shape[1] == 1

    def ends(self, model, args, output):
        self.decoding = False


@functools.cache
def model() -> tf.PreTrainedModel:
    """Wide in heads, narrow in everything else, so that keys, scores and logits have sizes of their own."""
    torch.manual_seed(0)
    config = zoo.config("qwen2_5_vl")
    text = config.get_text_config()
    text.vocab_size, text.hidden_size, text.num_hidden_layers = VOCABULARY, HEADS * HEAD_DIM, LAYERS
    text.num_key_value_heads, text.max_position_embeddings = KV_HEADS, 8192
    text.rope_parameters["mrope_section"] = [4, 6, 6]
    config.vision_config.out_hidden_size = text.hidden_size
    return tf.Qwen2_5_VLForConditionalGeneration(config).eval()


@functools.cache
def family() -> ModelFacts:
    return model_facts(model().config)


def prompt(length: int) -> EncodedPrompt:
    """So many tokens, a picture and a question at their end; what stands in the middle before the picture counts as visual, too,
    for methods that tell the two apart."""
    rest = length - zoo.prompt("qwen2_5_vl", before=0, after=40)["input_ids"].shape[1]
    made = from_tensors("zoo/0", zoo.prompt("qwen2_5_vl", before=rest, after=40), family())
    types = made.types.clone()
    types[:, length // 2 : rest] = 1
    return replace(made, types=types)


@functools.cache
def registry() -> dict[str, Compressor]:
    """Every method as a run builds it, calibrated ones for this model's shape."""
    names = [name for name in options("method") if name not in common.OUTSIDE]
    made = {name: build_compressor(name, content("method", name), "paper") for name in names}
    return {name: synthetic.calibrated(one, LAYERS, KV_HEADS) for name, one in made.items()}


def watched(length: int, cells: list) -> tuple[Storages, list[ForkResult]]:
    """The largest storages of a run of these cells, by phase, and what it gave."""
    seen = Storages()
    with Engine(model(), family(), common.rules(model(), TOKENS), common.tokenizer()) as engine:
        hooks = [
            model().register_forward_pre_hook(seen.begins, with_kwargs=True),
            model().register_forward_hook(seen.ends),
        ]
        try:
            with seen:
                results = engine.answer(prompt(length), cells)
        finally:
            for hook in hooks:
                hook.remove()
    assert all(result.status == "ok" for result in results), results[0].error
    return seen, results


def holds(length: int, method: str, protocol: str = "paper") -> None:
    one = registry()[method]
    seen, (result,) = watched(length, [common.cell(one, None if one.unbudgeted else FRACTION, protocol)])
    # the oracle's scores need full's own answer, which is decoded first
    slots = TOKENS + (length if one.needs.answer else max(max(heads) for heads in result.kept))
    slots += result.prompt_tokens - result.context_tokens
    scores, block = 4 * HEADS * slots, 4 * KV_HEADS * HEAD_DIM * BLOCK
    size, what = seen.largest[True]
    most = 2 * 4 * KV_HEADS * HEAD_DIM * slots if method in COPY else max(scores, block)
    assert 0 < size <= most, f"{method}: a decode step over {slots} slots makes {size} bytes: {what}"
    size, what = seen.largest[False]
    if length >= 4096:  # below, blocks of a constant size are larger
        assert size < 4 * length * VOCABULARY // 4, f"{method}: of the whole run {size} bytes: {what}"


@pytest.mark.slow
@each("method", ("full", "snapkv", "adakv", "h2o_decode", "prefixkv"))
def test_a_decode_step_makes_nothing_larger_than_its_scores(method):
    holds(1024, method)


@pytest.mark.full
@pytest.mark.parametrize("method", [name for name in options("method") if name not in common.OUTSIDE])
def test_no_method_copies_a_cache_or_makes_anything_quadratic(method):
    for protocol in ("paper", "strict", "query_agnostic"):
        holds(4096, method, protocol)


def test_forks_with_policies_that_decode_together_copy_no_entries():
    """Each is attended to by itself: none is padded to stand beside a longer one."""
    one = registry()["h2o_decode"]
    seen, results = watched(1024, [common.cell(one, budget, name=str(budget)) for budget in (0.25, 0.5)])
    assert [one.fork_rows for one in results] == [2, 2]
    size, what = seen.largest[True]
    assert size <= max(4 * HEADS * (512 + TOKENS), 4 * KV_HEADS * HEAD_DIM * BLOCK), what


@each("new", (2, 12))
def test_several_queries_under_a_mask_copy_no_keys_for_the_heads_of_a_group(new):
    query, key, value = (
        torch.rand(2, HEADS, new, 16),
        torch.rand(2, KV_HEADS, 900, 16),
        torch.rand(2, KV_HEADS, 900, 16),
    )
    mask = torch.rand(2, 1, new, 900) < 0.7
    mask[..., -1] = True
    module = torch.nn.Module()
    module.num_key_value_groups = HEADS // KV_HEADS
    seen = Storages()
    with seen:
        ours, _ = _sdpa(module, query, key, value, mask, scaling=0.25)
    assert seen.largest[False][0] < key.nbytes, seen.largest
    theirs, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, scaling=0.25)
    assert torch.equal(ours, theirs), "transformers' copies give the same numbers"
