"""What a run cannot do is refused before any work."""

from __future__ import annotations

import os
import re
from types import SimpleNamespace

import pytest

from mmkv_bench.compression.compressor import full
from mmkv_bench.config.compose import compose
from mmkv_bench.errors import ConfigError, UnsupportedError
from mmkv_bench.families.base import NO_STATES, States
from mmkv_bench.plan.cells import build_methods, method_entries
from mmkv_bench.plan.validate import (
    bytes_of,
    validate,
    validate_combinations,
    validate_decoding,
    validate_questions,
    validate_stream,
)
from tests.each import each
from tests.plan.setting import MODEL, model_folder

TEXT_ONLY = SimpleNamespace(states=NO_STATES, name="Llama (text)", multimodal=False, num_layers=4)
MULTIMODAL = SimpleNamespace(states=NO_STATES, name="Qwen2.5-VL", multimodal=True, num_layers=4)


def check(*overrides: str) -> None:
    validate(compose([*MODEL, *overrides]))


@each(
    ("overrides", "words"),
    [
        (["budget=0"], "budget=0 keeps nothing"),
        (["budget=-1"], "budget=-1 keeps nothing"),
        (["budget=1.5"], "budget=1.5 is neither whole entries nor a fraction"),
        (["budget=abc"], "'abc' is not a budget"),
        (["budget=[16,abc]"], "'abc' is not a budget"),
        (["budget=true"], "is not a budget"),
        (["budget=null"], "is not a budget"),
        (["budget=120%"], "is neither whole entries nor a fraction"),
        (["budget=[]"], "budget=[] is an empty list"),
        (
            ["gate.expected=0.5", "dataset=[pages_walk,docvqa]"],
            "gate.expected=0.5 is one score, but the run has 2 datasets",
        ),
        (["gate.expected=0.5", "dataset=docvqa", "data=fixture"], "data=fixture is made up"),
        (["gate.expected=0.5", "dataset=docvqa", "dataset.metrics=[]"], "datasets.docvqa.metrics is empty"),
        (["seed=-1"], "seed=-1 is out of range"),
        (["seed=null"], "seed=None is out of range"),
        (["batch=null"], "batch=None is out of range"),
        (["seed=1.5"], "seed=1.5 is out of range"),
        (["seed=[0,x]"], "seed=x is out of range"),
        (["protocol=strct"], "did you mean 'strict'"),
        (["protocol=[paper,agnostic]"], "did you mean 'query_agnostic'"),
        (["reading=relesed"], "did you mean 'released'"),
        (["methods.mmshift.reading=code"], "methods.mmshift.reading=code is unknown"),
        (["method=full", "methods.full.reading=released"], "has no effect, because full compresses nothing"),
        (["page_size=huge"], "allowed: large, small"),
        (["sharing=of"], "did you mean 'off'"),
        (["stage=generat"], "did you mean 'generate'"),
        (["baseline=nul"], "allowed: full, none"),
        (["retry=[oom,tmeout]"], "did you mean 'timeout'"),
        (["logger=wandb", "logger.mode=onlin"], "did you mean 'online'"),
        (["model.dtype=fp8"], "model.dtype=fp8 is unknown"),
        (["model.attention=paged"], "model.attention=paged is unknown; allowed: eager, flash_attention_2, sdpa"),
        (["model.device=npu"], "model.device=npu is unknown"),
        (["shard=4/4"], "shard=4/4 is not a part of a run"),
        (["limit=0"], "limit=0 is out of range"),
        (["fork_batch=0"], "fork_batch=0 is out of range"),
        (["timeout_s=0"], "timeout_s=0.0 is out of range"),
        (["fork_memory=lots"], "fork_memory=lots is not an amount of memory"),
        (["model.min_pixels=9", "model.max_pixels=3"], "min_pixels <= max_pixels"),
        (["method=[]"], "no method is chosen"),
        (["dataset=[]"], "no dataset is chosen"),
        (["model.path=null"], "needs model.path"),
        (["model.path=/no/such/folder"], "model folder /no/such/folder does not exist"),
        (["model.path=nofolder"], "model folder nofolder does not exist"),
        (["model.path=./a/b"], "model folder ./a/b does not exist"),
        (["out=''"], "out is empty"),
        (["stream.positions=compact"], "is a setting of protocol=stream, but this run has protocol=paper"),
        (
            ["stream.every=4", "protocol=[paper,turns]"],
            "protocol=paper,turns; add protocol=stream, or give stream.every=8",
        ),
        (["stream.ask_at=[1,0.5]"], "stream.ask_at=[1,0.5] is a setting of"),
        (["stream.ask_at=0.5"], "give stream.ask_at=1"),
        (["protocol=stream", "stream.ask_at=[0.5,2]"], "stream.ask_at=2 is beyond the end of the stream"),
        (["protocol=stream", "stream.ask_at=0"], "stream.ask_at=0 is out of range"),
        (["protocol=stream", "stream.ask_at=[]"], "stream.ask_at=[] is an empty list"),
        (
            ["protocol=stream", "stream.ask_at=[1,0.5]", "stream.every=null"],
            "stream.ask_at=[1,0.5] asks after a chunk, but stream.every=null reads all at once",
        ),
    ],
)
def test_a_mistake_is_refused_in_one_sentence_with_what_is_allowed(overrides, words):
    with pytest.raises(ConfigError) as refused:
        check(*overrides)
    sentence = str(refused.value)
    assert words in sentence
    assert "\n" not in sentence
    assert re.search("allowed|did you mean|give|write|name", sentence)
    assert refused.value.exit_code == 2


