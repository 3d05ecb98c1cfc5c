"""`mmkv-bench run` runs one configuration, `sweep` several, `launch` one in several processes; `score` only scores."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from textwrap import indent, wrap
from typing import Any

from mmkv_bench import __version__
from mmkv_bench.cli.grammar import VERBS, overrides_of
from mmkv_bench.cli.single_run import SlurmJob, refuse_keys_of_slurm, run_once
from mmkv_bench.config.files import groups, options
from mmkv_bench.config.schema import SCHEMAS, RunConfig, keys
from mmkv_bench.errors import ConfigError
from mmkv_bench.secrecy import literal_secret

_HYDRA = ("--cfg", "--info", "--package")
"""Hydra's flags that take a word, print and stop."""


def usage() -> str:
    """Return the text of `mmkv-bench run --help`: groups with their options in conf/, keys from the schema, flags, examples."""
    lines = [
        f"mmkv_bench {__version__}: what KV-cache compression costs multimodal models, in counted budgets.",
        "",
        "usage: mmkv-bench [run] [group=choice ...] [key=value ...] [flags]     (or: python -m mmkv_bench ...)",
        "",
        "groups (group=choice, 'group=[a,b]' where several are taken)",
    ]
    stated = VERBS["run"]["help"]
    for group in dict.fromkeys([*stated["groups"], *groups()]):
        lines += [
            f"  {group:<12}{stated['groups'].get(group, '')}",
            indent("\n".join(wrap(", ".join(options(group)), 96)), " " * 14),
        ]
    for name, title in stated["keys"].items():
        lines += ["", title]
        for key, (text, allowed) in keys(SCHEMAS[name]).items():
            words = allowed if isinstance(allowed, str) else " | ".join(allowed)
            lines.append(f"  {key:<18}{text}" + (f" [{words}]" if words else ""))
    return "\n".join([*lines, "", stated["end"]])


def run(given: argparse.Namespace) -> int:
    """Run a configuration. Return 1 if some row is a failure."""
    overrides, values = overrides_of(given), vars(given)
    flags = [word for flag in _HYDRA if values[flag[2:]] for word in (flag, values[flag[2:]])]
    flags += [flag for flag in ("--resolve", "--hydra-help") if values[flag[2:].replace("-", "_")]]
    if flags:
        from mmkv_bench.run.multirun import show

        return show(overrides, flags)
    return run_sweep(overrides) if given.multirun else run_once(overrides)


# ---------------------------------------------------------------------- sweep
def sweep(given: argparse.Namespace) -> int:
    """Check every job, then run all. Return the highest exit code."""
    return run_sweep(overrides_of(given))


def run_sweep(overrides: Sequence[str]) -> int:
    """Run the jobs of a sweep with their launcher."""
    from mmkv_bench.config.compose import launcher_of
    from mmkv_bench.run.multirun import checked, multirun

    if (secret := literal_secret(overrides)) is not None:
        raise ConfigError(
            f"{secret} is given in plain text, which the sweep's jobs and scripts would store; name an "
            f"environment variable instead: '{secret}=${{oc.env:NAME}}'"
        )
    jobs = checked(overrides)
    words, config = jobs[0]
    launcher = launcher_of(words)
    on_slurm = str(launcher["_target_"]).endswith("SlurmLauncher")
    if not on_slurm:
        refuse_keys_of_slurm(config.shards, False, "add launcher=slurm")
    if config.dry:
        return _print_sweep(overrides, jobs, launcher if on_slurm else None)
    if not on_slurm:
        return multirun(overrides, len(jobs))
    from mmkv_bench.slurm.sweep import sweep as submit

    return submit(jobs, launcher, SlurmJob)


def _print_sweep(
    overrides: Sequence[str], jobs: Sequence[tuple[list[str], RunConfig]], launcher: Mapping[str, Any] | None
) -> int:
    """Print the plan of each job and the total number of prefills. If Slurm runs the jobs, print its scripts too. No data set
    is opened."""
    from mmkv_bench.cli.verbs.plan import print_plan
    from mmkv_bench.config.compose import compose, expand_sweep, forked
    from mmkv_bench.forecast.forecast import prefills
    from mmkv_bench.plan.planner import outline
    from mmkv_bench.slurm.sweep import dry
    from mmkv_bench.store.store import Store

    plans = [outline(config) for _, config in jobs] if launcher is None else dry(jobs, launcher)
    for plan in plans:
        print()
        print_plan(plan, launcher)
    counts = [prefills(plan, plan.coverage(Store(plan.out))) for plan in plans]
    print(f"\nprefills   {sum(counts):,} prompts in {len(jobs)} run{'s' * (len(jobs) > 1)}")
    lists = forked(overrides)
    if lists != list(overrides):
        shared = [outline(compose(job)) for job in expand_sweep(lists)]
        count = sum(prefills(plan, plan.coverage(Store(plan.out))) for plan in shared)
        changed = " ".join(shlex.quote(text) for text in lists if text not in overrides)
        print(f"           {count:,} with lists in place of comma lists, whose runs share them: {changed}")
    return 0


# ---------------------------------------------------------------------- launch, score
def launch(given: argparse.Namespace) -> int:
    """Generate in N processes, then score once."""
    from mmkv_bench.run.launch import launch

    for text in given.overrides:
        if text.startswith("processes="):
            raise ConfigError(f"{text} is not a setting but a flag; write --processes {text.partition('=')[2]}")
    return launch(overrides_of(given), given.processes)


def score(given: argparse.Namespace) -> int:
    """Score what is stale and print the tables."""
    overrides = overrides_of(given)
    for text in overrides:
        if text.partition("=")[0].lstrip("+") == "stage" and text.partition("=")[2] != "score":
            raise ConfigError(f"{text}: `score` generates nothing; drop {text}, or use `mmkv-bench run`")
    return run_once([*overrides, "stage=score"])
