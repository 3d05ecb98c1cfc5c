"""Read config and tensor types of a GGUF file (`model.weights=<file>.gguf`), and check for a tokenizer. Nothing is loaded."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mmkv_bench.errors import ConfigError, UnsupportedError
from mmkv_bench.file_state import cache_dir, outlives_the_process, replace_json, state_of


def tensor_types(file: Path) -> str:
    """Return the types of a GGUF file's tensors with their counts, most frequent first: `Q4_1 210, F32 61`.

    Raises ConfigError, UnsupportedError: see `_header`."""
    return str(_header(file)[0])


def check_tokenizer(file: Path) -> None:
    """Raise ConfigError for a GGUF file without a tokenizer; further errors: see `_header`."""
    if not _header(file)[1]:
        raise ConfigError(
            f"{file} has no tokenizer; name a tokenizer's folder with model.tokenizer=<folder>, or give another GGUF file"
        )


def config_values(file: Path) -> dict[str, Any]:
    """Return the keys of config.json that transformers derives from a GGUF file.

    Raises Exception: any error of transformers for an unsupported file."""

    def read() -> dict[str, Any]:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(str(file.parent), trust_remote_code=False, gguf_file=file.name)
        return dict(config.to_dict())

    return dict(_cached(file, f"config {version('transformers')}", read))


def _header(file: Path) -> tuple[str, bool]:
    """Read the header of a GGUF file. Return `tensor_types` of the file, and whether the file has a tokenizer.

    Raises:
        ConfigError: the package `gguf` is not installed, or the file cannot be read.
        UnsupportedError: the file has the vision tower of a multimodal model.
    """
    if find_spec("gguf") is None:
        raise ConfigError(f"{file} is a GGUF file and needs the package gguf; run: pip install 'mmkv-bench[gguf]'")

    def read() -> tuple[str, bool]:
        from gguf import GGUFReader

        try:
            reader = GGUFReader(file)
            architecture = reader.fields["general.architecture"].contents()
        except (OSError, ValueError, KeyError, IndexError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"{file} is not a readable GGUF file ({reason}); copy or download it again") from error
        if architecture == "clip":
            raise UnsupportedError(
                f"{file} has the vision tower of a multimodal model, but only text models are read from GGUF files; give "
                "the model's folder in Hugging Face format"
            )
        counts = Counter(tensor.tensor_type.name for tensor in reader.tensors).most_common()
        return ", ".join(f"{name} {count}" for name, count in counts), "tokenizer.ggml.tokens" in reader.fields

    types, tokenizer = _cached(file, "header", read)
    return types, tokenizer


_here: dict[str, Any] = {}
"""Values that this process has read."""


def _cached(file: Path, kind: str, read: Callable[[], Any]) -> Any:
    """Return the result of `read()`, cached as JSON under the name `kind` until the file changes.

    Raises OSError, and the errors of `read`.
    """
    state = state_of(file)
    key = hashlib.sha256(repr((kind, str(file.resolve()), *state)).encode()).hexdigest()
    memory = cache_dir() / "gguf" / f"{key[:32]}.json"
    if key in _here:
        return _here[key]
    with suppress(OSError, ValueError):
        return _here.setdefault(key, json.loads(memory.read_text()))
    value = _here[key] = read()
    if outlives_the_process(file, state):
        with suppress(OSError):
            replace_json(memory, value)
    return value