@pytest.mark.slow
@each(
    "overrides",
    [
        ["budget=[1,64,0.2,20%,1.0]"],
        ["seed=[0,1]", "method=random"],
        ["protocol=[paper,strict,query_agnostic]", "reading=[paper,released]"],
        ["retry=oom"],
        ["retry=[oom,timeout,nan,error]"],
        ["fork_memory=2GiB"],
        ["fork_memory=1000000"],
        ["timeout_s=3"],
        ["protocol=[stream,query_agnostic]", "stream.ask_at=[0.5,1]", "stream.positions=compact"],
        ["experiment=streams", "method=[full,keydiff]"],  # whose file has parameters of methods that are not chosen
        ["shard=3/4", "limit=1", "fork_batch=1"],
        ["model.path=org/name-7b.v1"],
        ["method=[]", "variants.a={base: snapkv, window: 8}"],
    ],
)
def test_what_is_allowed_passes(overrides):
    check(*overrides)


def test_a_folder_is_checked_for_config_and_safe_weights(tmp_path):
    folder = model_folder(tmp_path / "model")
    check(f"model.path={folder}")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        check(f"model.path={folder}")


def test_a_file_is_no_model_folder(tmp_path):
    file = tmp_path / "weights.bin"
    file.write_text("")
    with pytest.raises(ConfigError, match="is a file; allowed: the folder"):
        check(f"model.path={file}")


def test_a_result_folder_that_cannot_be_is_refused(tmp_path):
    file = tmp_path / "taken"
    file.write_text("")
    with pytest.raises(ConfigError, match="is a file; allowed: a folder"):
        check(f"out={file}")
    with pytest.raises(ConfigError, match="taken"):
        check(f"out={file}/below")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_place_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="read-only"):
        check(f"out={tmp_path}/rows")


def test_checking_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check("out=rows/deep/down")
    assert list(tmp_path.iterdir()) == []


@each(
    ("value", "size"),
    [(None, None), (5, 5), ("5", 5), ("1KiB", 1024), ("1.5 MiB", 3 * 2**19), ("2GB", 2 * 10**9), ("2gib", 2**31)],
)
def test_amounts_of_memory_are_read(value, size):
    assert bytes_of(value) == size


@each("value", ["", "GiB", "2 elephants", -1, "0", 0])
def test_what_is_no_amount_of_memory_is_refused(value):
    with pytest.raises(ConfigError, match="fork_memory"):
        bytes_of(value)


