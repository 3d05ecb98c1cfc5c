"""Command lines drawn from a seed: what a user may write, right and wrong.

A case is a drawn run, right by construction, which in every second case gets one mistake. What its parameters may hold only
the method knows: such a case is `open`, and may be run or refused, but either in order.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Literal

from mmkv_bench.config.compose import method_defaults
from mmkv_bench.config.files import options
from mmkv_bench.methods.node import flat_parameters
from tests.fuzz.mistakes import MISTAKES

OUTSIDE = ("custom", "kvpress", "pixels", "cut_prompt")  # they run code from elsewhere, or make prompts of their own
METHODS = tuple(name for name in options("method") if name not in OUTSIDE)
PAGES = tuple(name for name in options("dataset") if name.startswith("pages"))
FIXTURES = ("docvqa", "needle", "milebench_tqa", "chartqa", "longbench_trec", "vstar")


@dataclass(frozen=True)
class Case:
    """One command line. expect: `valid` has to run, `invalid` has to be refused, `open` may do either.

    planned: the model is too large to be run here: the run is planned only.
    """

    arguments: tuple[str, ...]
    expect: Literal["valid", "invalid", "open"]
    planned: bool = False


def draw(seed: int, number: int) -> Case:
    """The case of this number: the same whatever was drawn before."""
    dice = random.Random(f"{seed}/{number}")
    methods = dice.sample(METHODS, dice.choice((1, 1, 2)))
    base = [f"method=[{','.join(methods)}]", f"limit={dice.choice((1, 1, 2))}"]
    base += [text for text in (dice.choice(choices) for choices in _DIMENSIONS) if text]
    if any("," in text for text in base if text.startswith("dataset=")):
        base = [text for text in base if not text.startswith("dataset.")]  # of which of them, it would not say
    if "dataset=pages_questions" in base:  # a limit that ends within a document is refused: four questions each
        base[1] = "limit=4"
    if dice.random() < 0.6:
        return Case((*base, dice.choice(dice.choice(MISTAKES)).replace("<method>", methods[0])), "invalid")
    kind = dice.random()
    if kind < 0.4:
        return Case(tuple(base), "valid")
    if kind < 0.6:
        return Case((*base, *_variant(dice)), "valid")
    if kind < 0.75:
        kept = [text for text in base if not text.startswith("dataset")]
        return Case((*kept, *_elsewhere(dice)), "open", planned=True)
    if kind < 0.85:
        return Case((*base, dice.choice(_ODD)), "open")
    return Case((*base, _parameter(dice, methods)), "open")


# ---------------------------------------------------------------------- right
_DIMENSIONS = (
    ("", "budget=1", "budget=16", "budget=[8,0.2]", "budget=20%", "budget=1.0", "budget=100000", "budget='0.05'",
     "budget=${limit}", "budget=[64,'64']"),
    ("", *(f"dataset={name}" for name in PAGES), "dataset=[pages_walk,pages_lookup]"),
    ("", "protocol=strict", "protocol=query_agnostic", "protocol=[paper,strict]", "protocol=[paper,paper]"),
    ("", "", "reading=released", "reading=[paper,released]"),
    ("", "", "seed=3", "seed=[0,1]", "seed=${limit}"),
    ("", "", "page_size=large"),
    ("", "", "sharing=off"),
    ("", "", "fidelity=off", "baseline=none", "dataset.measures=[ppl]"),
    ("", "fork_batch=1", "fork_memory=1MiB", "fork_memory=2000000"),
    ("", "", "timeout_s=600", "retry=[oom,nan]", "shard=0/1", "--json", "stage=generate", "logger=none"),
)  # fmt: skip


def _variant(dice: random.Random) -> list[str]:
    """A method under another name, with a parameter that its paper varies."""
    return [
        dice.choice(
            (
                "variants.g3={base: mmshift, gamma: 3}",
                "variants.w8={base: snapkv, window: 8, reading: [paper]}",
                "variants.half={base: adakv, alpha: 0.5, pool: 1}",
                "variants.again={base: snapkv}",
                "'variants.kivi4={base: streamingllm, decoding: {_target_: mmkv_bench.compression.decoding.kivi.KIVI, "
                "bits: 4, group: 4, residual: 8}}'",
                "variants.h={base: h2o, share: 0}",
                "variants.far={base: pyramidkv, beta: 5}",
            )
        ).strip("'")
    ]


def _elsewhere(dice: random.Random) -> list[str]:
    """Other models and tasks, planned only."""
    model = dice.choice([name for name in options("model") if name not in ("hf", "tiny", "llava_video_7b")])
    return [
        f"model={model}",
        "model.weights=random",
        f"model.layers={dice.choice((1, 2, 4))}",
        "data=fixture",
        f"dataset={dice.choice(FIXTURES)}",
    ]


_ODD = (
    "stage=score", "timeout_s=1e-9", "model.max_prompt_tokens=5", "model.dtype=bfloat16", "model.attention=eager",
    "model.min_pixels=1", "model.max_pixels=1", "fork_memory=1", "fork_memory=1e9",
    "dataset.count=1", "dataset.split=dev", "dataset.size=large", "dataset.metrics=[]", "dataset.measures=[ppl,self_rouge]",
    "dataset.generation.temperature=0.5", "dataset.generation.do_sample=true", "dataset.generation.num_beams=4",
    "dataset.generation.max_new_tokens=1", "dataset.generation.max_new_tokens=100000", "dataset.generation.until=['a']",
    "dataset.generation={max_new_tokens: 2}", "dataset.generation.stop_strings=[e]", "dataset.generation.nosuch=1",
    "judge=local", "judge=openai", "gate.expected=0.5", "logger=wandb",
    "model=hf", "model.weights=random", "model.layers=1", "model.name=x y", "model.name=null", "model.device_map=auto",
    "data=fixture", "data.root=/no/such/folder", "data.root=.", "dataset.offline=false", "dataset.generation=null",
    "variants.a={base: kvpress, press: KnormPress}", "variants.a={base: custom, path: nosuch.py}",
    "variants.a={base: mmshift, samples: 7}", "variants.a={base: sparsemm, calibration: /no/such/file.json}",
    "variants.a={base: hybridkv, chunk: 1000}", "variants.a={base: prefixkv, mode: online}", "variants.x-y.z={base: snapkv}",
    "variants.a={base: random, reading: [paper, released]}", "variants.a={base: oracle, recents: 3}",
    "launcher=slurm", "variants={}", "budget=[1,2,3,4,5,6,7,8]",
    "budget=0.000001", "budget=1e3", "budget=64.0", "judge.cache=x", "judge.key_env=NO_SUCH_VARIABLE", "out=a/b/c", "out=ü",
    "methods.${seed}.x=1", "seed=1_0", "json=true", "retry=[error,error]", "retry=nan", "protocol='[strict]'",
)  # fmt: skip


_VALUES = (0, 1, -1, 2, 0.5, 1.5, 1000000, 1e-9, "null", "auto", "true", "''", "none", "[]", "[1,2]", "${seed}")


def _parameter(dice: random.Random, methods: list[str]) -> str:
    """Any value for a parameter of a method."""
    own = [(name, key) for name in methods for key in _parameters(name)]
    if not own:
        return "budget=7"
    name, key = dice.choice(own)
    default = _parameters(name)[key]
    near = [default * 2, default - 1] if isinstance(default, (int, float)) and not isinstance(default, bool) else []
    return f"methods.{name}.{key}={dice.choice((*_VALUES, *near))}"


def _parameters(name: str) -> dict[str, Any]:
    return flat_parameters(method_defaults(METHODS)[name])
