"""What a run may want of this machine beside its devices: a C++ compiler, flash-attn. Asked without torch, so that what is
missing can be said at once."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from importlib.util import find_spec

from mmkv_bench.errors import ConfigError

COMPILED = "compiled"
FLASH = "flash_attention_2"


def check_compiler() -> None:
    """Refuse what would fail at the first compiled step.

    Raises:
        ConfigError: no C++ compiler, which writes the kernels of a CPU and the launchers of a GPU's.
    """
    wanted = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(shlex.split(wanted)[0]) is None:
        raise ConfigError(
            f"decode=compiled needs a C++ compiler, and there is no {wanted}; install one, name one in the variable CXX, or "
            "use decode=eager"
        )


def check_flash_attn() -> None:
    """Raises ConfigError where the package flash-attn is not installed."""
    if find_spec("flash_attn") is None:
        raise ConfigError(
            f"model.attention={FLASH} needs the package flash-attn, which is not installed; allowed without it: sdpa, "
            "eager; install it (pip install 'mmkv-bench[gpu]'), or choose model.attention=sdpa"
        )