def combinations(family, *overrides: str, uncut: tuple[str, ...] = ("textset",)) -> None:
    config = compose([*MODEL, *overrides])
    methods = build_methods(method_entries(config.method_config))
    validate_combinations(config.protocol, family, [method.compressor for method in methods], uncut)


def test_text_models_are_refused_what_needs_visual_tokens():
    with pytest.raises(UnsupportedError, match="Llama.* has none.*datasets.textset.context_key"):
        combinations(TEXT_ONLY, "protocol=[paper,query_agnostic]")
    combinations(TEXT_ONLY, "protocol=[paper,query_agnostic]", uncut=())
    combinations(TEXT_ONLY, "protocol=[paper,strict]", "method=[snapkv,mmshift]")
    combinations(MULTIMODAL, "protocol=query_agnostic")


@pytest.mark.full
def test_methods_that_do_more_than_evict_are_refused_where_kept_entries_are_made_anew():
    for method, why in (("look_m", "merges"), ("kivi", "fewer bits"), ("hybridkv", "off the device")):
        with pytest.raises(UnsupportedError, match=f"protocol=masked.*{method} .*{why}"):
            combinations(MULTIMODAL, "protocol=[strict,masked]", f"method=[snapkv,{method}]")
    combinations(MULTIMODAL, "protocol=[strict,masked]", "method=[snapkv,adakv,local]")


def test_methods_that_need_visual_tokens_are_refused_for_text_models():
    sighted = SimpleNamespace(name="sighted", needs_visual=True, scorer=None, resamples=False)
    config = compose(MODEL)
    with pytest.raises(UnsupportedError, match="method sighted needs visual tokens"):
        validate_combinations(config.protocol, TEXT_ONLY, [sighted], ["docvqa"])
    validate_combinations(config.protocol, MULTIMODAL, [sighted], ["docvqa"])


def test_factors_for_another_number_of_layers_are_refused_before_any_work() -> None:
    words = ["methods.mmshift.expansion=layer", "methods.mmshift.layer_gamma=[2.0,3.0]"]
    config = compose(["method=mmshift", *words])
    methods = [method.compressor for method in build_methods(method_entries(config.method_config))]
    with pytest.raises(ConfigError, match="2 factors, but the model has 4 layers"):
        validate_combinations(config.protocol, MULTIMODAL, methods, [])


def test_what_windows_and_states_cannot_follow_is_refused_before_any_work():
    facts = SimpleNamespace(
        states=States(windows=15, window=511),
        name="Gemma 3 (text)",
        multimodal=False,
        num_layers=3,
        sinks=False,
        rules=SimpleNamespace(name="Gemma 3 (text)"),
    )
    with pytest.raises(UnsupportedError, match="protocol=masked hides evicted tokens .* of Gemma 3"):
        validate_combinations(["paper", "masked"], facts, [full()], [])
    validate_combinations(["paper", "strict"], facts, [full()], [])
    with pytest.raises(UnsupportedError, match="protocol=stream evicts while it prefills, but Gemma 3"):
        validate_stream("eager", [(full(), None)], facts, [])
    measured = {"one": SimpleNamespace(questions_key=None, measures=("ppl",))}
    with pytest.raises(ConfigError, match=r"protocol=stream measures only answers, but one has measures=\[ppl\]"):
        validate_questions(["paper", "stream"], measured, SimpleNamespace(shares_prefill=True, decode="eager"))
    for decode, attention in (("compiled", "sdpa"), ("eager", "flash_attention_2")):
        answering = SimpleNamespace(decode=decode, model=SimpleNamespace(attention=attention))
        with pytest.raises(UnsupportedError, match="keep a window or a recurrent state; allowed for it: decode=eager"):
            validate_decoding(facts, answering)
        validate_decoding(SimpleNamespace(states=NO_STATES, sinks=False), answering)
    with pytest.raises(
        UnsupportedError, match="model.attention=sdpa: .* learned sinks.*allowed for it: model.attention=eager"
    ):
        answering = SimpleNamespace(decode="eager", model=SimpleNamespace(attention="sdpa"))
        validate_decoding(SimpleNamespace(states=NO_STATES, sinks=True, name="gpt-oss (text)"), answering)
