"""Promise: `attention=flash_attention_2` answers as sdpa does, reads no padding, and says what it cannot do.

The package is a double (tests/flash_attn_double.py) with the documented signatures.
"""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from mmkv_bench import devices
from mmkv_bench.compression import flash
from mmkv_bench.compression.attention_backend import _sdpa
from mmkv_bench.compression.compressor import full
from mmkv_bench.compression.flash import FLASH, padding_mask
from mmkv_bench.compression.session import Session, attach
from mmkv_bench.errors import ConfigError, UnsupportedError
from mmkv_bench.generation.fidelity import ExtraMeasures
from tests import flash_attn_double, reference, zoo
from tests.core import parts
from tests.each import each
from tests.flash_attn_double import WithFlash, installed
from tests.generation import common
from tests.second_device import far, second_device, there

TOLERANCE = 2e-6
EVERYTHING = ExtraMeasures(True, (3, 4, 5), True)
KINDS = ("full", "snapkv", "adakv", "h2o_decode", "kivi", "hybridkv", "look_m")
"""Methods that keep all, as much of every head, ragged heads, evict while decoding, quantise, retrieve and merge."""


@pytest.fixture
def package():
    with installed() as made:
        yield made


def cells(name: str, methods: tuple[str, ...] | None = None, protocols: tuple[str, ...] = ("paper",)) -> list:
    registry = common.registry("paper", name)
    registry = registry if name in zoo.MULTIMODAL else common.for_text(registry)
    chosen = [made for method, made in registry.items() if methods is None or method in methods]
    return [common.cell(one, None if one.unbudgeted else 11, rule) for one in chosen for rule in protocols]


def assert_as_with_sdpa(name: str, asked: list, run, **options) -> None:
    """Tokens, kept entries, bytes and fallbacks are the same, and fidelity to the last digits."""
    model, prompt = zoo.model(name), common.encoded(name)
    expected = run(model, name, prompt, asked, common.rules(model, 4), **options)
    found = run(model, name, prompt, asked, common.rules(model, 4), attention=FLASH, **options)
    assert sum(one.status == "ok" for one in found) >= 0.8 * len(found), [one.error for one in found]
    common.assert_same(found, expected, ignore=common.MEASURES)
    for a, b in zip(found, expected, strict=True):
        assert (a.forced_kl is None) == (b.forced_kl is None)
        assert a.forced_kl is None or torch.allclose(torch.tensor(a.forced_kl), torch.tensor(b.forced_kl), atol=1e-4)
    assert model.get_decoder().config._attn_implementation == "sdpa"


def test_forks_answer_and_are_measured_as_with_sdpa(package):
    asked = cells("qwen2_5_vl", ("full", "adakv", "h2o_decode", "hybridkv"))
    assert_as_with_sdpa("qwen2_5_vl", asked, common.together, extras=EVERYTHING)
    assert package.calls


def test_a_question_fed_to_reduced_entries_is_answered_as_with_sdpa(package):
    asked = cells("qwen2_5_vl", ("full", "snapkv", "adakv"), ("strict", "query_agnostic"))
    assert_as_with_sdpa("qwen2_5_vl", asked, common.together)


def test_stock_generate_answers_as_with_sdpa(package):
    assert_as_with_sdpa("llama", cells("llama", ("full", "adakv")), common.alone)


@pytest.mark.full
@pytest.mark.parametrize("name", zoo.ALL)
def test_every_method_of_every_family_answers_as_with_sdpa(package, name):
    protocols = ("paper", "strict", "query_agnostic") if name in zoo.MULTIMODAL else ("paper", "strict")
    assert_as_with_sdpa(name, cells(name, protocols=protocols), common.together, extras=EVERYTHING)


@pytest.mark.full
@pytest.mark.parametrize("name", zoo.FEW)
def test_every_method_answers_by_itself_as_with_sdpa(package, name):
    assert_as_with_sdpa(name, cells(name), common.alone)


@pytest.mark.full
def test_on_a_second_device_flash_attn_answers_as_sdpa_does_there(package):
    """Retrieval attends to runs of heads there, beside its copies."""
    name = "qwen2_5_vl"
    asked, prompt = cells(name, KINDS), common.encoded(name)
    with second_device():
        model, given = there(zoo.model(name)), far(prompt)
        expected = common.together(model, name, given, asked)
        found = common.together(model, name, given, asked, attention=FLASH)
    assert [one.status for one in found] == ["ok"] * len(asked), [one.error for one in found]
    common.assert_same(found, expected, ignore=common.MEASURES)
    assert package.calls


@pytest.mark.skipif(
    not (torch.cuda.is_available() and find_spec("flash_attn")), reason="a CUDA device and the package flash-attn"
)
def test_the_true_package_attends_as_sdpa_does():
    """Not run where they are not; the double stands for them everywhere else."""
    heads, groups, slots, width = 3, 2, 300, 64
    module = SimpleNamespace(num_key_value_groups=groups, is_causal=True)
    shapes = ((heads * groups, 5), (heads, slots), (heads, slots))
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, count, n, width, generator=generator).to("cuda", torch.bfloat16) for count, n in shapes
    )
    first = torch.tensor([[0, 17, 290], [3, 3, 200]], device="cuda")
    for left in (first, first[:, :1], None):
        real = None if left is None else (torch.arange(slots, device="cuda") >= left[..., None])[:, :, None]
        causal = torch.ones(5, slots, dtype=torch.bool, device="cuda").tril(slots - 5)[None, None]
        found, _ = flash.attend(None, query, key, value, real, 0.2)
        expected, _ = _sdpa(module, query, key, value, causal if real is None else causal & real, 0.2)
        assert (found.float() - expected.float()).abs().max() < 0.03


