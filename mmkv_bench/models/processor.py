"""The processor of a model family from settings alone, for models with random weights: nothing is downloaded.

The classes are the family's own of transformers, so image sizes, tiles, frames and visual tokens are what the
checkpoint makes of an input; only text is tokenized otherwise (models/tokenizer.py). Keys of the settings, all values
as in the files of the checkpoint (`model.processor` in conf/model/*.yaml):

    image           keyword arguments of the image processor, from preprocessor_config.json: Qwen-VL min_pixels,
                    max_pixels, patch_size, merge_size, temporal_patch_size; CLIP and LLaVA size, crop_size,
                    image_grid_pinpoints, ...; InternVL size, crop_to_patches, min_patches, max_patches; also image_mean,
                    image_std, resample. Without keys that name a class (image_processor_type) or the processor.
    video           the same of the video processor, from video_preprocessor_config.json (or preprocessor_config.json
                    where the checkpoint has no other). Sampling belongs to the project (model.frames), so
                    do_sample_frames, fps and num_frames are refused.
    processor       keyword arguments of the processor class, from processor_config.json: LLaVA patch_size,
                    vision_feature_select_strategy, num_additional_image_tokens; LLaVA-OneVision num_image_tokens,
                    vision_aspect_ratio; InternVL image_seq_length.
    tokenizer       bos_token, eos_token, pad_token, unk_token (texts), add_bos_token (Llama, Mistral, Vicuna: true),
                    extra_special_tokens (InternVL: start_image_token, end_image_token, context_image_token, video_token),
                    from tokenizer_config.json.
    special_tokens  {text: id}, from added_tokens.json or tokenizer_config.json's added_tokens_decoder: all markers and
                    role tokens that the template writes and every token that `tokenizer` names.
    template        stem of a file in families/templates: qwen2_vl, qwen3_vl, vicuna, mistral, onevision, internvl, llama3.

A model without images (Llama) has only tokenizer, special_tokens and template; its processor is the tokenizer. The
vocabulary has the size of the config's embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mmkv_bench.families
from mmkv_bench.errors import ConfigError, nearest
from mmkv_bench.families.base import Family
from mmkv_bench.families.facts import text_config
from mmkv_bench.families.registry import family
from mmkv_bench.models.shape import plain
from mmkv_bench.models.tokenizer import build_tokenizer

PARTS = ("image", "video", "processor", "tokenizer", "special_tokens", "template")
SAMPLING = {"do_sample_frames", "fps", "num_frames"}
"""Keys of a video processor that it must not have: frames are sampled by models/video.py."""


def build_processor(hf_config: Any, settings: Mapping[str, Any]) -> Any:
    """The processor of the model that `hf_config` describes.

    Args:
        hf_config: transformers config of the whole model.
        settings: see the module's text.

    Returns:
        The family's processor, or the tokenizer of a text model, with a chat template.

    Raises:
        ConfigError: settings that the family has no use for, that are missing, or whose ids are not the config's.
    """
    import transformers

    settings = {name: value for name, value in settings.items() if value is not None}
    unknown = sorted(set(settings) - set(PARTS))
    if unknown:
        raise ConfigError(f"model.processor.{unknown[0]} is unknown; {nearest(unknown[0], PARTS)}")
    known = family(hf_config.model_type)
    _check_parts(known, settings)
    template = chat_template(settings["template"])
    text = text_config(hf_config)
    tokenizer = build_tokenizer(
        text.vocab_size,
        settings["special_tokens"],
        settings.get("tokenizer", {}),
        template,
        getattr(text, "max_position_embeddings", None),
    )
    if known.image_processor is None:
        return tokenizer
    image, video, combined = (plain(settings.get(part, {})) for part in ("image", "video", "processor"))
    parts = {"image_processor": getattr(transformers, known.image_processor)(**image)}
    if known.video_processor is not None:
        parts["video_processor"] = getattr(transformers, known.video_processor)(**video)
    processor = known.processor_class()(**parts, tokenizer=tokenizer, chat_template=template, **combined)
    _check_ids(hf_config, processor)
    return processor


def chat_template(name: str) -> str:
    """The text of families/templates/<name>.jinja. Raises ConfigError for a name that is not there."""
    folders = [Path(place) / "templates" for place in mmkv_bench.families.__path__]
    templates = {file.stem: file for folder in folders for file in folder.glob("*.jinja")}
    if name not in templates:
        raise ConfigError(f"model.processor.template={name!r} is unknown; {nearest(str(name), templates)}")
    return templates[name].read_text(encoding="utf-8")


def _check_parts(known: Family, settings: Mapping[str, Any]) -> None:
    required = ["template", "special_tokens", *(["image"] if known.image_processor else [])]
    missing = [part for part in required if part not in settings]
    if missing:
        raise ConfigError(
            f"model.processor.{missing[0]} is missing; a random {known.model_type} needs {', '.join(required)}"
        )
    allowed = [part for part in ("image", "video") if part in known.media] + ["processor"] * bool(known.media)
    given = [part for part in ("image", "video", "processor") if part in settings]
    useless = [part for part in given if part not in allowed]
    if useless:
        raise ConfigError(f"model.processor.{useless[0]} has no meaning for a {known.model_type} model; remove it")
    wrong = [part for part in given if not isinstance(settings[part], Mapping)]
    if wrong:
        raise ConfigError(f"model.processor.{wrong[0]} is a mapping of names to values; got {settings[wrong[0]]!r}")
    sampling = sorted(SAMPLING & set(settings.get("video", {})))
    if sampling:
        raise ConfigError(
            f"model.processor.video.{sampling[0]}: frames are sampled by the project; say model.frames=<count>"
        )


def _check_ids(hf_config: Any, processor: Any) -> None:
    """The model replaces the ids of its config by features, so the processor has to write these."""
    for name in ("image_token_id", "video_token_id"):
        expected, written = getattr(hf_config, name, None), getattr(processor, name, None)
        if expected is not None and written is not None and expected != written:
            text = getattr(processor, name.removesuffix("_id"))
            raise ConfigError(
                f"model.processor.special_tokens gives {text!r} the id {written}, and the model's {name} is {expected}; make "
                "the two equal"
            )
