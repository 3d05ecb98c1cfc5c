"""Take the text model out of a Gemma 4 checkpoint, whose pictures and sounds are not supported.

    python -m tools.gemma4_text <folder> <new folder>
    mmkv-bench model=gemma4_e2b model.weights=<new folder>

Weights change their names only; nothing is unpickled and no code of the checkpoint is run.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmkv_bench.errors import ConfigError, MMKVError
from mmkv_bench.models.load import quiet_transformers

THEIRS, OURS = "model.language_model.", "model."
_COPIED = ("tokenizer*.json", "chat_template.jinja", "generation_config.json")


def extract(folder: Path, target: Path) -> None:
    """Write the folder `target`, which `model.weights` accepts.

    Args:
        folder: config.json, *.safetensors and the tokenizer's files, as published.

    Raises:
        ConfigError: another kind of checkpoint, a weight that is missing, or a target that is not empty.
    """
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file

    config = _text_config(folder)
    if target.exists() and any(target.iterdir()):
        raise ConfigError(f"{target} is not empty; name a new folder")
    expected = _expected(config)
    files: dict[Path, dict[str, str]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as weights:
                new = {OURS + name.removeprefix(THEIRS): name for name in weights.keys() if name.startswith(THEIRS)}  # noqa: SIM118 (not a dict)
        except SafetensorError as error:
            raise ConfigError(f"{file} cannot be read ({error}); download it again") from error
        files[file] = {ours: name for ours, name in new.items() if ours in expected}
    missing = sorted(expected.difference(*files.values()))
    if missing:
        raise ConfigError(
            f"{folder} lacks {len(missing)} weights of the text model, {missing[0]} among them; is it complete?"
        )
    target.mkdir(parents=True, exist_ok=True)
    index: dict[str, str] = {}
    for file, names in files.items():
        if names:
            with safe_open(file, framework="pt") as weights:
                kept = {ours: weights.get_tensor(name) for ours, name in names.items()}
            save_file(kept, target / file.name, metadata={"format": "pt"})
            index |= dict.fromkeys(kept, file.name)
    (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config.save_pretrained(target)
    for pattern in _COPIED:
        for file in folder.glob(pattern):
            shutil.copy(file, target)


def _text_config(folder: Path) -> Any:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} has no readable config.json; give the folder of a Gemma 4 checkpoint") from error
    if config.model_type != "gemma4":
        raise ConfigError(f"{folder} has a {config.model_type} model; give the folder of a Gemma 4 checkpoint (gemma4)")
    text = config.text_config
    text.architectures, text.dtype = ["Gemma4ForCausalLM"], text.dtype or config.dtype
    return text


def _expected(config: Any) -> set[str]:
    """Return the names of the text model's weights."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name for name in model.state_dict() if name != "lm_head.weight"}  # the head is the embedding table


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, or an error's own."""
    parser = argparse.ArgumentParser(prog="python -m tools.gemma4_text", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the published files")
    parser.add_argument("target", type=Path, help="a new folder")
    asked = parser.parse_args(argv)
    quiet_transformers()
    try:
        extract(asked.folder, asked.target)
    except MMKVError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"wrote {asked.target}; run it with model.weights={asked.target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
