"""`mmkv-bench sweep`: one run per element of comma lists, here, through Hydra's launchers, or as jobs of Slurm."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from mmkv_bench.cli.grammar import Parser, configuration, overrides_of
from mmkv_bench.errors import ConfigError
from mmkv_bench.secrecy import literal_secret

SUMMARY = "one run per element of comma lists (model=tiny,hf seed=0,1), here or as Slurm jobs (launcher=...)"

_SLURM = "SlurmLauncher"


def options(parser: Parser) -> None:
    """Settings of the runs."""
    configuration(parser)
    parser.examples(
        "mmkv-bench sweep method=mmshift seed=0,1,2",
        "mmkv-bench sweep 'method=[full,snapkv]' page_size=small,large out=runs/pages",
        "mmkv-bench sweep launcher=slurm experiment=demo shards=4 hydra.launcher.partition=gpu dry=true",
    )


def answer(given: argparse.Namespace) -> int:
    """Check every job, then run them all; the highest exit code of any."""
    return sweep(overrides_of(given))


def sweep(overrides: Sequence[str]) -> int:
    """The runs of a sweep, by the launcher that they name."""
    from mmkv_bench.config.compose import launcher_of
    from mmkv_bench.run.multirun import checked, multirun

    if (secret := literal_secret(overrides)) is not None:
        raise ConfigError(
            f"{secret} is given as it is, and the jobs of a sweep and their scripts would hold it; name an environment variable: "
            f"'{secret}=${{oc.env:NAME}}'"
        )
    jobs = checked(overrides)
    launcher = launcher_of(jobs[0][0])
    if not str(launcher["_target_"]).endswith(_SLURM):
        for key, given in (("shards", jobs[0][1].shards != 1), ("dry", jobs[0][1].dry)):
            if given:
                raise ConfigError(f"{key} only matters to a sweep on Slurm; add launcher=slurm, or drop it")
        return multirun(overrides, len(jobs))
    from mmkv_bench.slurm import sweep as slurm

    if jobs[0][1].dry:
        from mmkv_bench.cli.tree import reader

        verb, parser = reader("plan")
        for plan in slurm.dry(jobs, launcher):
            print()
            verb.printed(plan, parser.read([]), launcher)
        return 0
    from mmkv_bench.cli.job import Job

    return slurm.sweep(jobs, launcher, Job)
