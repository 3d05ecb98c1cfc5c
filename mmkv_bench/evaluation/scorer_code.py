"""A scorer's code as Python holds it: whether it may draw at random, and where it asks judges.

Scorers that ask a judge by an address of their own are refused, for what fails there comes back as score 0.
"""

from __future__ import annotations

import functools
import random
import types
from collections.abc import Callable, Iterable, Iterator
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
                    f"the scorer of lmms-eval's task {name} asks a judge at {address}, which no setting changes; a judge that "
                    "fails there would score 0. Choose a task that reads OPENAI_API_URL; the answers are kept"
                )


def addresses(scorer: Callable[..., Any]) -> set[str]:
    """Addresses of judges that the function, or one of the task's functions it may call, knows."""
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
            if _of_judge(value):
                urls.update(_urls(str(getattr(value, each, "")) for each in CLIENTS))
            if _same_module(value, function) or isinstance(value, type):
                yield value
            elif type(value).__module__.startswith(("lmms_eval.tasks", function.__module__)):  # made at import
                urls.update(_urls(getattr(value, each, None) for each in ADDRESSES))
                yield type(value)

    _walk(scorer, visit)
    return urls


def may_draw(scorer: Any) -> bool:
    """True where the function, or one of lmms-eval's task functions that it may call, names a random generator."""
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
    """Visit a function with the global names in its code, then the functions and classes that each visit gives."""
    waiting, visited = [scorer], set()
    while waiting:
        function = waiting.pop()
        while isinstance(function, functools.partial):
            function = function.func
        function = getattr(function, "__func__", function)
        if isinstance(function, types.FunctionType | type) and function not in visited:
            visited.add(function)
            waiting += visit(function, set() if isinstance(function, type) else {*_global_names(function.__code__)})


def _same_module(value: Any, function: types.FunctionType) -> bool:
    return getattr(value, "__globals__", None) is function.__globals__


def _urls(values: Iterable[Any]) -> Iterator[str]:
    yield from (value for value in values if isinstance(value, str) and value.startswith(("http://", "https://")))


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


def _of_judge(value: Any) -> bool:
    module = getattr(value, "__module__", None) or getattr(type(value), "__module__", "")
    return str(module).startswith(JUDGE_MODULES)
