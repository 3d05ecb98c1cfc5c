"""Tokenizer, processor and prompts of the reader.

The vocabulary is SmolLM2's 49,152 tokens. Five spare special tokens are renamed to the names that SmolVLM's processor expects
(`RENAMED`), so no embedding is added. Prompts with pictures use SmolLM2's chat template. For videos transformers'
SmolVLMProcessor always uses its own template (`<|im_start|>User: <video>..<end_of_utterance>\\nAssistant:`), which states the
times of frames at one frame per second. The model always ends an answer with `<|im_end|>`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mmkv_bench.reader.documents import PATCH

RENAMED = {
    "<reponame>": "<image>",
    "<file_sep>": "<fake_token_around_image>",
    "<filename>": "<global-img>",
    "<gh_stars>": "<end_of_utterance>",
    "<issue_start>": "<video>",
}
"""Spare special tokens of SmolLM2 (ids 4 to 8) -> their new names."""
IMAGE_ID = 4
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    + SYSTEM
    + "<|im_end|>\n' }}{% endif %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ '<image>' }}"
    "{% elif part['type'] == 'video' %}{{ '<video>' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""SmolLM2's chat template, extended to messages whose content is a list of parts."""


def tokenizer(gguf: Path) -> Any:
    """Return SmolLM2's tokenizer from its GGUF file, with its spare special tokens renamed as in `RENAMED`."""
    from transformers import AutoTokenizer

    original_tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    state = json.loads(original_tokenizer.backend_tokenizer.to_str())
    for token in state["added_tokens"]:
        token["content"] = RENAMED.get(token["content"], token["content"])
    state["model"]["vocab"] = {RENAMED.get(token, token): number for token, number in state["model"]["vocab"].items()}
    return tokenizer_from(json.dumps(state))


def tokenizer_from(state: str) -> Any:
    """Return the tokenizer of the text of a tokenizer.json that `tokenizer` made."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    special = {"bos": "<|im_start|>", "eos": "<|im_end|>", "pad": "<|im_end|>", "unk": "<|endoftext|>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(state),
        **{f"{name}_token": token for name, token in special.items()},
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def processor(words: Any, side: int) -> Any:
    """Return transformers' SmolVLMProcessor for pictures and frames of `side` x `side` pixels. words: the tokenizer."""
    from transformers import SmolVLMImageProcessor, SmolVLMProcessor, SmolVLMVideoProcessor

    size = {"longest_edge": side}
    common = {"size": size, "max_image_size": size, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    return SmolVLMProcessor(
        SmolVLMImageProcessor(**common),
        words,
        SmolVLMVideoProcessor(**common, num_frames=8, fps=1),
        image_seq_len=(side // PATCH) ** 2,
        chat_template=TEMPLATE,
    )
