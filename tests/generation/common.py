"""Shared by the tests of the fork engine: prompts, a tokenizer, cells, both paths, what "the same result" means."""

from __future__ import annotations

import dataclasses
import functools

from mmkv_bench.compression.budget import Budget
from mmkv_bench.compression.compressor import Compressor, full
from mmkv_bench.families.facts import ModelFacts, model_facts
from mmkv_bench.generation.encode import EncodedPrompt, from_tensors, lengths_of
from mmkv_bench.generation.engine import Engine
from mmkv_bench.generation.fidelity import NOTHING, ExtraMeasures
from mmkv_bench.generation.result import CellSpec, ForkResult
from mmkv_bench.generation.rules import DecodeRules
from mmkv_bench.generation.unshared_generation import run_alone
from mmkv_bench.protocols import protocol
from tests import zoo
from tests.calibrate import synthetic

PROTOCOLS = ("paper", "strict", "query_agnostic")

# Fields of a result that tell how it came about, not what it is; everything else must agree between paths and runs.
TIMES = {field.name for field in dataclasses.fields(ForkResult) if field.name.endswith("_s")}
CIRCUMSTANCES = TIMES | {"peak_device_bytes", "peak_resident_bytes", "fork_batch", "fork_rows"}
MEASURES = {"forced_kl", "forced_agree", "reference_nll", "reference_samples"}  # asked for apart; test_measuring.py
PATH = {"measured", "fork_group"}


@functools.cache
def tokenizer():
    """One token of two letters per id of the zoo's vocabulary, so that stop strings may begin and end inside tokens."""
    from tokenizers import Regex, Tokenizer, decoders
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    words = {chr(97 + i // 26) + chr(97 + i % 26): i for i in range(zoo.VOCABULARY)}
    made = Tokenizer(WordLevel(words, unk_token="aa"))
    made.pre_tokenizer, made.decoder = Split(Regex(".."), "isolated"), decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def rules(model, tokens: int = 6, **task) -> DecodeRules:
    return DecodeRules.read(model.generation_config, {"max_new_tokens": tokens, **task}, tokenizer())


@functools.cache
def family(name: str) -> ModelFacts:
    return model_facts(zoo.build(name).config)  # not zoo.model: asking for that resets the shared model's settings


def encoded(name: str, inputs: dict | None = None, identity: str = "zoo/0", **options) -> EncodedPrompt:
    """A prompt of the zoo as the engine takes it."""
    inputs = zoo.prompt(name, **options) if inputs is None else inputs
    return from_tensors(identity, inputs, family(name))


def cell(
    compressor: Compressor, budget=None, protocol: str = "paper", seed: int = 0, name: str | None = None
) -> CellSpec:
    budget = None if budget is None else Budget.parse(budget)
    return CellSpec(name or f"{compressor.name}@{budget}/{protocol}/{seed}", compressor, budget, protocol, seed)


def context_cut(prompt: EncodedPrompt, of: ModelFacts) -> int:
    """Tokens of the prompt's context, where a protocol cuts it."""
    return lengths_of(protocol("query_agnostic"), prompt, of).reduced


def full_cells(protocols=PROTOCOLS) -> list[CellSpec]:
    return [cell(full(), None, protocol) for protocol in protocols]


def some(cells: list) -> list:
    """Every method under every protocol, with its budgets and seeds in turn."""
    groups: dict[tuple, list] = {}
    for one in cells:
        groups.setdefault((one.compressor.name, one.protocol), []).append(one)
    return [group[turn % len(group)] for turn, group in enumerate(groups.values())]


OUTSIDE = {
    "custom",
    "kvpress",
    "pixels",
    "cut_prompt",
}  # take a file or a package of the user's, or the pictures of a run


@functools.cache
def registry(reading: str = "paper", model: str = "qwen2_5_vl") -> dict[str, Compressor]:
    """Every method of conf/method, built as a run builds it; calibrated ones with made-up data of the model's shape."""

    from mmkv_bench.config.files import content, options
    from mmkv_bench.methods.build import build_compressor

    names = [name for name in options("method") if name not in OUTSIDE]
    assert len(names) >= 7, "the registry has lost methods"
    methods = {name: build_compressor(name, content("method", name), reading) for name in names}
    layers, heads = family(model).num_layers, family(model).num_kv_heads
    return {name: synthetic.calibrated(made, layers, heads) for name, made in methods.items()}


def for_text(methods: dict[str, Compressor]) -> dict[str, Compressor]:
    """Those of the methods that a prompt without visual tokens can be given to."""
    return {name: made for name, made in methods.items() if not made.needs_visual}


def together(
    model, name: str, prompt: EncodedPrompt, cells, decode_rules=None, extras: ExtraMeasures = NOTHING, **options
) -> list[ForkResult]:
    """All cells through the fork engine."""
    decode_rules = decode_rules or rules(model)
    with Engine(model, family(name), decode_rules, tokenizer(), **options) as engine:
        return engine.answer(prompt, cells, extras)


def alone(model, name: str, prompt: EncodedPrompt, cells, decode_rules=None, **options) -> list[ForkResult]:
    """Each cell on its own through attach() and stock generate()."""
    decode_rules = decode_rules or rules(model)
    return [run_alone(model, family(name), decode_rules, tokenizer(), prompt, one, **options) for one in cells]


def content(result: ForkResult, ignore: set[str] = frozenset()) -> dict:
    return {k: v for k, v in dataclasses.asdict(result).items() if k not in CIRCUMSTANCES and k not in ignore}


def assert_same(first, second, ignore: set[str] = frozenset()) -> None:
    """Two lists of results say the same about the same cells, times and batch shapes aside."""
    for a, b in zip(first, second, strict=True):
        assert content(a, ignore) == content(b, ignore)


def assert_forks_equal_alone(model, name: str, prompt: EncodedPrompt, cells, decode_rules=None, **options) -> list:
    """The promise of the engine; returns its results. Every cell must have been answered."""
    forks = together(model, name, prompt, cells, decode_rules, **options)
    assert [f.status for f in forks] == ["ok"] * len(cells), [f.error for f in forks]
    assert_same(forks, alone(model, name, prompt, cells, decode_rules), ignore=PATH)
    return forks


class Seen:
    """A step that is the model, and notes the addresses of what it reads and writes; several calls of one cache count once."""

    def __init__(self, model):
        self.model, self.addresses = model, []

    def __call__(self, **inputs):
        layers = inputs["past_key_values"].layers
        tensors = [
            one for layer in layers for one in (*layer.buffers()[:2], layer._length, layer._tokens_seen, layer._first)
        ]
        seen = tuple(one.data_ptr() for one in tensors if one is not None)
        self.addresses += [seen] if seen not in self.addresses[-1:] else []
        return self.model(**inputs)
