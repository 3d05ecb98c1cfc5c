"""Tokenizer, processor and prompts of the reader.

The vocabulary is SmolLM2's 49,152 tokens. Five of its spare special tokens take the names that SmolVLM's processor knows, so no
row of embeddings is added: see `RENAMED`. Pictures are asked about in SmolLM2's own chat template. Videos have the template that
transformers' SmolVLMProcessor puts in place of any other (`<|im_start|>User: <video>..<end_of_utterance>\\nAssistant:`), with its
times of frames at one frame a second. The model always ends an answer with `<|im_end|>`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmkv_bench.reader.documents import FORMS, PATCH, Document, as_text

RENAMED = {
    "<reponame>": "<image>",
    "<file_sep>": "<fake_token_around_image>",
    "<filename>": "<global-img>",
    "<gh_stars>": "<end_of_utterance>",
    "<issue_start>": "<video>",
}
"""Spare special tokens of SmolLM2 (ids 4 to 8) and what they are called here."""
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
"""SmolLM2's chat template, for messages whose content is a text or a list of parts."""
PICTURE = "<fake_token_around_image><global-img><image><fake_token_around_image>"


def tokenizer(gguf: Path) -> Any:
    """Return SmolLM2's tokenizer, read from its GGUF file, with the spare tokens renamed."""
    from transformers import AutoTokenizer

    stock = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    state = json.loads(stock.backend_tokenizer.to_str())
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
    """Return transformers' SmolVLMProcessor for pictures and frames of `side` x `side` pixels; one for each size."""
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


@dataclass(frozen=True)
class Chat:
    """A prompt with its answers, in tokens.

    ids: all tokens; places: for each answer the positions whose hidden states predict it; targets: for each answer the tokens to
    be predicted there, `<|im_end|>` last. In the video's template the token that follows an answer in `ids` is another.
    """

    ids: list[int]
    places: list[list[int]]
    targets: list[list[int]]


def messages(paper: Document, turns: list[tuple[str, str]], text: bool = False) -> list[dict[str, Any]]:
    """Return the chat about a document, in the form that processors take; the last answer is left out.

    Args:
        turns: questions with their answers; text: the document is spelled out instead of shown.
    """
    chat: list[dict[str, Any]] = []
    for place, (question, answer) in enumerate(turns):
        parts = [{"type": "text", "text": question}]
        if place == 0:
            shown = {"type": "video"} if paper.form == "video" else {"type": "image"}
            pictures = [shown] * (1 if paper.form == "video" else len(paper.pages))
            parts[:0] = [{"type": "text", "text": as_text(paper) + "\n\n"}] if text else pictures
        chat += [
            {"role": "user", "content": parts},
            {"role": "assistant", "content": [{"type": "text", "text": answer}]},
        ]
    return chat[:-1]


def chat(words: Any, paper: Document, turns: list[tuple[str, str]], text: bool = False) -> Chat:
    """Return the tokens of a chat, every answer in it: what the stock processor makes of `messages`, and the last answer."""
    video = paper.form == "video" and not text
    ids: list[int] = []
    places: list[list[int]] = []
    targets: list[list[int]] = []
    encode = lambda part: words(part, add_special_tokens=False).input_ids  # noqa: E731
    for turn, (question, answer) in enumerate(turns):
        if video:
            start = "<|im_start|>User: " + video_text(len(paper.pages)) if turn == 0 else "User: "
            before, after, reply = (
                f"{start}{question}<end_of_utterance>\nAssistant:",
                "<end_of_utterance>\n",
                " " + answer,
            )
        else:
            shown = "" if turn else as_text(paper) + "\n\n" if text else PICTURE * len(paper.pages)
            head = "" if turn else f"<|im_start|>system\n{SYSTEM}<|im_end|>\n"
            before = f"{head}<|im_start|>user\n{shown}{question}<|im_end|>\n<|im_start|>assistant\n"
            after, reply = "<|im_end|>\n", answer
        ids += encode(before)
        said = encode(reply)
        first = len(ids) - 1
        ids += said
        places.append(list(range(first, len(ids))))
        targets.append([*said, words.eos_token_id])
        if turn + 1 < len(turns):
            ids += encode(after)
    return _expanded(Chat(ids, places, targets), (FORMS[paper.form][0] // PATCH) ** 2)


def video_text(frames: int) -> str:
    """Return what the processor writes for a video of one frame a second, with one `<image>` a frame."""
    number = {1: "one", 2: "two", 4: "four", 8: "eight"}[frames]
    shown = "".join(f"\nFrame from 00:{place:02d}:{PICTURE}" for place in range(frames))
    return f"You are provided the following series of {number} frames from a 0:00:{frames:02d} [H:MM:SS] video.\n{shown}\n\n"


def _expanded(short: Chat, tokens: int) -> Chat:
    """Repeat each `<image>` as often as a picture has visual tokens."""
    ids: list[int] = []
    moved: list[int] = []
    for token in short.ids:
        moved.append(len(ids) + (tokens - 1 if token == IMAGE_ID else 0))
        ids += [token] * (tokens if token == IMAGE_ID else 1)
    return Chat(ids, [[moved[place] for place in group] for group in short.places], short.targets)
