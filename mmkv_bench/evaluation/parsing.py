"""Answers in which a scorer finds none of the choices: some scorers then draw a choice at random, others give 0.

A model whose answers are ruined would be lifted to chance by the draw, so we count such samples (`parse_failed`, 0 or 1)
and score them 0; lmms-eval's own aggregate keeps its draws. Whether a scorer drew is seen from outside, whatever task it
belongs to: Python's and numpy's generators are set before each sample; if the scorer moved one of them and gives something
else for the same answer when they are set otherwise, its score is a guess. A scorer that uses random numbers for something
that does not change its result does not guess.
"""

from __future__ import annotations

import functools
import hashlib
import random
import re
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

PARSE_FAILED = "parse_failed"
# With five choices a guess that the result shows only as right or wrong stays the same 64 times with p = 0.8^64 = 6e-7.
TRIES = 64

# Metrics whose values tell what was read, and when that is nothing.
UNREAD: dict[str, Callable[[Any], bool]] = {
    "vstar_overall_acc": lambda value: value["prediction"] is None,
    "videomme_perception_score": lambda value: value["pred_answer"] == "",
    "muirbench_score_overall": lambda value: not re.fullmatch(r"[A-Za-z]", value["pred"].strip()),
}

# Metric -> the column of the right choice and its possible keys, where a value tells only whether it was met: an answer
# that is right under no key was not read. HR-Bench's `average`, whose values have a cycle_category.
KEYED = {"average": ("answer", "ABCD")}


def seed(identity: str) -> None:
    """Set Python's and numpy's generators to a state that depends on `identity` alone."""
    import numpy as np

    value = int.from_bytes(hashlib.sha256(identity.encode()).digest()[:4], "big")
    random.seed(value)
    np.random.seed(value)


@functools.cache
def untouched(identity: str) -> tuple[int, bytes]:
    """What `drawn` gives right after `seed(identity)`."""
    seed(identity)
    return drawn()


def drawn() -> tuple[int, bytes]:
    """The next 64 bits of both generators. They are others where something was drawn since they were set (but for one
    chance in 2^64); comparing whole states would cost more than most scorers."""
    import numpy as np

    return random.getrandbits(64), np.random.bytes(8)


@contextmanager
def state_kept() -> Iterator[None]:
    """Both generators are afterwards as they were before."""
    import numpy as np

    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def guessed(identity: str, metrics: Mapping[str, Any], again: Callable[[], Mapping[str, Any]]) -> bool:
    """Whether the scorer's result depends on the state of the generators. Ask only when it moved one of them.

    metrics: what it returned; again: scores the same answer once more, from the same document.
    """
    first = repr(metrics)
    for number in range(TRIES):
        seed(f"{identity}/{number}")
        if repr(again()) != first:
            return True
    return False


def unread(metrics: Mapping[str, Any]) -> bool:
    """Whether a value says itself that no choice was found."""
    return any(UNREAD[name](value) for name, value in metrics.items() if name in UNREAD)


def right_under_no_key(metrics: Mapping[str, Any], again: Callable[[dict[str, str]], Mapping[str, Any]]) -> bool:
    """Whether an answer would be wrong whichever choice were the right one, for metrics that tell no more.

    again: scores the same answer once more, with columns of the document replaced.
    """
    for name in filter(lambda name: _keyed(metrics, name), KEYED):
        column, keys = KEYED[name]
        if not metrics[name]["gpt_score"] and not any(again({column: key})[name]["gpt_score"] for key in keys):
            return True
    return False


def _keyed(metrics: Mapping[str, Any], name: str) -> bool:
    value = metrics.get(name)
    return isinstance(value, Mapping) and "cycle_category" in value


def tells_right_only(metrics: Mapping[str, Any]) -> bool:
    """Whether there is a metric of `KEYED` among a sample's."""
    return any(_keyed(metrics, name) for name in KEYED)


def reads_choices(metrics: Mapping[str, Any]) -> bool:
    """Whether the task's metrics tell what was read: then, as where its scorer can draw, every sample gets a
    `parse_failed`."""
    return any(name in UNREAD for name in metrics)


def may_draw(scorer: Any) -> bool:
    """Whether the function, or one of lmms-eval's task functions that it may call, names a random generator."""
    import numpy as np

    waiting, seen = [scorer], set()
    while waiting:
        function = waiting.pop()
        while isinstance(function, functools.partial):
            function = function.func
        function = getattr(function, "__func__", function)
        if not isinstance(function, types.FunctionType) or function in seen:
            continue
        seen.add(function)
        names = set(_names(function.__code__))
        for value in (function.__globals__.get(name) for name in names):
            if value in (random, np.random) or getattr(value, "__self__", None) is random._inst:
                return True
            if value is np and "random" in names:
                return True
            near = getattr(value, "__globals__", None) is function.__globals__
            if near or str(getattr(value, "__module__", "")).startswith("lmms_eval.tasks"):
                waiting.append(value)
    return False


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
