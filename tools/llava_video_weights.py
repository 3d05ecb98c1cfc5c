"""Convert a LLaVA-Video checkpoint from its repository's format to that of `mmkv_bench/families/classes/llava_video.py`.

    python -m tools.llava_video_weights <folder> <new folder>
    mmkv-bench model=llava_video_7b model.weights=<new folder>

Weights change their names only; nothing is unpickled and no code of the checkpoint is run.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv_bench.errors import ConfigError, MMKVError
from mmkv_bench.families.tiles import POOLINGS
from mmkv_bench.models.shape import config_of, plain

if TYPE_CHECKING:
    from torch import Tensor

NAMES = (  # their name -> ours, first match
    (r"^model\.vision_tower\.vision_tower\.vision_model\.(.*)$", r"model.vision_tower.\1"),
    (r"^model\.mm_projector\.0\.(.*)$", r"model.multi_modal_projector.linear_1.\1"),
    (r"^model\.mm_projector\.2\.(.*)$", r"model.multi_modal_projector.linear_2.\1"),
    (r"^model\.image_newline$", r"model.image_newline"),
    (r"^model\.((embed_tokens|layers|norm)\..*)$", r"model.language_model.\1"),
    (r"^(lm_head\..*)$", r"\1"),
)
EXPECTED = {  # what their config.json must say for these classes to be the same model
    "mm_projector_type": "mlp2x_gelu",
    "mm_patch_merge_type": "spatial_unpad",
    "mm_spatial_pool_stride": 2,
    "mm_newline_position": "grid",
    "image_aspect_ratio": "anyres_max_9",
    "add_faster_video": False,
}
_TEXT = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
         "vocab_size", "max_position_embeddings", "rms_norm_eps", "hidden_act", "use_sliding_window",
         "bos_token_id", "eos_token_id")  # fmt: skip
_TOKENIZER = ("tokenizer*.json", "vocab.json", "merges.txt", "added_tokens.json", "special_tokens_map.json")
_TOWER = "siglip-so400m-patch14-384"


def rewrite(
    folder: Path, target: Path, shape: Mapping[str, Any], settings: Mapping[str, Any], pooling: str | None = None
) -> None:
    """Write the folder `target`, which `model.weights` accepts.

    Args:
        folder: config.json, *.safetensors and the tokenizer's files, as published.
        shape, settings: values of conf/model/llava_video_7b.yaml that config.json leaves to code (the tower).
        pooling: pooling of frames, `average` or `bilinear`; None: the value in config.json, otherwise the shape's.

    Raises:
        ConfigError: another kind of checkpoint, a weight that the model lacks, or an existing target.
    """
    theirs = _read(folder)
    if target.exists() and any(target.iterdir()):
        raise ConfigError(f"{target} is not empty; name a new folder")
    pooling = pooling or theirs.get("mm_spatial_pool_mode") or shape["video_pooling"]
    if pooling not in POOLINGS:
        raise ConfigError(f"frames pooled by {pooling!r} are not known; allowed: {', '.join(POOLINGS)}; give --pooling")
    settings = plain(settings)
    settings["processor"]["video_pooling"] = pooling
    config = config_of(_shape(theirs, shape) | {"video_pooling": pooling})
    config.architectures = ["LlavaVideoForConditionalGeneration"]
    target.mkdir(parents=True, exist_ok=True)
    _write_weights(folder, target, _expected(config))
    config.save_pretrained(target)
    _processor(folder, config, settings).save_pretrained(target)
    ends = {key: theirs[key] for key in ("bos_token_id", "eos_token_id") if key in theirs}
    (target / "generation_config.json").write_text(json.dumps(ends, indent=2))


def _read(folder: Path) -> dict[str, Any]:
    try:
        theirs = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folder} has no readable config.json; give the folder of a LLaVA-Video checkpoint"
        ) from error
    if theirs.get("architectures") != ["LlavaQwenForCausalLM"]:
        raise ConfigError(
            f"{folder} holds {theirs.get('architectures')}, not LlavaQwenForCausalLM; give the folder of a LLaVA-Video "
            "checkpoint as lmms-lab publishes it"
        )
    for key, value in EXPECTED.items():
        if theirs.get(key, value) != value:
            raise ConfigError(
                f"{folder}: {key} is {theirs[key]!r}, and only {value!r} is known here; it is another model"
            )
    if not str(theirs.get("mm_vision_tower", _TOWER)).endswith(_TOWER):
        raise ConfigError(f"{folder}: its vision tower is {theirs['mm_vision_tower']}, and only {_TOWER} is known here")
    return theirs


def _shape(theirs: Mapping[str, Any], shape: Mapping[str, Any]) -> dict[str, Any]:
    """Return the shape with the checkpoint's text sizes, grid and RoPE base instead of the 7B model's."""
    made = plain(shape)
    made["text_config"] |= {key: theirs[key] for key in _TEXT if key in theirs}
    if "rope_theta" in theirs:
        made["text_config"]["rope_parameters"] = {"rope_type": "default", "rope_theta": theirs["rope_theta"]}
    made["tie_word_embeddings"] = theirs.get("tie_word_embeddings", False)
    if isinstance(theirs.get("image_grid_pinpoints"), list):
        made["image_grid_pinpoints"] = theirs["image_grid_pinpoints"]
    return made


def _expected(config: Any) -> dict[str, Any]:
    """Map each weight's name to its shape in the model that will read the weights."""
    import torch
    from transformers import AutoModelForImageTextToText

    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    names = {name: weight.shape for name, weight in model.state_dict().items()}
    if config.tie_word_embeddings:
        names.pop("lm_head.weight", None)
    return names


