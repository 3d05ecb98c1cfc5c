"""Promise: flags of other programs are answered with the settings that they are, never with a choice that there is not."""

from __future__ import annotations

import pytest

from mmkv_bench.cli.main import main
from mmkv_bench.config.files import conf_dir

ROWS = conf_dir().parent / "results" / "tiny" / "large"
LINES = {
    "run --method FastV --limit 5": ["unknown method 'FastV'", "`mmkv-bench run method=<method> limit=5`"],
    "--tasks list": ["unknown dataset 'list'; `mmkv-bench data list`"],
    "--data docvqa chartqa --verbose": ["leave it out", "`mmkv-bench run 'dataset=[docvqa,chartqa]'`"],
    "run --method snapkv --budget 64 --resume": ["leave it out", "`mmkv-bench run method=snapkv budget=64`"],
    "run --method VL-Cache --retention 0.1 --task docvqa": [
        "write `budget=10%`",
        "unknown method 'VL-Cache'",
        "The other words are written `mmkv-bench run method=<method> dataset=docvqa`",
    ],
    "run --method snapkv --bs 4": ["`fork_batch=4`", "The other words are written `mmkv-bench run method=snapkv`"],
    "sweep --methods snapkv,h2o --ratios 0.1,0.2": ["`budget=[10%,20%]`", "`mmkv-bench sweep 'method=[snapkv,h2o]'`"],
    "plan --methods snapkv --context 32k": ["lengths=[32768]", "`mmkv-bench plan method=snapkv`"],
    "submit --slurm --time 02:00:00 --method snapkv": [
        "`hydra.launcher.timeout_min=120`",
        "`mmkv-bench sweep launcher=slurm method=snapkv`",
    ],
    "memory --model tiny --batch 16": ["`mmkv-bench plan scenario=efficiency model=tiny batch=16`"],
    "latency model=tiny method=snapvk": [
        "did you mean 'snapkv'? write `mmkv-bench plan scenario=efficiency model=tiny method=<method>`"
    ],
    "memory methods=full,snapkv": ["`mmkv-bench plan scenario=efficiency 'method=[full,snapkv]'`"],
    "submit method=snapkv,h2o": ["`mmkv-bench sweep launcher=slurm method=snapkv,h2o`"],
    "run --task pages_walk_larg": ["write `dataset=pages_walk page_size=large`"],
    "--press snapkv --ratio 0.5 --portion 0.1": [
        "unknown flag '--portion'",
        "The other words are written `mmkv-bench run method=snapkv`",
    ],
    "run method=snapkv --portion 0.1": ["unknown flag '--portion'"],
    "--method snapkv --budget": ["--budget has no value; write `budget=<value>`"],
    "reproduce 4141fc34": ["`mmkv-bench verify <rows> 4141fc34`", "`mmkv-bench show <rows> 4141fc34`"],
    "show bf826f19": ["is a cell, and not a folder of result rows; name it behind the folder of its rows"],
    f"tables {ROWS} --csv": ["write `--format csv`"],
    f"tables {ROWS} --alpha 0.01": ["the level is always .05"],
    "--config-name mine method=snapkv": ["<folder>/experiment/<name>.yaml"],
    "run --method snapkv --budget 64": ["'--method' is not written so; write `mmkv-bench run method=snapkv budget=64`"],
}


@pytest.mark.slow
def test_each_line_is_answered_with_what_to_type(capsys):
    for line, parts in LINES.items():
        assert main(line.split()) == 2, line
        error = capsys.readouterr().err
        assert all(part in error for part in parts) and error.count("\n") == 1, (line, error)
