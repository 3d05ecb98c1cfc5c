"""Scorers that ask a judge by an address of their own: refused, for what fails there comes back as score 0."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from mmkv_bench.errors import ScoringError

if TYPE_CHECKING:
    from lmms_eval.api.task import ConfigurableTask

JUDGE_MODULES = ("lmms_eval.llm_judge", "lmms_eval.verifiers", "openai")
ADDRESSES = ("API_URL", "OPENAI_API_URL", "OPENAI_BASE_URL", "BASE_URL", "API_BASE")  # of scorers that post themselves
CLIENTS = ("base_url", "api_url")  # where clients of judges keep theirs


def refuse_other_judges(name: str, task: ConfigurableTask, ours: str) -> None:
    """Raise ScoringError when the task's scorer would ask a judge anywhere but below the address `ours`."""
    scorers = [task.config.process_results, *task.metric_functions.values()]
    for scorer in scorers:
        for address in addresses(scorer) if callable(scorer) else ():
            if not address.startswith(ours):
                raise ScoringError(
                    f"the scorer of lmms-eval's task {name} asks a judge at {address} and takes it from nowhere that can "
                    "be set; its scores would be 0 where that fails; tasks that read OPENAI_API_URL can be judged; the "
                    "answers are kept"
                )


def addresses(scorer: Callable[..., Any]) -> set[str]:
    """Addresses of judges that the function, or one of the task's functions it may call, knows."""
    found: set[str] = set()
    waiting: list[Any] = [scorer]
    seen: set[types.FunctionType] = set()
    while waiting:
        function = waiting.pop()
        while isinstance(function, functools.partial):
            function = function.func
        function = getattr(function, "__func__", function)
        if isinstance(function, type):
            found.update(_texts(vars(function).get(name) for name in ADDRESSES))
            waiting += [member for member in vars(function).values() if isinstance(member, types.FunctionType)]
        if not isinstance(function, types.FunctionType) or function in seen:
            continue
        seen.add(function)
        for used in _global_names(function.__code__):
            value = function.__globals__.get(used)
            if used in ADDRESSES:
                found.update(_texts([value]))
            if _of_judge(value):
                found.update(_texts(str(getattr(value, name, "")) for name in CLIENTS))
            if getattr(value, "__globals__", None) is function.__globals__ or isinstance(value, type):
                waiting.append(value)
            elif type(value).__module__.startswith(("lmms_eval.tasks", function.__module__)):  # made at import
                found.update(_texts(getattr(value, name, None) for name in ADDRESSES))
                waiting.append(type(value))
    return found


def _texts(values: Any) -> Iterator[str]:
    yield from (value for value in values if isinstance(value, str) and value.startswith(("http://", "https://")))


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


def _of_judge(value: Any) -> bool:
    module = getattr(value, "__module__", None) or getattr(type(value), "__module__", "")
    return str(module).startswith(JUDGE_MODULES)
