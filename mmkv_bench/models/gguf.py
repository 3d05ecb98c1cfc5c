"""Weights in one GGUF file (`model.weights=<file>.gguf`), read and dequantised by transformers."""

from __future__ import annotations

from collections import Counter
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mmkv_bench.errors import ConfigError, UnsupportedError

SUFFIX = ".gguf"


def is_gguf(path: str | Path) -> bool:
    """Return True for a file that is there and is named as a GGUF file."""
    return str(path).endswith(SUFFIX) and Path(path).is_file()


def location(path: str) -> tuple[str, dict[str, Any]]:
    """The folder or hub id that `from_pretrained` gets for a path, and the argument that names a GGUF file in it.

    Raises:
        ConfigError, UnsupportedError: see `tensor_types`.
    """
    if not is_gguf(path):
        return path, {}
    tensor_types(Path(path))
    return str(Path(path).parent), {"gguf_file": Path(path).name}


def tensor_types(file: Path) -> str:
    """Return the types of a GGUF file's tensors with their numbers, most first: `Q4_1 210, F32 61`.

    Raises:
        ConfigError, UnsupportedError: see `_read`.
    """
    return _read(file)[0]


def check_tokenizer(file: Path) -> None:
    """Refuse a GGUF file without a tokenizer. Raises ConfigError, and what `_read` raises."""
    if not _read(file)[1]:
        raise ConfigError(
            f"{file} has no tokenizer; name the folder of one with model.tokenizer=<folder>, or give a GGUF file that has one"
        )


@cache
def _read(file: Path) -> tuple[str, bool]:
    """Return `tensor_types`, and True where the file has a tokenizer; once a process, for its many texts take seconds.

    Raises:
        ConfigError: the package `gguf` is not installed, or a file that cannot be read.
        UnsupportedError: the vision tower of a multimodal model.
    """
    if find_spec("gguf") is None:
        raise ConfigError(f"{file} is a GGUF file and needs the package gguf; run: pip install 'mmkv-bench[gguf]'")
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
        fields = reader.fields
        architecture = fields["general.architecture"].contents()
    except (OSError, ValueError, KeyError, IndexError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{file} is no GGUF file that can be read ({reason}); copy or download it again") from error
    if architecture == "clip":
        raise UnsupportedError(
            f"{file} holds the vision tower of a multimodal model, and only text models are read from GGUF files; give "
            "the model's folder in Hugging Face format"
        )
    types = Counter(tensor.tensor_type.name for tensor in reader.tensors)
    return ", ".join(f"{name} {count}" for name, count in types.most_common()), "tokenizer.ggml.tokens" in fields
