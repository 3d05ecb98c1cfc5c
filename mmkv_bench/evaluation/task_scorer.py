"""The score of one sample from the values of lmms-eval's scorers: a number, or dicts of several shapes.

Some scorers draw a choice at random if they find none in an answer; others give 0. A draw would lift a model with ruined
answers to chance level. So this package marks such samples (`parse_failed`, 0 or 1) and scores them 0; lmms-eval's own
aggregate keeps its draws. Draws are detected from outside, for any task: Python's and numpy's generators are seeded before
each sample. If the scorer used one of them and returns something else for the same answer under other seeds, its score is a
guess. A scorer whose random numbers do not change its result does not guess.

Scorers that ask a judge at their own address are refused, because a failed request would become score 0.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import numbers
import random
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mmkv_bench.errors import ScoringError

if TYPE_CHECKING:
    from lmms_eval.api.task import ConfigurableTask


Aggregation = Callable[..., Any] | None  # None for values that lmms-eval does not list as a metric
Extractor = Callable[[Any, Aggregation], float | None]

# Scores of subsets that lmms-eval's scorer returns although no list of metrics names them.
BESIDE = {"vstar_direct_attributes_acc", "vstar_relative_position_acc"}


def sample_value(metric: str, value: Any, aggregation: Aggregation) -> float | None:
    """Return the sample's score from a scorer's value; None for captions, submissions and other metrics over many
    samples.

    A registered extractor is used first. Otherwise the value itself is the score, or `score` of a dict.
    """
    return EXTRACTORS[metric](value, aggregation) if metric in EXTRACTORS else plain_value(value)


def plain_value(value: Any) -> float | None:
    """Return a number or an array's only element, also from under `score` of a dict; None for anything else."""
    if isinstance(value, Mapping):
        value = value.get("score")
    if isinstance(value, numbers.Real):
        return float(value)
    item_method = getattr(value, "item", None)  # a one-element array or tensor
    return float(item_method()) if item_method is not None and getattr(value, "size", 1) == 1 else None


def aggregate_of_one(value: Any, aggregation: Aggregation) -> float | None:
    """Return the metric's aggregation over this sample alone.

    This is the sample's score if a metric is the mean of right answers and its value contains only prediction and
    answer.
    """
    assert aggregation is not None, "these metrics are in lmms-eval's lists"
    options = {"args": None} if "args" in inspect.signature(aggregation).parameters else {}
    score = aggregation([value], **options)
    return float(score) if isinstance(score, numbers.Real) else None


def worldqa(value: Any, aggregation: Aggregation) -> float | None:
    """Return the score of a value of the metric `gpt_eval`.

    For WorldQA the aggregation computes it, by asking the judge if necessary; other tasks with this metric return a number.
    """
    is_worldqa = isinstance(value, Mapping) and "question_idx" in value
    return aggregate_of_one(value, aggregation) if is_worldqa else plain_value(value)


# Metrics that need their own function, called with a sample's value and the aggregation.
EXTRACTORS: dict[str, Extractor] = {
    # HR-Bench: 1 for the right letter. Its aggregate is the mean over cyclic orders of the choices of their means.
    **dict.fromkeys(("single", "cross", "average"), lambda value, aggregation: float(value["gpt_score"])),
    # NExT-QA, open-ended: threshold 0, which is the aggregated one.
    "WUPS": lambda value, aggregation: float(value["0"]),
    **dict.fromkeys(("mmmu_acc", "muirbench_score_overall", "mirb_score", "lvb_acc"), aggregate_of_one),
    "gpt_eval": worldqa,
    # Letters, compared as SEED-Bench's aggregation does (which also writes a file, so it is not called here).
    **dict.fromkeys(
        ("seed_all", "seed_image", "seed_video"),
        lambda value, aggregation: float(value["pred"].strip().lower() == value["answer"].strip().lower()),
    ),
}


def base_metric(name: str) -> str:
    """Return a metric's name without the filter: `gpt_eval` for `gpt_eval,flexible`."""
    return name.partition(",")[0]


PARSE_FAILED = "parse_failed"
# With five choices, a guess that shows only right or wrong stays the same 64 times with p = 0.8^64 = 6e-7.
TRIES = 64

# Metrics whose values show which choice was read, with a test whether none was read. Every sample then has `parse_failed`.
UNREAD: dict[str, Callable[[Any], bool]] = {
    "vstar_overall_acc": lambda value: value["prediction"] is None,
    "videomme_perception_score": lambda value: value["pred_answer"] == "",
    "muirbench_score_overall": lambda value: not re.fullmatch(r"[A-Za-z]", value["pred"].strip()),
}


def seed(identity: str) -> None:
    """Seed Python's and numpy's random generators from the text `identity`."""
    import numpy as np

    value = int.from_bytes(hashlib.sha256(identity.encode()).digest()[:4], "big")
    random.seed(value)
    np.random.seed(value)


@functools.cache
def untouched(identity: str) -> tuple[int, bytes]:
    """Return the bits that `drawn` returns if nothing was drawn since `seed(identity)`."""
    seed(identity)
    return drawn()


def drawn() -> tuple[int, bytes]:
    """Draw 64 bits from both random generators and return them.

    They differ from `untouched` (except for one chance in 2^64) if a scorer drew anything since the seeding.
    Comparing the generators' whole states would cost more than most scorers.
    """
    import numpy as np

    return random.getrandbits(64), np.random.bytes(8)


