"""Build the processor of a model with random weights from settings alone; nothing is downloaded.

The classes are those of the family in transformers, so image sizes, tiles, frames and visual tokens equal the
checkpoint's. Only text is tokenized differently. The settings are `model.processor` in conf/model/*.yaml; their
values are those of the checkpoint's files:

    image           keyword arguments of the image processor, from preprocessor_config.json: Qwen-VL min_pixels,
                    max_pixels, patch_size, merge_size, temporal_patch_size; CLIP and LLaVA size, crop_size,
                    image_grid_pinpoints, ...; InternVL size, crop_to_patches, min_patches, max_patches; SmolVLM size,
                    max_image_size; also image_mean, image_std, resample. Keys that name a class
                    (image_processor_type) or the processor are left out.
    video           keyword arguments of the video processor, from video_preprocessor_config.json (or
                    preprocessor_config.json if the checkpoint has no such file). `model.frames` sets the sampling, so
                    do_sample_frames, fps and num_frames are refused.
    processor       keyword arguments of the processor class, from processor_config.json: LLaVA patch_size,
                    vision_feature_select_strategy, num_additional_image_tokens; LLaVA-OneVision num_image_tokens,
                    vision_aspect_ratio; InternVL image_seq_length; SmolVLM image_seq_len.
    tokenizer       bos_token, eos_token, pad_token, unk_token (texts), add_bos_token (Llama, Mistral, Vicuna: true),
                    extra_special_tokens (InternVL: start_image_token, end_image_token, context_image_token, video_token),
                    from tokenizer_config.json.
    special_tokens  {text: id}, from added_tokens.json or tokenizer_config.json's added_tokens_decoder: all markers and
                    role tokens in the template, and every token that `tokenizer` names.
    template        stem of a file in families/templates: qwen2_vl, qwen3_vl, vicuna, mistral, onevision, internvl,
                    smolvlm, llama3.

A model without images (Llama) has only tokenizer, special_tokens and template; its processor is the tokenizer. The
vocabulary has the size of the config's embedding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mmkv_bench.families
from mmkv_bench.errors import ConfigError, nearest
from mmkv_bench.families.base import Family
from mmkv_bench.families.facts import text_config
from mmkv_bench.families.registry import family
from mmkv_bench.models.shape import plain

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


PARTS = ("image", "video", "processor", "tokenizer", "special_tokens", "template")
SAMPLING = {"do_sample_frames", "fps", "num_frames"}
"""Settings that a video processor must not have, because models/video.py samples the frames."""


def build_processor(hf_config: Any, settings: Mapping[str, Any]) -> Any:
    """Build the processor of the model that `hf_config` describes, from settings alone.

    Args:
        hf_config: transformers config of the whole model.
        settings: the keys described in the module's docstring.

    Returns:
        The family's processor, or the tokenizer of a text model, with a chat template.

    Raises:
        ConfigError: a setting is missing, has no use in the family, or contradicts the config; or a package is not installed.
    """
    import transformers

    settings = {name: value for name, value in settings.items() if value is not None}
    unknown = sorted(set(settings) - set(PARTS))
    if unknown:
        raise ConfigError(f"model.processor.{unknown[0]} is unknown; {nearest(unknown[0], PARTS)}")
    kind = family(hf_config.model_type)
    _check_parts(kind, settings)
    template = chat_template(settings["template"])
    text = text_config(hf_config)
    tokenizer = build_tokenizer(
        text.vocab_size,
        settings["special_tokens"],
        settings.get("tokenizer", {}),
        template,
        getattr(text, "max_position_embeddings", None),
    )
    if kind.image_processor is None:
        return tokenizer
    image, video, combined = (plain(settings.get(part, {})) for part in ("image", "video", "processor"))
    parts = {"image_processor": getattr(transformers, kind.image_processor)(**image)}
    if kind.video_processor is not None:
        parts["video_processor"] = getattr(transformers, kind.video_processor)(**video)
    try:
        processor = kind.processor_class()(**parts, tokenizer=tokenizer, chat_template=template, **combined)
    except ImportError as error:  # a package that one family's processor needs; the message names it
        raise ConfigError(str(error)) from error
    _check_ids(hf_config, processor)
    return processor


def chat_template(name: str) -> str:
    """Return the text of families/templates/<name>.jinja. Raises ConfigError for an unknown name."""
    folders = [Path(place) / "templates" for place in mmkv_bench.families.__path__]
    templates = {file.stem: file for folder in folders for file in folder.glob("*.jinja")}
    if name not in templates:
        raise ConfigError(f"model.processor.template={name!r} is unknown; {nearest(str(name), templates)}")
    return templates[name].read_text(encoding="utf-8")


def _check_parts(kind: Family, settings: Mapping[str, Any]) -> None:
    required = ["template", "special_tokens", *(["image"] if kind.image_processor else [])]
    missing = [part for part in required if part not in settings]
    if missing:
        raise ConfigError(
            f"model.processor.{missing[0]} is missing; a random {kind.model_type} model needs {', '.join(required)}"
        )
    allowed = [part for part in ("image", "video") if part in kind.media] + ["processor"] * bool(kind.media)
    stated = [part for part in ("image", "video", "processor") if part in settings]
    ignored_parts = [part for part in stated if part not in allowed]
    if ignored_parts:
        raise ConfigError(f"model.processor.{ignored_parts[0]} has no meaning for a {kind.model_type} model; remove it")
    non_mapping_parts = [part for part in stated if not isinstance(settings[part], Mapping)]
    if non_mapping_parts:
        raise ConfigError(
            f"model.processor.{non_mapping_parts[0]} must be a mapping of names to values; got {settings[non_mapping_parts[0]]!r}"
        )
    sampling = sorted(SAMPLING & set(settings.get("video", {})))
    if sampling:
        raise ConfigError(f"model.processor.video.{sampling[0]} is not allowed; set model.frames=<count> instead")


def _check_ids(hf_config: Any, processor: Any) -> None:
    """Raise ConfigError if the processor's ids of visual tokens differ from the config's."""
    for name in ("image_token_id", "video_token_id"):
        expected, token_ids = getattr(hf_config, name, None), getattr(processor, f"{name}s", None) or [None]
        if expected is not None and token_ids != [None] and expected not in token_ids:
            text = processor.tokenizer.decode(token_ids[:1])
            raise ConfigError(
                f"model.processor.special_tokens gives {text!r} the id {token_ids[0]}, but the model's {name} is {expected}; "
                "make the two equal"
            )


ROLES = ("bos_token", "eos_token", "pad_token", "unk_token")
KEYS = (*ROLES, "add_bos_token", "extra_special_tokens")
BYTES = 256
SCHEME = 1
"""Version of the rules that turn text into ids; part of a random model's fingerprint."""
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"
_SYLLABLES = [c + v for c in _CONSONANTS for v in _VOWELS]


