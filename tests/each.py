"""Many small cases as one test: `@each("name", NAMES)` where `@pytest.mark.parametrize` would make a test of every name.

A test costs some milliseconds before its first line and some in every worker that collects it; a case here costs nothing.
All cases run, whichever fails, and each failure is shown with its values. A case that is long, or that is worth running
alone, stays a test of its own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import pytest


def each(names: str | Sequence[str], cases: Iterable[Any], keep: int | None = None) -> Callable[[Callable], Callable]:
    """One test of all cases. Arguments as of `pytest.mark.parametrize`; decorators may stand on each other. keep: so many of
    them, spread evenly, in `make test`, and all in `make test-full`.

    Every case has `monkeypatch` for itself, an empty `tmp_path`, and in `capsys` only what it printed.
    """
    keys = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    cases = list(cases)
    assert cases, f"no cases for {names}"

    def decorated(test: Callable) -> Callable:
        @functools.wraps(test)
        def all_cases(*, cases_of_each: list[Any] = cases, **fixtures: Any) -> None:
            failed, skipped = [], []
            for number, case in enumerate(cases_of_each):
                values = dict(zip(keys, case if len(keys) > 1 else [case], strict=True))
                try:
                    with ExitStack() as stack:
                        test(**values, **_own(fixtures, number, stack))
                except pytest.skip.Exception as skip:
                    skipped.append(f"{values}: {skip.msg}")
                except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001 - raised below, all together
                    error.add_note(f"case {number} of {test.__name__}: {values}")
                    failed.append(error)
            if failed:
                raise BaseExceptionGroup(f"{len(failed)} of {len(cases_of_each)} cases of {test.__name__} fail", failed)
            if skipped:
                pytest.skip(f"{len(skipped)} of {len(cases_of_each)} cases, the others pass: {'; '.join(skipped)}")

        wanted = inspect.signature(test)
        assert set(keys) <= set(wanted.parameters), f"{test.__name__} takes no {set(keys) - set(wanted.parameters)}"
        left = [parameter for name, parameter in wanted.parameters.items() if name not in keys]
        if keep is None:
            all_cases.__signature__ = wanted.replace(parameters=left)
            return all_cases
        cases_of_each = inspect.Parameter("cases_of_each", inspect.Parameter.KEYWORD_ONLY)
        all_cases.__signature__ = wanted.replace(parameters=[*left, cases_of_each])
        some = [cases[i * len(cases) // keep] for i in range(keep)]
        whole = pytest.param(cases, id="whole", marks=pytest.mark.full)
        return pytest.mark.parametrize("cases_of_each", [pytest.param(some, id="some"), whole])(all_cases)

    return decorated


def _own(fixtures: dict[str, Any], number: int, stack: ExitStack) -> dict[str, Any]:
    """The fixtures of one case: what pytest makes anew for each test is made anew for each case."""
    own = dict(fixtures)
    if "monkeypatch" in own:
        own["monkeypatch"] = stack.enter_context(own["monkeypatch"].context())
    if "tmp_path" in own:
        own["tmp_path"] = own["tmp_path"] / f"case{number}"
        own["tmp_path"].mkdir()
    if "capsys" in own:
        own["capsys"].readouterr()
    return own
