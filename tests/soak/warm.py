"""Runs in forks of a process that has imported the libraries, and nothing of mmkv_bench: `python warm.py` answers a line of
JSON (argv, cwd, a file for what it says) with the fork's id, then with how it ended.

Importing torch, transformers and lmms-eval is most of a run of some seconds. A fork begins there and does all else that the
command does: it imports this package anew, plans, loads the model, opens the store. So it shares no cache and no open file of
the store with the run that was killed before it.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys

_LIBRARIES = (
    "pandas",
    "pyarrow.parquet",
    "scipy.stats",
    "hydra",
    "torchvision",
    "torch._dynamo",
    "transformers.masking_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.processing_auto",
    "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl",
    "transformers.models.qwen2_5_vl.processing_qwen2_5_vl",
    "transformers.models.qwen2_vl.image_processing_qwen2_vl",
    "transformers.models.qwen2_vl.video_processing_qwen2_vl",
    "lmms_eval.api.metrics",
)


def run(argv: list[str], cwd: str, said: str) -> None:
    """`python -m mmkv_bench <argv>`, in a fork."""
    file = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(cwd)
    sys.path.insert(0, cwd)
    sys.argv = ["mmkv_bench", *argv]
    runpy.run_module("mmkv_bench", run_name="__main__", alter_sys=True)


def serve() -> None:
    """Until standard input ends, one run at a time."""
    from loguru import logger
    from PIL import ImageFile

    logger.disable("")
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")  # as a run of own data sets them before it imports
    truncated = ImageFile.LOAD_TRUNCATED_IMAGES
    for name in _LIBRARIES:
        importlib.import_module(name)
    ImageFile.LOAD_TRUNCATED_IMAGES = truncated  # as a run restores it after lmms-eval
    assert not [name for name in sys.modules if name.startswith("mmkv_bench")], "a fork imports all of it anew"
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            out.close()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            run(**json.loads(line))
            sys.exit(0)
        print(child, file=out, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=out, flush=True)


if __name__ == "__main__":
    serve()
