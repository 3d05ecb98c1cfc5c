"""Train the embedded model from random weights: `python -m tools.train_tiny.train --out DIR --seed 0 [--resume]`."""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from pathlib import Path

from mmkv_bench.errors import ConfigError, MMKVError

SHOW_EVERY = 25
SAVE_EVERY = 100
LANGUAGE_COST = 12  # vision steps that take as long as one language step, roughly


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.train_tiny.train", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints and the finished model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="bit-identical results need the same number again")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in --out")
    return parser.parse_args(arguments)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def run(out: Path, seed: int, threads: int, resume: bool) -> Path:
    """Train to the end, with checkpoints on the way; returns the finished Hugging Face folder out/model."""
    import torch

    from tools.train_tiny.trainer import Trainer

    torch.set_num_threads(threads)
    trainer = Trainer(seed)
    checkpoints = sorted(out.glob("checkpoint-*"))
    if checkpoints and not resume:
        raise ConfigError(f"{out} already holds {checkpoints[-1].name}; add --resume, or choose another --out")
    if resume:
        if not checkpoints:
            raise ConfigError(f"--resume found no checkpoint in {out}; leave --resume out to start from random weights")
        trainer.load(checkpoints[-1])
    plan, started, first = trainer.plan, time.monotonic(), trainer.progress.step

    def work(step: int) -> int:
        return min(step, plan.vision) + LANGUAGE_COST * max(0, step - plan.vision)

    recent: dict[str, list[float]] = defaultdict(list)
    while not trainer.done:
        for name, value in trainer.step().items():
            recent[name].append(value)
        step, total = trainer.progress.step, plan.steps
        if step % SHOW_EVERY == 0 or trainer.done:
            passed = time.monotonic() - started
            left = passed / (work(step) - work(first)) * (work(total) - work(step))
            means = "  ".join(f"{name} {sum(values) / len(values):.4f}" for name, values in recent.items())
            print(f"step {step}/{total}  {means}  {_clock(passed)}, about {_clock(left)} left", flush=True)
            recent.clear()
        if step % SAVE_EVERY == 0 or step == plan.vision or trainer.done:
            trainer.save(out)
    from tools.train_tiny.folder import write_folder

    return write_folder(trainer.model, out / "model")


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        folder = run(options.out, options.seed, options.threads, options.resume)
    except MMKVError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"finished: {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