@contextmanager
def state_kept() -> Iterator[None]:
    """Context manager that restores the states of both random generators at its end."""
    import numpy as np

    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def guessed(identity: str, metrics: Mapping[str, Any], again: Callable[[], Mapping[str, Any]]) -> bool:
    """Return True if the scorer's result depends on random numbers. Call this only if the scorer drew some.

    identity: text that seeded the generators. metrics: the scorer's result. again: scores the same answer again.
    """
    first_result = repr(metrics)
    for number in range(TRIES):
        seed(f"{identity}/{number}")
        if repr(again()) != first_result:
            return True
    return False


def unread(metrics: Mapping[str, Any]) -> bool:
    """Return True if a metric's value shows that the scorer found no choice in the answer (`UNREAD`)."""
    return any(UNREAD[name](value) for name, value in metrics.items() if name in UNREAD)


def tells_right_only(metrics: Mapping[str, Any]) -> bool:
    """Return True for HR-Bench's metrics (with a cycle_category), which show only whether the right choice was given."""
    value = metrics.get("average")
    return isinstance(value, Mapping) and "cycle_category" in value


def right_under_no_key(metrics: Mapping[str, Any], again: Callable[[dict[str, str]], Mapping[str, Any]]) -> bool:
    """Return True if an answer is wrong whichever choice is declared right, so that the scorer found no choice in it.

    again: scores the same answer again, with columns of the document replaced.
    """
    if metrics["average"]["gpt_score"]:
        return False
    return not any(again({"answer": key})["average"]["gpt_score"] for key in "ABCD")


JUDGE_MODULES = ("lmms_eval.llm_judge", "lmms_eval.verifiers", "openai")
ADDRESSES = ("API_URL", "OPENAI_API_URL", "OPENAI_BASE_URL", "BASE_URL", "API_BASE")  # of scorers that send requests
CLIENTS = ("base_url", "api_url")  # attributes of judges' clients


def refuse_other_judges(name: str, task: ConfigurableTask, ours: str) -> None:
    """Check that the task's scorer asks a judge only below the address `ours`.

    Raises:
        ScoringError: it asks elsewhere.
    """
    scorers = [task.config.process_results, *task.metric_functions.values()]
    for scorer in scorers:
        for address in addresses(scorer) if callable(scorer) else ():
            if not address.startswith(ours):
                raise ScoringError(
                    f"the scorer of lmms-eval's task {name} asks a judge at {address}, which no setting changes, "
                    "and a failing judge would give score 0. Choose a task that reads OPENAI_API_URL; the "
                    "answers are kept"
                )


def addresses(scorer: Callable[..., Any]) -> set[str]:
    """Return the judges' addresses in a function's code and in the task's functions that it may call."""
    urls: set[str] = set()

    def visit(function: Any, names: set[str]) -> Iterator[Any]:
        if isinstance(function, type):
            urls.update(_urls(vars(function).get(name) for name in ADDRESSES))
            yield from (member for member in vars(function).values() if isinstance(member, types.FunctionType))
            return
        for name in names:
            value = function.__globals__.get(name)
            if name in ADDRESSES:
                urls.update(_urls([value]))
            module = getattr(value, "__module__", None) or getattr(type(value), "__module__", "")
            if str(module).startswith(JUDGE_MODULES):
                urls.update(_urls(str(getattr(value, each, "")) for each in CLIENTS))
            if _same_module(value, function) or isinstance(value, type):
                yield value
            elif type(value).__module__.startswith(("lmms_eval.tasks", function.__module__)):  # made at import
                urls.update(_urls(getattr(value, each, None) for each in ADDRESSES))
                yield type(value)

    _walk(scorer, visit)
    return urls


def may_draw(scorer: Any) -> bool:
    """Return True if a function, or a function of lmms-eval's tasks that it may call, uses a random generator."""
    import numpy as np

    drawing = False

    def visit(function: Any, names: set[str]) -> Iterator[Any]:
        nonlocal drawing
        for value in (function.__globals__.get(name) for name in names) if not isinstance(function, type) else ():
            drawing |= value in (random, np.random) or getattr(value, "__self__", None) is random._inst
            drawing |= value is np and "random" in names
            if _same_module(value, function) or str(getattr(value, "__module__", "")).startswith("lmms_eval.tasks"):
                yield value

    _walk(scorer, visit)
    return drawing


def _walk(scorer: Any, visit: Callable[[Any, set[str]], Iterable[Any]]) -> None:
    """Call `visit(function, global names in its code)` once for `scorer` and for every function or class that a call
    yields."""
    functions_to_read, visited_functions = [scorer], set()
    while functions_to_read:
        function = functions_to_read.pop()
        while isinstance(function, functools.partial):
            function = function.func
        function = getattr(function, "__func__", function)
        if isinstance(function, types.FunctionType | type) and function not in visited_functions:
            visited_functions.add(function)
            functions_to_read += visit(
                function, set() if isinstance(function, type) else {*_global_names(function.__code__)}
            )


def _same_module(value: Any, function: types.FunctionType) -> bool:
    return getattr(value, "__globals__", None) is function.__globals__


def _urls(values: Iterable[Any]) -> Iterator[str]:
    yield from (value for value in values if isinstance(value, str) and value.startswith(("http://", "https://")))


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)
