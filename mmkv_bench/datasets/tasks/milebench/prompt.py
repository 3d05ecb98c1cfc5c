"""The prompt of a MileBench sample: instruction, context with the images in their positions, and choices.

The prompt is the one of the benchmark's code (utils.py of github.com/MileBench/MileBench), with these differences:
- A placeholder {image#3} or {table#3} takes the third image. The benchmark ignores the numbers and takes images in the
  order of the file. In the released files the numbers ascend, so both are the same.
- Nothing is cut off. The benchmark drops text and images from the left, after the instruction, until its estimate of
  the prompt fits the model (LLaVA-1.5: 4096 tokens, 576 per image). Here `model.max_prompt_tokens` refuses the prompt.
- The benchmark's LLaVA worker also puts line breaks between adjacent images; its workers for other models do not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from mmkv_bench.errors import DataError

PLACEHOLDER = re.compile(r"\{(?:image|table)#(\d+)\}")
WITHOUT_LETTERS = "milebench_gpr1200"  # more choices than letters


def letter(index: int) -> str:
    """Return a choice's name: A to Z, then AA to AZ, BA to BZ and so on, like the columns of a spreadsheet."""
    name, rest = "", index + 1
    while rest:
        rest, digit = divmod(rest - 1, 26)
        name = chr(65 + digit) + name
    return name


def text(doc: Mapping[str, Any]) -> str:
    """Return the prompt with its placeholders."""
    return f"{doc['instruction']}\n{doc['context']}{choice_block(doc['task'], doc['choices'])}"


def choice_block(task: str, choices: Sequence[str]) -> str:
    """Return the lines with the choices and the start of the answer; an empty text for open questions."""
    if not choices:
        return ""
    named = [c if task == WITHOUT_LETTERS else f"{letter(i)}. {c}" for i, c in enumerate(choices)]
    return "\n".join(["\nChoice list: ", *named, "Your answer is: "])


def parts(doc: Mapping[str, Any]) -> list[str | int]:
    """Split the prompt into pieces of text and positions of images (from 0), in reading order.

    Raises:
        DataError: a placeholder has no image, or an image has no placeholder or several.
    """
    pieces = PLACEHOLDER.split(text(doc))
    found: list[str | int] = [int(piece) - 1 if i % 2 else piece for i, piece in enumerate(pieces)]
    named = sorted(piece for piece in found if isinstance(piece, int))
    if named != list(range(doc["image_count"])):
        raise DataError(
            f"sample {doc['sample_id']} of {doc['task']} has {doc['image_count']} images and placeholders for images "
            f"{', '.join(str(i + 1) for i in named) or 'none'}; each image needs exactly one placeholder"
        )
    return [piece for piece in found if piece != ""]


def messages(doc: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one user turn that alternates text and images, in the format of lmms-eval's chat tasks."""
    images = doc["images"]
    content = [
        {"type": "image", "url": images[part]} if isinstance(part, int) else {"type": "text", "text": part}
        for part in parts(doc)
    ]
    return [{"role": "user", "content": content}]
