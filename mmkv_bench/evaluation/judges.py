"""Tasks whose scorer asks a judge model: refused while no judge is configured, for then lmms-eval scores 0."""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from mmkv_bench.errors import ScoringError

if TYPE_CHECKING:
    from lmms_eval.api.task import ConfigurableTask

JUDGE_MODULES = ("lmms_eval.llm_judge", "lmms_eval.verifiers", "openai")
JUDGE_NAMES = {"API_URL", "API_KEY", "OPENAI_API_URL", "OPENAI_API_KEY"}  # of scorers that post requests themselves
CONFIGURED_BY = ("OPENAI_API_KEY", "API_TYPE")


def require_judge(name: str, task: ConfigurableTask) -> None:
    """Raise ScoringError when the task's scorer would ask a judge and none is configured in the environment."""
    if any(variable in os.environ for variable in CONFIGURED_BY):
        return
    scorers = [task.config.process_results, *task.metric_functions.values()]
    if any(asks_judge(scorer) for scorer in scorers if callable(scorer)):
        raise ScoringError(
            f"the scorer of lmms-eval's task {name} asks a judge model, and none is configured: without one its scores "
            "would be 0; set OPENAI_API_KEY (and OPENAI_API_URL for a judge of your own) and run stage=score; the "
            "answers are kept"
        )


def asks_judge(scorer: Callable[..., Any]) -> bool:
    """Whether the function, or one of the task's functions it may call, names a judge's client or address."""
    waiting, seen = [scorer], set()
    while waiting:
        function = waiting.pop()
        while isinstance(function, functools.partial):
            function = function.func
        function = getattr(function, "__func__", function)
        if isinstance(function, type):
            waiting += [member for member in vars(function).values() if isinstance(member, types.FunctionType)]
        if not isinstance(function, types.FunctionType) or function in seen:
            continue
        seen.add(function)
        for used in _global_names(function.__code__):
            value = function.__globals__.get(used)
            if used in JUDGE_NAMES or _of_judge(value):
                return True
            if getattr(value, "__globals__", None) is function.__globals__ or isinstance(value, type):
                waiting.append(value)
            elif type(value).__module__.startswith(("lmms_eval.tasks", function.__module__)):  # made at import
                waiting.append(type(value))
    return False


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


def _of_judge(value: Any) -> bool:
    module = getattr(value, "__module__", None) or getattr(type(value), "__module__", "")
    return str(module).startswith(JUDGE_MODULES)