def _write_weights(folder: Path, target: Path, expected: Mapping[str, Any]) -> None:
    """Write file by file, so that only one file's weights are in memory."""
    from safetensors.torch import save_file

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder} has no *.safetensors; only safetensors are read, never pickled weights")
    index: dict[str, str] = {}
    size = 0
    for file in files:
        weights = dict(_renamed(file, expected))
        save_file(weights, target / file.name, metadata={"format": "pt"})
        index |= dict.fromkeys(weights, file.name)
        size += sum(weight.nbytes for weight in weights.values())
    missing = sorted(set(expected) - set(index))
    if missing:
        raise ConfigError(f"{folder} lacks {len(missing)} weights, {missing[0]} among them; is it complete?")
    if len(files) > 1:
        document = {"metadata": {"total_size": size}, "weight_map": index}
        (target / "model.safetensors.index.json").write_text(json.dumps(document))


def _renamed(file: Path, expected: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as weights:
        for name in weights.keys():  # noqa: SIM118 (not a dict)
            new = new_name(name)
            weight = weights.get_tensor(name)
            if new is None or new not in expected or weight.shape != expected[new]:
                raise ConfigError(
                    f"{file.name}: weight {name} of shape {list(weight.shape)} has no place in LLaVA-Video; it is another "
                    "model, or of another size than its config.json says"
                )
            yield new, weight


def new_name(name: str) -> str | None:
    """Return a published weight's name in our classes; None if they have no such weight."""
    for pattern, ours in NAMES:
        if re.match(pattern, name):
            return re.sub(pattern, ours, name)
    return None


def _processor(folder: Path, config: Any, settings: Mapping[str, Any]) -> Any:
    """Return our processor with the checkpoint's tokenizer, which has no placeholders yet."""
    from tokenizers import AddedToken
    from transformers import AutoTokenizer

    from mmkv_bench.models.processor import build_processor

    processor = build_processor(config, settings)
    if not any(next(folder.glob(pattern), None) for pattern in _TOKENIZER):
        raise ConfigError(f"{folder} has no tokenizer; give the folder with all published files")
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in ("<image>", "<video>")])
    found = tokenizer.convert_tokens_to_ids(["<image>", "<video>"])
    if found != [config.image_token_id, config.video_token_id]:
        raise ConfigError(
            f"{folder}: its tokenizer gives <image> and <video> the ids {found}, not "
            f"{[config.image_token_id, config.video_token_id]}; it is another checkpoint's"
        )
    tokenizer.padding_side = "left"
    processor.tokenizer = tokenizer
    return processor


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, or an error's own."""
    from omegaconf import OmegaConf

    from mmkv_bench.config.files import conf_dir

    command = argparse.ArgumentParser(prog="python -m tools.llava_video_weights", description=__doc__)
    command.add_argument(
        "folder", type=Path, help="the published files (huggingface-cli download <id> --local-dir ...)"
    )
    command.add_argument("target", type=Path, help="a new folder")
    command.add_argument(
        "--pooling", choices=POOLINGS, help="of frames (default: what the checkpoint's config.json says)"
    )
    asked = command.parse_args(argv)
    described = OmegaConf.load(conf_dir() / "model" / "llava_video_7b.yaml")
    try:
        rewrite(asked.folder, asked.target, described.shape, described.processor, asked.pooling)
    except MMKVError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"wrote {asked.target}; run it with model=llava_video_7b model.weights={asked.target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
