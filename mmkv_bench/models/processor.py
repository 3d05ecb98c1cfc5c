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
    template        stem of a file in models/templates: qwen2_vl, qwen3_vl, vicuna, mistral, onevision, internvl, llama3.

A model without images (Llama) has only tokenizer, special_tokens and template; its processor is the tokenizer. The
vocabulary has the size of the config's embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Any, NamedTuple

from mmkv_bench.errors import ConfigError, nearest
from mmkv_bench.models.families import text_config
from mmkv_bench.models.tokenizer import build_tokenizer

PARTS = ("image", "video", "processor", "tokenizer", "special_tokens", "template")
OURS = {"do_sample_frames", "fps", "num_frames"}  # frames are sampled by models/video.py


class Classes(NamedTuple):
    """Names of transformers classes; video is None where a family takes no videos."""

    processor: str
    image: str
    video: str | None = None


CLASSES = {
    "qwen2_vl": Classes("Qwen2VLProcessor", "Qwen2VLImageProcessor", "Qwen2VLVideoProcessor"),
    "qwen2_5_vl": Classes("Qwen2_5_VLProcessor", "Qwen2VLImageProcessor", "Qwen2VLVideoProcessor"),
    "qwen3_vl": Classes("Qwen3VLProcessor", "Qwen2VLImageProcessor", "Qwen3VLVideoProcessor"),
    "llava": Classes("LlavaProcessor", "CLIPImageProcessor"),
    "llava_next": Classes("LlavaNextProcessor", "LlavaNextImageProcessor"),
    "llava_next_video": Classes("LlavaNextVideoProcessor", "LlavaNextImageProcessor", "LlavaNextVideoVideoProcessor"),
    "llava_onevision": Classes(
        "LlavaOnevisionProcessor", "LlavaOnevisionImageProcessor", "LlavaOnevisionVideoProcessor"
    ),
    "llava_video": Classes("LlavaVideoProcessor", "LlavaOnevisionImageProcessor", "LlavaOnevisionVideoProcessor"),
    "internvl": Classes("InternVLProcessor", "GotOcr2ImageProcessor", "InternVLVideoProcessor"),
}
"""model_type -> its classes. Text models have none: their processor is the tokenizer."""


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
    classes = CLASSES.get(hf_config.model_type)
    _check_parts(hf_config.model_type, classes, settings)
    template = chat_template(settings["template"])
    text = text_config(hf_config)
    tokenizer = build_tokenizer(
        text.vocab_size,
        settings["special_tokens"],
        settings.get("tokenizer", {}),
        template,
        getattr(text, "max_position_embeddings", None),
    )
    if classes is None:
        return tokenizer
    parts = {"image_processor": getattr(transformers, classes.image)(**_plain(settings["image"]))}
    if classes.video:
        parts["video_processor"] = getattr(transformers, classes.video)(**_plain(settings.get("video", {})))
    processor = _processor_class(classes.processor)(
        **parts, tokenizer=tokenizer, chat_template=template, **_plain(settings.get("processor", {}))
    )
    _check_ids(hf_config, processor)
    return processor


def _processor_class(name: str) -> Any:
    """A class of transformers, or the one of ours (LLaVA-Video)."""
    import transformers

    if hasattr(transformers, name):
        return getattr(transformers, name)
    from mmkv_bench.models import llava_video

    return getattr(llava_video, name)


def chat_template(name: str) -> str:
    """The text of models/templates/<name>.jinja. Raises ConfigError for a name that is not there."""
    folder = files("mmkv_bench.models") / "templates"
    found = {entry.name.removesuffix(".jinja"): entry for entry in folder.iterdir() if entry.name.endswith(".jinja")}
    if name not in found:
        raise ConfigError(f"model.processor.template={name!r} is unknown; {nearest(str(name), found)}")
    return found[name].read_text(encoding="utf-8")


def _check_parts(model_type: str, classes: Classes | None, settings: Mapping[str, Any]) -> None:
    required = ["template", "special_tokens"] + (["image"] if classes else [])
    missing = [part for part in required if part not in settings]
    if missing:
        raise ConfigError(f"model.processor.{missing[0]} is missing; a random {model_type} needs {', '.join(required)}")
    useless = [part for part in ("image", "video", "processor") if part in settings and classes is None]
    if classes is not None and classes.video is None and "video" in settings:
        useless = ["video"]
    if useless:
        raise ConfigError(f"model.processor.{useless[0]} has no meaning for a {model_type} model; remove it")
    ours = sorted(OURS & set(settings.get("video", {})))
    if ours:
        raise ConfigError(
            f"model.processor.video.{ours[0]}: frames are sampled by the project; say model.frames=<count>"
        )


def _check_ids(hf_config: Any, processor: Any) -> None:
    """The model replaces the ids of its config by features, so the processor has to write these."""
    for name in ("image_token_id", "video_token_id"):
        wanted, found = getattr(hf_config, name, None), getattr(processor, name, None)
        if wanted is not None and found is not None and wanted != found:
            text = getattr(processor, name.removesuffix("_id"))
            raise ConfigError(
                f"model.processor.special_tokens gives {text!r} the id {found}, and the model's {name} is {wanted}; make "
                "the two equal"
            )


def _plain(settings: Any) -> dict[str, Any]:
    """Settings of a configuration as dicts and lists that a processor may change and store."""
    if isinstance(settings, Mapping):
        return {str(name): _value(value) for name, value in settings.items()}
    raise ConfigError(f"settings of a processor are a mapping of names to values; got {settings!r}")


def _value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return _plain(value)
    if isinstance(value, str) or not hasattr(value, "__iter__"):
        return value
    return [_value(entry) for entry in value]