def left_padded(name: str) -> dict:
    return zoo.batch([zoo.prompt(name, 0), zoo.prompt(name, 1, before=2, after=3), zoo.prompt(name, 2, before=9)])


@each("kind", ["full", "uniform", "all_ragged"])
def test_a_left_padded_batch_is_answered_as_with_sdpa(package, kind):
    for name in ("qwen2_5_vl", "llama"):
        model, inputs = zoo.model(name), left_padded(name)
        made, budget = (full(), None) if kind == "full" else (parts.compressor(kind), parts.budget(9))
        with attach(model, made, budget):
            expected = reference.generate(model, inputs, 5)
        with attach(model, made, budget, attention=FLASH):
            found = reference.generate(model, inputs, 5)
        assert torch.equal(found.tokens, expected.tokens)
        assert (found.logits - expected.logits).abs().max() <= TOLERANCE


def test_a_step_reads_no_padding(package):
    """All slots that the kernels read are entries, of ragged heads and of padded prompts."""
    model, inputs = zoo.model("qwen2_5_vl"), left_padded("qwen2_5_vl")
    with attach(model, parts.compressor("all_ragged"), parts.budget(9), attention=FLASH) as session:
        reference.generate(model, inputs, 4)
    padding = int((inputs["attention_mask"] == 0).sum())
    prefill, steps = package.calls[: zoo.LAYERS], package.calls[zoo.LAYERS :]
    heads = session.cache.layers[0].keys.shape[1]
    assert all(call.read == (inputs["input_ids"].numel() - padding) * heads for call in prefill)
    assert [call.read for call in steps[-zoo.LAYERS :]] == [
        int(layer.entries().sum()) for layer in session.cache.layers
    ]
    assert all(layer.stored * layer.entries().numel() > layer.entries().sum() for layer in session.cache.layers)


def test_half_precision_is_asked_for_and_given():
    """The double's kernels take bfloat16 alone here, and the answer is sdpa's but for rounding."""
    model, inputs = zoo.build("llava").to(torch.bfloat16), zoo.prompt("llava")
    inputs["pixel_values"] = inputs["pixel_values"].bfloat16()
    runs = {}
    with installed(exact=False):
        for attention in ("sdpa", FLASH):
            with attach(model, parts.compressor("all_ragged"), parts.budget(9), attention=attention):
                runs[attention] = reference.generate(model, inputs, 3).logits.float()
    assert (runs[FLASH] - runs["sdpa"])[0].abs().max() < 0.05 * runs["sdpa"].abs().max()


def test_the_mask_says_what_is_padding_and_nothing_of_causality():
    real = torch.tensor([[False, True, True], [True, True, True]])
    assert padding_mask(2, 3, 3, attention_mask=real).tolist() == [[[row]] for row in real.tolist()]
    assert padding_mask(2, 1, 3, attention_mask=torch.ones(2, 3, dtype=torch.bool)) is None
    assert padding_mask(1, 4096, 4096, causal_mask_function) is None
    assert padding_mask(1, 2, 5).tolist() == [[[[True] * 5]]], "a question fed to a cache, whose heads may be ragged"
    with pytest.raises(UnsupportedError, match="a mask that is not only causal"):
        padding_mask(1, 3, 3, sliding_window_causal_mask_function(2))


def test_without_the_package_one_sentence_says_so():
    with pytest.raises(
        ConfigError, match=r"needs the package flash-attn, which is not installed; allowed.*mmkv-bench\[gpu\]"
    ):
        Session(zoo.model("llama"), attention=FLASH)


def test_what_flash_attn_cannot_do_is_refused(package, monkeypatch):
    model = zoo.model("llama")
    monkeypatch.setattr(flash, "DTYPES", ("bfloat16", "float16"))
    with pytest.raises(UnsupportedError, match="cannot compute in float32; allowed: bfloat16, float16"):
        Session(model, attention=FLASH)
    monkeypatch.setattr(flash, "DTYPES", ("float32",))
    with pytest.raises(UnsupportedError, match="cannot be recorded as a graph, which decode=compiled needs"):
        Session(model, attention=FLASH, fixed=True)
    with pytest.raises(UnsupportedError, match="cannot be recorded as a graph"):
        common.together(model, "llama", common.encoded("llama"), [], attention=FLASH, step=print)
    monkeypatch.setattr(flash, "WIDEST_HEAD", 8)
    with pytest.raises(UnsupportedError, match="no kernel for heads of 16 channels; allowed: multiples of 8 up to 8"):
        Session(model, attention=FLASH)
    monkeypatch.setattr(WithFlash, "runs_flash_attention", False)
    with pytest.raises(UnsupportedError, match="runs on a CUDA device, but the model is on cpu"):
        Session(model, attention=FLASH)
    assert devices.Cuda.runs_flash_attention and not devices.Device.runs_flash_attention
    assert tuple(getattr(torch, name) for name in ("float16", "bfloat16")) == flash_attn_double.HALF
