"""Write the embedded model as an ordinary Hugging Face folder, which the Auto classes load like any hub model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from mmkv_bench.tiny import vocabulary as v

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor

MAX_CELLS = 4096  # per image; larger ones would be scaled down by the image processor
MAX_NEW_TOKENS = 16  # the longest answer of the tasks is 12 characters and the end token

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, per role name and per special token."""
    from tokenizers import Regex, Tokenizer, decoders
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(WordLevel(dict(v.ID), unk_token=v.SPECIAL[v.PAD]))
    tokenizer.pre_tokenizer = Split(Regex("|".join(v.ROLES) + r"|\n|."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    named = {v.PAD, v.IM_END}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=v.SPECIAL[v.IM_END],
        pad_token=v.SPECIAL[v.PAD],
        unk_token=v.SPECIAL[v.PAD],
        extra_special_tokens=[token for index, token in enumerate(v.SPECIAL) if index not in named],
        padding_side="left",
        model_max_length=4096,
        chat_template=CHAT_TEMPLATE,
    )


def make_processor() -> Qwen2_5_VLProcessor:
    """The Qwen2.5-VL processor over the character tokenizer; images keep their size in multiples of 28 px."""
    from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    return Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(min_pixels=28 * 28, max_pixels=28 * 28 * MAX_CELLS),
        tokenizer=make_tokenizer(),
        video_processor=Qwen2VLVideoProcessor(),
        chat_template=CHAT_TEMPLATE,
    )


def write_folder(model: Qwen2_5_VLForConditionalGeneration, folder: Path) -> Path:
    """Write weights (float32 safetensors), configs, tokenizer, processor and chat template; returns the folder.

    Files are written beside it first, so that a reader never sees half a folder; an old one is replaced, its model
    card included (evaluate.py writes the card of these weights).
    """
    from transformers import GenerationConfig

    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.generation_config = GenerationConfig(
        bos_token_id=v.PAD,
        eos_token_id=v.IM_END,
        pad_token_id=v.PAD,
        do_sample=False,
        max_new_tokens=MAX_NEW_TOKENS,
    )
    model.save_pretrained(partial)
    (partial / "model.safetensors").chmod(0o644)
    make_processor().save_pretrained(partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return folder
