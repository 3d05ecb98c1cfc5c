"""One run of one configuration: what `run` does here, and every job of a sweep on its node."""

from __future__ import annotations

from mmkv_bench.cli.guard import closed_output
from mmkv_bench.config.schema import EFFICIENCY
from mmkv_bench.errors import ConfigError, MMKVError


def run_once(overrides: list[str]) -> int:
    """Run one configuration and return its exit code.

    Raises:
        ConfigError: a configuration that cannot run; MMKVError: also an output that was closed before the end.
    """
    from mmkv_bench.run.progress import waiting

    for text in overrides:
        if text.lstrip("+~").startswith("hydra.") and "searchpath" not in text:
            raise ConfigError(f"{text} only matters to the jobs of a multirun; add -m, or leave it out")
    with waiting("reading the configuration"):
        from mmkv_bench.config.compose import compose
        from mmkv_bench.plan.validate import refuse_absent, validate

        config = compose(overrides)
        validate(config)
        refuse_absent(config.answering, config.stage, config.out)
        refuse_keys_of_slurm(config.shards, config.dry, "write mmkv-bench sweep with launcher=slurm")
    with waiting("loading", log=True):  # not before: a mistake in the words above stays one sentence, in logs too
        if config.scenario == EFFICIENCY:
            from mmkv_bench.efficiency.run import run
        else:
            from mmkv_bench.run.run import run
    try:
        return run(config)
    except BrokenPipeError:
        closed_output()
        raise MMKVError(
            "the output was closed before the run's end; run the same command again to continue, with its output to a "
            "file or a terminal"
        ) from None


def refuse_keys_of_slurm(shards: int, dry: bool, remedy: str) -> None:
    """Refuse keys that a run here would ignore."""
    for key, changed in (("shards", shards != 1), ("dry", dry)):
        if changed:
            raise ConfigError(f"{key} only matters to a sweep on Slurm; {remedy}, or drop it")
