"""Promise: `method(name, ...)` is the compressor of a run with the same settings, though it reads no configuration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mmkv_bench.compression.decoding.kivi import KIVI
from mmkv_bench.compression.selectors.topk import TopK
from mmkv_bench.config.compose import compose, method_defaults
from mmkv_bench.config.files import options
from mmkv_bench.config.schema import READINGS
from mmkv_bench.errors import CompatibilityError, ConfigError
from mmkv_bench.methods.build import build_compressor, identity_form, method, settings
from mmkv_bench.methods.method_file import load
from mmkv_bench.methods.node import parameters_json, under_reading

EXAMPLE = Path(__file__).parents[2] / "examples" / "value_norm.py"
OUTSIDE = ("custom", "kvpress")
"""Methods that cannot be built without an argument: which file, which press."""


def value_norm():
    """The class of examples/value_norm.py."""
    return load(str(EXAMPLE)).classes["scorer"]


@pytest.mark.slow
def test_every_method_is_that_of_a_run_in_both_readings():
    """Of calibrated ones the parts as they are before they have seen a model."""
    names = [name for name in options("method") if name not in OUTSIDE]
    nodes = method_defaults(names)
    assert len(names) > 30
    for name in names:
        for reading in READINGS:
            node = nodes[name]
            of_run, plain = build_compressor(name, node, reading, node), under_reading(name, node, reading, node)
            assert method(name, reading=reading) == of_run, name
            assert settings(name, reading) == plain, name
            assert parameters_json(settings(name, reading)) == parameters_json(plain), name


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("snapkv", {"window": 16}),
        ("adakv", {"alpha": 0, "normalize": True}),
        ("look_m", {"merge": "average", "recent": 0.25}),
        ("kivi", {"bits": 4, "residual": 64}),
        ("hybridkv", {"theta": 0.8, "chunk": 4}),
    ],
)
def test_parameters_are_those_of_an_override(name, given):
    words = [f"methods.{name}.{key}={str(value).lower()}" for key, value in given.items()]
    config = compose([f"method={name}", *words])
    node, default = config.methods[name], method_defaults([name])[name]
    of_run = build_compressor(name, node, "paper", default)
    assert method(name, **given) == of_run != method(name)
    plain = under_reading(name, node, "paper", default)
    assert parameters_json(settings(name, "paper", given)) == parameters_json(plain)
    assert identity_form(settings(name, "paper", given), of_run) == identity_form(plain, of_run)


def test_a_file_of_ones_own_is_the_method_that_a_run_makes_of_it():
    ours = method("custom", path=EXAMPLE, args={"power": 2}, sinks=4, recents=0.25)
    words = [f"methods.custom.path={EXAMPLE}", "methods.custom.args={power: 2}", "methods.custom.sinks=4"]
    words += ["methods.custom.recents=0.25"]
    config = compose(["method=custom", *words])
    assert ours == build_compressor("custom", config.methods["custom"], "paper", method_defaults(["custom"])["custom"])
    assert ours.scorer.power == 2.0 and (ours.selector.sinks, ours.selector.recents) == (4, 0.25)


def test_a_scorer_of_ones_own_gets_what_custom_gives_it():
    scorer = value_norm()
    built, given = method(scorer, power=2.0, sinks=3), method(scorer(2.0), sinks=3)
    assert built == given and built.name == "ValueNormScorer"
    assert built.selector == TopK(sinks=3, recents=1, window=0)
    custom = method("custom", path=EXAMPLE, sinks=3)
    assert (built.allocator, built.selector, built.reducer) == (custom.allocator, custom.selector, custom.reducer)


def test_full_takes_no_parameter():
    assert method("full").is_full
    with pytest.raises(ConfigError, match="full has no parameter 'window'; it takes none"):
        method("full", window=3)


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("snapvk", {}, "unknown method 'snapvk'; did you mean 'snapkv'"),
        ("../snapkv", {}, "unknown method '../snapkv'"),
        ("snapkv", {"windw": 3}, "has no parameter 'windw'; did you mean 'window'"),
        ("snapkv", {"window": "wide"}, "window='wide' has another type than the default 32"),
        ("snapkv", {"window": True}, "window=True has another type"),
        ("keydiff", {"recents": "half"}, "recents='half' has another type than the default 1"),
        ("snapkv", {"scorer": None}, "has no parameter 'scorer'"),
        ("snapkv", {"window": 0}, "window is 0; allowed: 1 or more"),
        ("snapkv", {"reading": "realeased"}, "did you mean 'released'"),
        (
            "snapkv",
            {"reading": "released", "window": 8},
            "has no effect, because reading=released sets window=1",
        ),
        ("custom", {}, "needs a file"),
        (3, {}, "3 is not a method; allowed: a method's name, a Scorer"),
        (TopK, {}, "is not a method"),
        ("scorer", {"powr": 2}, "takes no parameter 'powr'; allowed: recents, sinks, window"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(name, given, words):
    with pytest.raises(ConfigError) as refused:
        method(value_norm() if name == "scorer" else name, **given)
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_parts_that_make_no_sense_together_are_refused():
    with pytest.raises(CompatibilityError, match="reading=released"):
        method("look_m", budget_rule="all_text")
    assert replace(method("snapkv"), decoding=KIVI(bits=2)).quantises


def test_a_file_is_taken_as_a_run_takes_it(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(EXAMPLE.read_text())
    made = method(str(file), power=2, window=4)
    assert made == method(file, power=2, window=4) and made.name == "mine"
    assert (made.scorer, made.selector) == (load(str(file)).classes["scorer"](2.0), TopK(window=4))
    with pytest.raises(ConfigError, match="takes no 'pwoer'; did you mean 'power'"):
        method(str(file), pwoer=2)
    with pytest.raises(ConfigError, match="does not exist"):
        method("nowhere.py")
