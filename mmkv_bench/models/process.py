"""Settings of this process: what libraries print, and how many threads of a CPU torch computes with.

Dividing the small products of a small model costs more than it saves: the embedded model answers no faster on two cores
than on one, for 1.6 to 1.8 times the processor time. Processes use the cores there (`mmkv-bench launch`).
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mmkv_bench import devices

if TYPE_CHECKING:
    from mmkv_bench.models.load import LoadedModel

SMALL = 50_000_000
"""Parameters below which one thread is chosen."""


def quiet_libraries() -> None:
    """Quieten the Hugging Face libraries, those that are imported already and those that will be."""
    for name, value in (("TOKENIZERS_PARALLELISM", "false"), ("TRANSFORMERS_VERBOSITY", "error")):
        os.environ.setdefault(name, value)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it tells of each try; the last one's error is ours
    if "transformers" in sys.modules:
        quiet_transformers()


def quiet_transformers() -> None:
    """The same of transformers alone, which is imported for it."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def threads_for(loaded: LoadedModel, setting: int | None) -> int:
    """Threads of a run: `model.threads` where it is set, else torch's (`OMP_NUM_THREADS`, or all cores). Without either a small
    model on a CPU gets one."""
    import torch

    if setting is not None:
        return setting
    decided = "OMP_NUM_THREADS" in os.environ or devices.at(loaded.device).kind != "cpu"
    small = sum(parameter.numel() for parameter in loaded.model.parameters()) < SMALL
    return 1 if small and not decided else torch.get_num_threads()


@contextmanager
def computing_with(threads: int) -> Iterator[None]:
    """Set torch's threads inside the block, and restore them for whoever calls a run from Python."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