def build_tokenizer(
    vocab_size: int,
    special_tokens: Mapping[str, int],
    settings: Mapping[str, Any],
    chat_template: str,
    model_max_length: int | None = None,
) -> PreTrainedTokenizerFast:
    """Build a fast tokenizer over `vocab_size` ids.

    The first 256 ids without a special token are bytes. Every further id decodes to a made-up word; no text is encoded to it.

    Args:
        vocab_size: rows of the model's embedding.
        special_tokens: text -> id.
        settings: keys of the checkpoint's tokenizer_config.json: `bos_token`, `eos_token`, `pad_token`, `unk_token`,
            `add_bos_token`, and `extra_special_tokens` (names under which a processor looks up special tokens).
        chat_template: Jinja text.
        model_max_length: the context length.

    Raises:
        ConfigError: a setting is unknown, a token has no id, or an id occurs twice or is outside the vocabulary. Tokens of
            `extra_special_tokens` may be outside, because a processor replaces them (InternVL's `<video>`).
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    _check(vocab_size, special_tokens, settings)
    used_ids = set(special_tokens.values())
    unused_ids = [index for index in range(max(vocab_size, max(used_ids, default=0) + 1)) if index not in used_ids]
    # the alphabet of byte-level BPE writes a blank as Ġ
    vocabulary = dict(special_tokens) | dict(zip(sorted(pre_tokenizers.ByteLevel.alphabet()), unused_ids, strict=False))
    vocabulary |= {f"Ġ{word}": index for word, index in zip(words(), unused_ids[BYTES:], strict=False)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special_tokens])
    bos = settings.get("bos_token")
    if bos is not None and settings.get("add_bos_token"):
        tokenizer.post_processor = TemplateProcessing(single=[bos, "$A"], special_tokens=[(bos, special_tokens[bos])])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **{role: settings[role] for role in ROLES if settings.get(role)},
        extra_special_tokens=dict(settings.get("extra_special_tokens") or {}),
        padding_side="left",
        model_max_length=model_max_length,
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


def words() -> Iterator[str]:
    """Yield an endless sequence of different made-up words of two or more syllables."""
    yield from map("".join, product(_SYLLABLES, repeat=2))
    for longer in count(2):  # no longer word begins with the first syllable, as no number begins with 0
        yield from map("".join, product(_SYLLABLES[1:], *[_SYLLABLES] * longer))


def _check(size: int, special_tokens: Mapping[str, int], settings: Mapping[str, Any]) -> None:
    unknown = set(settings) - set(KEYS)
    if unknown:
        raise ConfigError(f"model.processor.tokenizer has no setting {sorted(unknown)}; allowed: {', '.join(KEYS)}")
    ids = list(special_tokens.values())
    replaced = set((settings.get("extra_special_tokens") or {}).values())
    invalid = [
        text
        for text, index in special_tokens.items()
        if index < 0 or ids.count(index) > 1 or (index >= size and text not in replaced)
    ]
    if invalid:
        raise ConfigError(
            f"model.processor.special_tokens gives {invalid} ids outside 0..{size - 1} or an id twice; give each special token "
            "a different id within the vocabulary"
        )
    if size < BYTES + len(ids):
        raise ConfigError(f"a vocabulary of {size} has no room for 256 bytes and {len(ids)} special tokens; enlarge it")
    named = [settings.get(role) for role in ROLES] + list((settings.get("extra_special_tokens") or {}).values())
    texts_without_token = [text for text in named if text and text not in special_tokens]
    if texts_without_token:
        raise ConfigError(
            f"tokens {texts_without_token} of model.processor.tokenizer have no id; add the tokens to special_tokens"
        )
    if settings.get("add_bos_token") and not settings.get("bos_token"):
        raise ConfigError("model.processor.tokenizer.add_bos_token=true needs bos_token")
