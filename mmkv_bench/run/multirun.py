"""`-m`: one run per job of a sweep, through Hydra's launchers (this process, or Slurm); and Hydra's own printing flags.

Every job is composed and checked before the first one starts. Single runs need no launcher and do not use this file.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mmkv_bench.config.compose import completed, compose, expand_sweep, folders, for_hydra
from mmkv_bench.config.files import conf_dir
from mmkv_bench.config.schema import RunConfig
from mmkv_bench.errors import ConfigError, MMKVError
from mmkv_bench.plan.validate import validate

_FAILURES: list[tuple[str, int, str]] = []
"""(job, exit code, message) of the jobs of this process that failed."""

_SWEEPING: set[int] = set()
"""Ids of processes inside `multirun`. A job with another id was started elsewhere by a launcher."""


def multirun(overrides: Sequence[str], jobs: int) -> int:
    """Run the jobs of a checked sweep. A job that fails does not stop the others.

    Returns:
        0, or the highest exit code of any job.

    Raises:
        ConfigError: Hydra refuses the overrides.
    """
    print(f"mmkv_bench: {jobs} jobs; output of jobs elsewhere is kept below <out>/sweep", file=sys.stderr)
    _FAILURES.clear()
    _SWEEPING.add(os.getpid())
    code = hydra_main(["--multirun", *for_hydra(overrides)])
    for name, failed, sentence in _FAILURES:
        print(f"mmkv_bench: job {name} failed with exit code {failed}: {sentence}", file=sys.stderr)
    return max([code, *(failed for _, failed, _ in _FAILURES)])


def checked(overrides: Sequence[str]) -> list[tuple[list[str], RunConfig]]:
    """Return the jobs of a sweep, each with its composed configuration.

    Raises:
        ConfigError: a job that cannot run.
    """
    found, jobs = [], expand_sweep(overrides)
    for job in jobs:
        try:
            config = compose(job)
            validate(config)
        except ConfigError as error:
            raise ConfigError(f"job {' '.join(job) or '(defaults)'} of {len(jobs)}: {error}") from error
        found.append((job, config))
    return found


def show(overrides: Sequence[str], flags: Sequence[str]) -> int:
    """Run Hydra's printing flags (`--cfg job`, `--info`) after a check that the configuration composes."""
    compose(overrides)
    return hydra_main([*flags, *for_hydra(overrides)])


def job(config: Any) -> int:
    """Run one job in the process that the launcher started. If that is the process of the sweep, a failure is kept for its final
    report; otherwise it is raised, and returns through the launcher."""
    from hydra.core.hydra_config import HydraConfig

    from mmkv_bench.run.run import run

    overrides = " ".join(HydraConfig.get().overrides.task) or "(defaults)"
    try:
        code = run(completed(config, folders(HydraConfig.get().overrides.hydra)))
        sentence = "see its messages above"
    except MMKVError as error:
        code, sentence = error.exit_code, str(error)
    if code and os.getpid() not in _SWEEPING:
        raise MMKVError(f"job {overrides} failed with exit code {code}: {sentence}")
    if code:
        _FAILURES.append((overrides, code, sentence))
    return code


def hydra_main(arguments: Sequence[str]) -> int:
    """Call Hydra's entry point with these arguments. Errors are raised as exceptions instead of printed."""
    import hydra
    from hydra.errors import HydraException

    from mmkv_bench.config.source import register

    register()
    entry = hydra.main(config_path=str(conf_dir()), config_name="config", version_base="1.3")(job)
    with _arguments(arguments), _environment("HYDRA_FULL_ERROR", "1"):
        try:
            entry()
        except SystemExit as stop:
            return int(stop.code or 0)
        except HydraException as error:
            raise ConfigError(f"Hydra refuses this multirun: {str(error).strip().splitlines()[0]}") from error
    return 0


@contextmanager
def _arguments(arguments: Sequence[str]) -> Iterator[None]:
    before = sys.argv
    sys.argv = ["mmkv-bench", *arguments]
    try:
        yield
    finally:
        sys.argv = before


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
