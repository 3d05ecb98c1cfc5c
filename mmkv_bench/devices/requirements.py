"""Checks of what a run needs on this machine: a GPU if the process was given one, a C++ compiler, flash-attn."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec

from mmkv_bench import devices
from mmkv_bench.errors import ConfigError

COMPILED = "compiled"
FLASH = "flash_attention_2"
_GRANTED_VARIABLES = ("SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE")
_VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
_NO_GPU_VALUES = ("", "0", "-1", "NoDevFiles")
_DEVICE_FILE = re.compile(r"nvidia(\d+|ctl)")


def sign_of_gpu(environment: Mapping[str, str], files: Sequence[str]) -> str | None:
    """Return the evidence (a variable or a file) that this process was given a GPU, or None.

    A hidden device (CUDA_VISIBLE_DEVICES empty or -1) is no evidence, unless Slurm granted one to the job.

    Args:
        environment: the process's variables.
        files: names in `/dev`.
    """
    for name in _GRANTED_VARIABLES:
        value = environment.get(name, "").strip()
        # SLURM_GPUS_ON_NODE is a count; SLURM_JOB_GPUS lists numbers, of which 0 is the first GPU.
        if value not in (("",) if name == "SLURM_JOB_GPUS" else _NO_GPU_VALUES):
            return f"{name}={value}"
    visible_devices = environment.get(_VISIBLE_VARIABLE)
    if visible_devices is not None:
        return None if visible_devices.strip() in ("", "-1", "NoDevFiles") else f"{_VISIBLE_VARIABLE}={visible_devices}"
    device_file = next((name for name in sorted(files) if _DEVICE_FILE.fullmatch(name)), None)
    return None if device_file is None else f"/dev/{device_file}"


def sign_here() -> str | None:
    """Return the evidence that this process was given a GPU (see `sign_of_gpu`), or None."""
    return sign_of_gpu(os.environ, os.listdir("/dev") if sys.platform == "linux" else ())


def check_meant(setting: str) -> None:
    """Refuse `model.device=auto` if the process was given a GPU that torch does not see, instead of running on the CPU.

    setting: value of `model.device`.

    Raises:
        ConfigError: the message states the evidence (`sign_of_gpu`), why torch sees no GPU, and what to do.
    """
    if setting != "auto" or devices.KINDS["cuda"].count():
        return
    if (gpu_evidence := sign_here()) is not None:
        raise ConfigError(
            f"model.device=auto, but torch sees no GPU ({_why()}), although {gpu_evidence} says that this process is "
            "meant to have one; install a torch that fits this node's driver or load the site's module, or write "
            "model.device=cpu to compute on the CPU"
        )


def _why() -> str:
    """Return torch's message about why it sees no CUDA device."""
    import torch

    torch_version = f"torch {torch.__version__}"
    if torch.version.cuda is None and torch.version.hip is None:
        return f"{torch_version} was built without CUDA"
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        return f"{torch_version}: {str(error).strip().partition('. ')[0].splitlines()[0]}"
    return f"{torch_version} counts 0 devices"


def check_compiler() -> None:
    """Raise ConfigError for `decode=compiled` without a C++ compiler, which builds kernels for a CPU and launchers for a GPU."""
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(shlex.split(compiler)[0]) is None:
        raise ConfigError(
            f"decode=compiled needs a C++ compiler, but there is no {compiler}; install one, name one in the "
            "variable CXX, or use decode=eager"
        )


def check_flash_attn() -> None:
    """Raise ConfigError if the package flash-attn is not installed."""
    if find_spec("flash_attn") is None:
        raise ConfigError(
            f"model.attention={FLASH} needs the package flash-attn, which is not installed; allowed without this "
            "package: sdpa, eager; install it on a machine with an NVIDIA GPU (pip install 'mmkv-bench[gpu]'), "
            "or choose model.attention=sdpa"
        )
