"""Promises: left-padded batches, chunked prefill, multi-token questions after compression and a second turn on the same
cache stay right, and every decoded token sits at its true position."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mmkv_bench.compression.session import attach
from tests import cover, reference, zoo
from tests.core import parts

TOLERANCE = 2e-6
ATTENTION = ("sdpa", "eager")


def _padded(name: str) -> tuple[list[dict[str, Tensor]], dict[str, Tensor], list[int]]:
    prompts = [zoo.prompt(name, 0), zoo.prompt(name, 1, before=2), zoo.prompt(name, 2, after=4)]
    inputs = zoo.batch(prompts)
    pads = [inputs["input_ids"].shape[1] - prompt["input_ids"].shape[1] for prompt in prompts]
    assert len(set(pads)) == 3
    return prompts, inputs, pads


@cover.cases(zoo.FEW, parts.BUDGETS, ATTENTION, each=3)
def test_left_padded_batch_equals_masked_full_attention(name, combinations):
    _, inputs, _ = _padded(name)
    length = inputs["input_ids"].shape[1]
    for kind, attention in combinations:
        with cover.case(kind, attention):
            model = zoo.model(name, attention)
            with attach(model, parts.compressor(kind), budget=parts.budget(9)) as session:
                run = reference.generate(model, inputs, 5)
                kept = session.kept()
            masked = reference.masked_generate(model, inputs, reference.keep_of(kept, length), length, 5)
            assert (run.logits - masked.logits).abs().max() <= TOLERANCE
            assert torch.equal(run.tokens, masked.tokens)


@cover.cases(zoo.ALL, (parts.compressor("all_ragged"), parts.window(4)), each=1, keep=4)
def test_padding_is_never_kept_and_never_scored(name, combinations):
    """Every row of a padded batch keeps what it keeps alone, shifted by its padding, and answers as it does alone."""
    model, (prompts, inputs, pads) = zoo.model(name), _padded(name)
    names = [f"sample-{row}" for row in range(len(prompts))]
    for (made,) in combinations:
        with attach(model, made, budget=parts.budget("30%"), identity=names) as session:
            together, kept = reference.generate(model, inputs, 4), session.kept()
        for row, (prompt, pad) in enumerate(zip(prompts, pads, strict=True)):
            with attach(model, made, budget=parts.budget("30%"), identity=names[row]) as session:
                alone, kept_alone = reference.generate(model, prompt, 4), session.kept()
            assert torch.equal(alone.tokens[0], together.tokens[row])
            assert (alone.logits[:, 0] - together.logits[:, row]).abs().max() < 1e-5
            for index, index_alone in zip(kept, kept_alone, strict=True):
                for head, head_alone in zip(index[row], index_alone[0], strict=True):
                    assert torch.equal(head[head >= 0] - pad, head_alone[head_alone >= 0])


def test_batch_with_rows_within_and_above_the_budget_keeps_the_short_rows_whole():
    model, name = zoo.model("qwen2_5_vl"), "qwen2_5_vl"
    prompts = [zoo.prompt(name), zoo.prompt(name, 1, before=0, after=1)]
    inputs, short = zoo.batch(prompts), prompts[1]["input_ids"].shape[1]
    length = inputs["input_ids"].shape[1]
    with attach(model, parts.compressor("head_ragged"), budget=parts.budget(short)) as session:
        run = reference.generate(model, inputs, 5)
        kept, counts = session.kept(), [(index >= 0).sum(-1) for index in session.kept()]
        assert session.listener.fallbacks == [(), ("prompt_within_budget",)]
    assert all((count[1] == short).all() and int(count[0].sum()) == short * count.shape[1] for count in counts)
    masked = reference.masked_generate(model, inputs, reference.keep_of(kept, length), length, 5)
    assert (run.logits - masked.logits).abs().max() <= TOLERANCE


@pytest.mark.full
@cover.cases(
    zoo.FEW, (1, 7, 16), (parts.compressor("all_ragged"), parts.window(12), parts.window(5, "head_ragged")), each=3
)
def test_chunked_prefill_keeps_the_same_entries_and_gives_the_same_answer(name, combinations):
    model, inputs = zoo.model(name), zoo.prompt(name)
    length = inputs["input_ids"].shape[1]
    for chunk, made in combinations:
        with cover.case(chunk, made.name):
            with attach(model, made, budget=parts.budget("40%")) as session:
                whole, kept = reference.generate(model, inputs, 5), session.kept()
            with attach(model, made, budget=parts.budget("40%"), prompt_length=length) as session:
                run = reference.generate(model, inputs, 5, prefill_chunk_size=chunk)
                assert all(torch.equal(a, b) for a, b in zip(session.kept(), kept, strict=True))
                assert [int(count.sum()) for count in parts.stored(session)] == [
                    int((index >= 0).sum()) + 4 * index.shape[1] for index in kept
                ]
            assert torch.equal(run.tokens, whole.tokens)
            masked = reference.masked_generate(model, inputs, reference.keep_of(kept, length), length, 5)
            assert (run.logits - masked.logits).abs().max() <= TOLERANCE


def test_chunked_prefill_of_a_left_padded_batch_equals_one_shot():
    name = "qwen2_5_vl"
    model, (_, inputs, _) = zoo.model(name), _padded(name)
    for chunk in (2, 16):
        with attach(model, parts.window(6), budget=parts.budget(9)) as session:
            whole, kept = reference.generate(model, inputs, 4), session.kept()
        with attach(
            model, parts.window(6), budget=parts.budget(9), prompt_length=inputs["input_ids"].shape[1]
        ) as session:
            run = reference.generate(model, inputs, 4, prefill_chunk_size=chunk)
            assert all(torch.equal(a, b) for a, b in zip(session.kept(), kept, strict=True))
        assert (run.logits - whole.logits).abs().max() <= TOLERANCE


@torch.no_grad()
def _question(model, inputs: dict[str, Tensor], cache, length: int = 6) -> Tensor:
    """Prefill, then one forward of several question tokens on the cache, then one more token: logits [B,length+1,V]."""
    cache = model(**inputs, past_key_values=cache, use_cache=True).past_key_values
    rows = inputs["input_ids"].shape[0]
    question = torch.tensor([zoo.text(length, 70 + row) for row in range(rows)])
    mask = inputs["attention_mask"]
    if rows == 1:  # Qwen-VL cannot be given a longer mask without positions, and one row needs no mask
        options = [{}, {}]
    else:
        grown = [torch.nn.functional.pad(mask, (0, extra), value=1) for extra in (length, length + 1)]
        options = [
            {"attention_mask": g, "position_ids": g.cumsum(-1)[:, n:] - 1}
            for g, n in zip(grown, _starts(mask, length), strict=True)
        ]
    first = model(input_ids=question, past_key_values=cache, use_cache=True, **options[0]).logits
    token = first[:, -1:].argmax(-1)
    return torch.cat([first, model(input_ids=token, past_key_values=cache, use_cache=True, **options[1]).logits], 1)


def _starts(mask: Tensor, length: int) -> tuple[int, int]:
    return mask.shape[1], mask.shape[1] + length


def _asked_after_compression(model, inputs: dict[str, Tensor], kind: str) -> None:
    length = inputs["input_ids"].shape[1]
    with attach(model, parts.compressor(kind), budget=parts.budget(10)) as session:
        rows = _question(model, inputs, None)
        keep = reference.keep_of(session.kept(), length)
    with reference.masked(model, reference.visible(keep, length)) as cache:
        masked = _question(model, inputs, cache)
    assert (rows - masked).abs().max() <= TOLERANCE


@cover.cases(zoo.FEW, parts.BUDGETS, ATTENTION, each=3)
def test_multi_token_question_after_compression_equals_masked_full_attention(name, combinations):
    for kind, attention in combinations:
        with cover.case(kind, attention):
            _asked_after_compression(zoo.model(name, attention), zoo.prompt(name), kind)


@cover.cases(("llama", "llava_next", "internvl"), parts.BUDGETS)
def test_multi_token_question_on_a_padded_batch_equals_masked_full_attention(name, combinations):
    _, inputs, _ = _padded(name)
    for (kind,) in combinations:
        with cover.case(kind):
            _asked_after_compression(zoo.model(name), inputs, kind)


def _two_turns(name: str, model, inputs: dict[str, Tensor], cache) -> tuple[Tensor, Tensor]:
    """generate(), then a follow-up of 4 tokens in a second generate() on the returned cache: tokens and logits."""
    options = {} if cache is None else {"past_key_values": cache}
    first = reference.generate(model, inputs, 3, **options)
    ids = torch.cat([inputs["input_ids"], first.tokens, torch.tensor([zoo.text(4, 71)])], dim=1)
    follow = zoo.inputs_of(name, ids[0].tolist(), {k: v for k, v in inputs.items() if k.endswith("grid_thw")})
    second = reference.generate(model, follow, 4, past_key_values=first.cache)
    return second.tokens, torch.cat([first.logits, second.logits])


@cover.cases(zoo.FEW, parts.BUDGETS)
def test_second_turn_on_the_same_cache_equals_masked_full_attention(name, combinations):
    model, inputs = zoo.model(name), zoo.prompt(name)
    length = inputs["input_ids"].shape[1]
    for (kind,) in combinations:
        with cover.case(kind):
            with attach(model, parts.compressor(kind), budget=parts.budget(10)) as session:
                tokens, logits = _two_turns(name, model, inputs, None)
                keep = reference.keep_of(session.kept(), length)
                assert session.cache.get_seq_length() == length + 3 + 4 + 3
            with reference.masked(model, reference.visible(keep, length)) as cache:
                masked_tokens, masked_logits = _two_turns(name, model, inputs, cache)
            assert (logits - masked_logits).abs().max() <= TOLERANCE
            assert torch.equal(tokens, masked_tokens)


def _rotations(model, run) -> list[tuple[Tensor, Tensor]]:
    """cos and sin [B,n,D] that each forward pass gave to its attention layers while `run()` ran."""
    seen = []
    hook = (
        model.get_decoder()
        .layers[0]
        .self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(kwargs["position_embeddings"]), with_kwargs=True
        )
    )
    try:
        run()
    finally:
        hook.remove()
    return seen


@cover.few("name", zoo.ALL, keep=4)
def test_decode_positions_are_those_of_the_untouched_model(name):
    """Position ids and rotations of every step, mrope included, do not depend on how much was evicted."""
    model, (_, inputs, _) = zoo.model(name), _padded(name)
    stock = _rotations(model, lambda: reference.generate(model, inputs, 5))
    with attach(model, parts.compressor("all_ragged"), budget=parts.budget(6)):
        ours = _rotations(model, lambda: reference.generate(model, inputs, 5))
    assert len(stock) == len(ours) == 5
    for step, (before, after) in enumerate(zip(stock, ours, strict=True)):
        assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1]), f"step {step}"


@pytest.mark.parametrize("name", ("qwen2_vl", "qwen2_5_vl", "qwen3_vl"))
def test_decode_positions_of_mrope_continue_behind_the_compacted_images(name):
    """The check above would be empty if images did not shorten the position axis, so it is shown that they do."""
    model, inputs = zoo.model(name), zoo.prompt(name)
    length = inputs["input_ids"].shape[1]
    with attach(model, parts.compressor(), budget=parts.budget(6)) as session:
        reference.generate(model, inputs, 3)
        last = session.position_ids[1:, 0, -1]
    assert last.unique().numel() == 1 and int(last[0]) < length + 1
    deltas = int(model.model.rope_deltas)
    assert deltas < 0 and int(last[0]) == length + 1 + deltas


def test_loop_without_position_ids_continues_at_the_true_position():
    model, inputs = zoo.model("llama"), zoo.prompt("llama")
    length = inputs["input_ids"].shape[1]

    @torch.no_grad()
    def loop(cache):
        step = model(**inputs, past_key_values=cache, use_cache=True)
        rows = [step.logits[:, -1]]
        for _ in range(4):
            token = rows[-1].argmax(-1, keepdim=True)
            rows.append(model(input_ids=token, past_key_values=step.past_key_values, use_cache=True).logits[:, -1])
        return torch.stack(rows)

    with attach(model, parts.compressor("all_ragged"), budget=parts.budget(6)) as session:
        ours, keep = loop(None), reference.keep_of(session.kept(), length)
    with reference.masked(model, reference.visible(keep, length)) as cache:
        assert (ours - loop(cache)).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", ("qwen2_5_vl", "llava_next"))
def test_beams_reorder_the_compressed_cache_correctly(name):
    model, inputs = zoo.model(name), zoo.prompt(name)
    length = inputs["input_ids"].shape[1]
    beams = {"num_beams": 3, "num_return_sequences": 3}
    with attach(model, parts.compressor("all_ragged"), budget=parts.budget(8)) as session:
        run = reference.generate(model, inputs, 5, **beams)
        kept = session.kept()
    keep = [k[:1] for k in reference.keep_of(kept, length)]
    masked = reference.masked_generate(model, inputs, keep, length, 5, **beams)
    assert torch.equal(run.tokens, masked.tokens)
    assert (run.logits - masked.logits).abs().max() <= TOLERANCE
