"""The prompt of a MileBench sample: its instruction, its context with the images in their places, its choices.

As the benchmark's own code makes it (utils.py of github.com/MileBench/MileBench), apart from these:
- A placeholder {image#3} or {table#3} takes the third image. The benchmark gives the images in the order of the file,
  whatever the numbers say; where the numbers ascend, as they do, both are the same.
- Nothing is cut off. The benchmark drops text and images from the left, after the instruction, until its estimate of
  the prompt fits the model (LLaVA-1.5: 4096 tokens, 576 an image); here `model.max_prompt_tokens` refuses.
- Its LLaVA worker also puts line breaks between adjacent images; other models' workers do not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from mmkv_bench.errors import DataError

PLACEHOLDER = re.compile(r"\{(?:image|table)#(\d+)\}")
WITHOUT_LETTERS = "milebench_gpr1200"  # more choices than letters


def letter(index: int) -> str:
    """Name of a choice: A to Z, then AA to AZ, BA to BZ and so on, as columns of a spreadsheet are named."""
    name, rest = "", index + 1
    while rest:
        rest, digit = divmod(rest - 1, 26)
        name = chr(65 + digit) + name
    return name


def text(doc: Mapping[str, Any]) -> str:
    """The prompt with its placeholders."""
    return f"{doc['instruction']}\n{doc['context']}{choice_block(doc['task'], doc['choices'])}"


def choice_block(task: str, choices: Sequence[str]) -> str:
    """The choices, a line each, after which the model is to continue; nothing for open questions."""
    if not choices:
        return ""
    named = [c if task == WITHOUT_LETTERS else f"{letter(i)}. {c}" for i, c in enumerate(choices)]
    return "\n".join(["\nChoice list: ", *named, "Your answer is: "])


def parts(doc: Mapping[str, Any]) -> list[str | int]:
    """The prompt as pieces of text and positions of images (from 0), in reading order.

    Raises:
        DataError: a placeholder without an image, or an image that not exactly one placeholder names.
    """
    pieces = PLACEHOLDER.split(text(doc))
    found: list[str | int] = [int(piece) - 1 if i % 2 else piece for i, piece in enumerate(pieces)]
    named = sorted(piece for piece in found if isinstance(piece, int))
    if named != list(range(doc["image_count"])):
        raise DataError(
            f"sample {doc['sample_id']} of {doc['task']} has {doc['image_count']} images and placeholders for images "
            f"{', '.join(str(i + 1) for i in named) or 'none'}; each image has to stand in the text once"
        )
    return [piece for piece in found if piece != ""]


def messages(doc: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One user turn, text and images in turn, in the form lmms-eval's chat tasks use."""
    images = doc["images"]
    content = [
        {"type": "image", "url": images[part]} if isinstance(part, int) else {"type": "text", "text": part}
        for part in parts(doc)
    ]
    return [{"role": "user", "content": content}]
