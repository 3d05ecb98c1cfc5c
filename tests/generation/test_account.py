"""What a row says of bytes, against an independent tally of live storages and of what the attention kernel is given."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mmkv_bench import protocols
from mmkv_bench.compression.cache import CompressedLayer
from mmkv_bench.compression.context import Context
from mmkv_bench.compression.decoding.kivi import KIVI
from mmkv_bench.compression.decoding.quantised_layer import QuantisedLayer
from mmkv_bench.compression.decoding.retrieval_layer import Pages
from mmkv_bench.compression.session import attach
from mmkv_bench.generation.encode import lengths_of
from tests import cover, zoo
from tests.generation import common

TOKENS = 2
PROTOCOLS = (*common.PROTOCOLS, "query_aware")
METHODS = ("full", "snapkv", "adakv", "sparsemm", "look_m", "h2o_decode", "local", "hybridkv", "kivi")


def methods(name: str) -> dict:
    """One of every class of storage, ragged ones, merging ones and those that evict or quantise while decoding."""
    made = {method: common.registry(model=name)[method] for method in METHODS}
    made["meda_released"] = common.registry("released", name)["meda"]
    for flush in ("before", "after"):
        packing = KIVI(bits=4, group=4, residual=4, flush=flush)
        made[f"kivi_{flush}"] = dataclasses.replace(made["kivi"], name=f"kivi_{flush}", decoding=packing)
        made[f"kivi_adakv_{flush}"] = dataclasses.replace(made["adakv"], name=f"kivi_adakv_{flush}", decoding=packing)
    return made


def storages(value, seen: dict[int, int]) -> dict[int, int]:
    """Address -> bytes of every tensor storage that a layer reaches; what all layers know of the prompt is left out."""
    if isinstance(value, torch.Tensor):
        seen[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    elif isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            storages(item, seen)
    elif type(value).__module__.startswith("mmkv_bench") and hasattr(value, "__dict__"):
        storages({} if isinstance(value, Context) else vars(value), seen)
    return seen


def held_when_the_answer_begins(model, prompt, cell, lengths) -> int:
    """Bytes of all storages after the prefill of a session that knows how long the answer can get."""
    context = lengths.reduced if protocols.protocol(cell.protocol).cuts else None
    reserve = lengths.prompt - lengths.prefilled + TOKENS - 1
    known = {"token_types": prompt.types[:, : lengths.prefilled], "identity": prompt.identity, "reserve": reserve}
    arguments = (cell.compressor, cell.budget, cell.protocol, cell.seed, lengths.prompt)
    with attach(model, *arguments, context=context, **known) as session, torch.no_grad():
        model(**prompt.context(lengths.prefilled).inputs, use_cache=True, logits_to_keep=1)
        found: dict[int, int] = {}
        for layer in session.cache.layers:
            assert not layer.growths
            storages(layer, found)
        return sum(found.values())


def padding(model, result, cell, lengths) -> int:
    """Bytes by which a layer's heads fall short of its longest, from the kept counts and the formats' definitions."""
    config = model.config.get_text_config()
    dim = config.hidden_size // config.num_attention_heads
    dim, policy, total = getattr(config, "head_dim", None) or dim, cell.compressor.decoding, 0
    for counts in result.kept:
        heads = [count - lengths.refed for count in counts]
        if not isinstance(policy, KIVI):
            total += sum(max(heads) - count for count in heads) * (2 * 4 * dim + 4)
            continue
        unit = 4 * dim // 2 + 2 * dim * 4, dim // 2 + 2 * (dim // 4) * 4  # 4 keys of 4 bits and scales; one value
        keys, values = (
            [(count // 4, count % 4) for count in heads],
            [(max(0, count - 4), min(count, 4)) for count in heads],
        )
        for size, parts in zip(unit, (keys, values), strict=True):
            for place, bytes_ in ((0, size), (1, 4 * dim)):
                most = max(part[place] for part in parts)
                total += sum(most - part[place] for part in parts) * bytes_
        total += sum(max(heads) - count for count in heads) * 4
    return total


def read_by_the_first_step(model, name, prompt, cell, monkeypatch) -> tuple:
    """The result of a run by itself, bytes that the kernel was given when the answer's first token was fed, and bytes moved."""
    given, attend, fetch = [], CompressedLayer.attend, Pages.fetch

    def attending(layer, query, key, value, mask):
        if query.shape[2] == 1 and layer.seen == prompt.length + 1:
            used = layer.nbytes()
            packed = sum(used) - layer.positions.nbytes if isinstance(layer, QuantisedLayer) else 0
            given.append(packed or key.nbytes + value.nbytes)
        return attend(layer, query, key, value, mask)

    def fetching(pages, chosen, width, rows):
        moved.append(2 * chosen.numel() * pages.chunk * pages.means.shape[-1] * 4)
        steps.append(pages.means.nbytes + moved[-1])
        return fetch(pages, chosen, width, rows)

    steps: list[int] = []
    moved: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(CompressedLayer, "attend", attending)
        patch.setattr(Pages, "fetch", fetching)
        (result,) = common.alone(model, name, prompt, [cell], common.rules(model, TOKENS))
    per_step = len(steps) // max(1, TOKENS - 1 + (cell.protocol != "paper"))
    return result, sum(given) + sum(steps[:per_step]), sum(moved[:per_step])


@pytest.mark.slow
@cover.few("name", ("qwen2_5_vl", "llava_next"))
def test_bytes_are_those_of_live_storages_and_of_what_is_read(name, monkeypatch):
    model, prompt = zoo.model(name), common.encoded(name)
    ragged = set()
    for place, (method, made) in enumerate(methods(name).items()):
        if name != "qwen2_5_vl" and method not in ("look_m", "kivi_adakv_before"):
            continue
        for protocol in (PROTOCOLS[place % 4], PROTOCOLS[(place + 3) % 4]):
            cell = common.cell(made, None if made.unbudgeted else 11, protocol)
            lengths = lengths_of(protocols.protocol(protocol), prompt, common.family(name))
            result, read, moved = read_by_the_first_step(model, name, prompt, cell, monkeypatch)
            assert result.status == "ok", (method, protocol, result.error)
            assert result.bytes_held == held_when_the_answer_begins(model, prompt, cell, lengths), (method, protocol)
            assert (result.bytes_read_step, result.bytes_moved_step) == (read, moved), (method, protocol)
            if method != "hybridkv":  # pads chunks too: test_hybridkv_retrieval.py
                assert result.bytes_padding == padding(model, result, cell, lengths), (method, protocol)
            if protocol == "paper":
                assert result.bytes_held > result.bytes_device + result.bytes_metadata + result.bytes_host
            ragged.add(method) if result.bytes_padding else None
    assert "kivi_adakv_before" in ragged and not ragged & {"full", "snapkv", "local"}
