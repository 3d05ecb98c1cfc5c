"""Check a model of conf/model and its family with random weights: `python -m tools.check_model <name>`.

The model has its true widths, two layers, and computes in float32 on the CPU. A check returns what is broken, or None; the first
line of its docstring is the promise.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from PIL import Image

from mmkv_bench.compression.budget import Budget
from mmkv_bench.compression.compressor import full
from mmkv_bench.config.files import MODEL, content, options
from mmkv_bench.config.names import canonical
from mmkv_bench.config.schema import Model
from mmkv_bench.errors import MMKVError, first_line, nearest
from mmkv_bench.families.base import Box
from mmkv_bench.families.facts import text_model
from mmkv_bench.families.registry import family, image_tokens, token_boxes, video_tokens
from mmkv_bench.generation.encode import encode
from mmkv_bench.generation.engine import Engine
from mmkv_bench.generation.result import CellSpec
from mmkv_bench.generation.rules import DecodeRules
from mmkv_bench.generation.unshared_generation import run_alone
from mmkv_bench.methods.build import method
from mmkv_bench.models.load import LoadedModel
from mmkv_bench.models.source import Source
from mmkv_bench.models.video import Frames
from mmkv_bench.protocols import NAMES, WHOLE, protocol

LAYERS, TOKENS, BUDGET = 2, 6, 12
SIZES = ((64, 48), (448, 336), (336, 900), (1200, 800))
"""Width and height of the pictures, in pixels."""
CHANGED = 0.15
"""Share of the picture's sides that a change of it covers."""
METHODS = ("snapkv", "h2o")


@dataclass(frozen=True)
class Checked:
    """A model of conf/model that is checked."""

    name: str

    @cached_property
    def node(self) -> Model:
        """The settings in the model's file, for two layers of random weights."""
        return Model(
            **content(MODEL, self.name) | {"weights": "random", "layers": LAYERS, "dtype": "float32", "device": "cpu"}
        )

    @cached_property
    def loaded(self) -> LoadedModel:
        """The model. Raises what `Source.load` raises."""
        return Source.of(self.node).load()

    @property
    def model(self) -> Any:
        """The transformers model."""
        return self.loaded.model

    @property
    def settings(self) -> Mapping[str, Any]:
        """The processor's settings in the model's file."""
        assert self.node.processor is not None, "random weights have them"
        return self.node.processor

    @property
    def kind(self) -> str:
        """`model_type` of the family."""
        return str(self.model.config.model_type)

    @property
    def media(self) -> tuple[str, ...]:
        """Media that the model's prompts may contain."""
        return family(self.kind).media

    def prompt(self, pictures: Sequence[Image.Image] = (), clips: Sequence[Frames] = ()) -> Any:
        """Encode a question behind pictures and videos; it may be longer than the model's context."""
        content: Any = [*({"type": "image"} for _ in pictures), *({"type": "video"} for _ in clips)]
        content.append({"type": "text", "text": "Which of these words is written there, and how many times?"})
        messages = [{"role": "user", "content": content}]
        facts = replace(self.loaded.family, max_context=None)
        return encode(self.loaded.processor, facts, "check", messages, list(pictures), list(clips))

    def usual_prompt(self) -> Any:
        """Encode the question after one picture, or alone if the model takes no pictures."""
        return self.prompt([picture(SIZES[1])] if "image" in self.media else [])


def picture(size: tuple[int, int], place: tuple[float, float] | None = None) -> Image.Image:
    """Return a picture of random pixels, the same for the same size; place: where a square of it is black, from top and left."""
    drawn = torch.randint(0, 256, (size[1], size[0], 3), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    if place is not None:
        (top, left), down, across = place, round(CHANGED * size[1]), round(CHANGED * size[0])
        top, left = round(top * size[1]), round(left * size[0])
        drawn[top : top + down, left : left + across] = 0
    return Image.fromarray(drawn.numpy())


def pictures_are_counted(checked: Checked) -> str | None:
    """one or two pictures of any size have as many visual tokens as the family counts"""
    for sizes in (*((size,) for size in SIZES), SIZES[:2], SIZES[2:]):
        prompt = checked.prompt([picture(size) for size in sizes])
        counted = sum(image_tokens(checked.kind, checked.settings, *size, images=len(sizes)) for size in sizes)
        if counted != prompt.visual_tokens:
            return f"pictures of {_words(sizes)}: image_tokens gives {counted}, the processor {prompt.visual_tokens}"
    return None


def videos_are_counted(checked: Checked) -> str | None:
    """a video of 4 or 8 frames has as many visual tokens as the family counts"""
    for frames in (4, 8):
        width, height = SIZES[1]
        pixels = torch.zeros(frames, height, width, 3, dtype=torch.uint8).numpy()
        times = tuple(index / 2 for index in range(frames))
        prompt = checked.prompt(clips=[Frames(pixels, times, tuple(range(frames)), frames, 2.0)])
        counted = video_tokens(checked.kind, checked.settings, frames, width, height)
        if counted != prompt.visual_tokens:
            return f"{frames} frames of {width}x{height}: video_tokens gives {counted}, the processor {prompt.visual_tokens}"
    return None


def visual_tokens_have_places(checked: Checked) -> str | None:
    """every visual token shows a part of its picture, or no place; where the picture changes, that part's token changes most"""
    loaded = checked.loaded
    for size in SIZES:
        prompt = checked.prompt([picture(size)])
        boxes = token_boxes(loaded.model.config, loaded.processor, prompt.inputs, [size], prompt.visual_tokens)
        placed = [box for box in boxes if box is not None]
        if not all(0 <= one.top < one.bottom <= 1 and 0 <= one.left < one.right <= 1 for one in placed):
            return f"a picture of {_words([size])}: a box lies outside of 0 to 1, or is empty"
        if size != SIZES[1]:
            continue
        before = _features(checked, prompt)
        for place in ((0.3, 0.15), (0.3, 0.65), (0.6, 0.4)):  # top and left; not symmetric
            change = (_features(checked, checked.prompt([picture(size, place)])) - before).norm(dim=-1)
            box = max(zip(change.tolist(), boxes, strict=True), key=lambda pair: pair[1] is not None and pair[0])[1]
            if box is None or not _touches(box, place):
                return (
                    f"a picture that changes at {place} from its upper left corner changes most in the token of {box}"
                )
    return None


def _touches(box: Box, place: tuple[float, float]) -> bool:
    """Tell whether a box overlaps or touches the square at `place`, and is not a large part of the picture."""
    (top, left), height, width = place, box.bottom - box.top, box.right - box.left
    down = box.top <= top + CHANGED + height and box.bottom >= top - height
    return bool(height * width < 0.25 and down and box.left <= left + CHANGED + width and box.right >= left - width)


@torch.no_grad()
def _features(checked: Checked, prompt: Any) -> torch.Tensor:
    """Return the inputs of the text model's first layer for all visual tokens, `[visual tokens, width]`."""
    entered: list[torch.Tensor] = []

    def keep(layer: Any, args: Any, kwargs: Any) -> None:
        entered.append(kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])

    handle = text_model(checked.model).layers[0].register_forward_pre_hook(keep, with_kwargs=True)
    try:
        checked.model(**prompt.inputs, use_cache=False)
    finally:
        handle.remove()
    return entered[0][0][prompt.types.flatten() > 0]


def full_is_generate(checked: Checked) -> str | None:
    """the full cache answers as stock generate() does, and prompt tokens attend to no later ones"""
    loaded, rules, prompt = checked.loaded, _rules(checked), checked.usual_prompt()
    result = run_alone(loaded.model, loaded.family, rules, loaded.tokenizer, prompt, CellSpec("full", full(), None))
    if result.status != "ok":
        return str(result.error)
    length = prompt.inputs["input_ids"].shape[1]
    with torch.inference_mode():
        tokens = checked.model.generate(**prompt.inputs, max_new_tokens=TOKENS, do_sample=False)[0, length:].tolist()
    if tokens[: len(result.token_ids)] != list(result.token_ids):
        return f"generate() gives the tokens {tokens}, the full cache {list(result.token_ids)}"
    return None


def methods_answer_alike(checked: Checked) -> str | None:
    """two methods keep their budget under every protocol, and shared forks answer as runs of their own"""
    loaded, rules, prompt = checked.loaded, _rules(checked), checked.usual_prompt()
    names = NAMES if "image" in checked.media else WHOLE
    names = tuple(name for name in names if not (protocol(name).diagnostic or protocol(name).streams))
    cells = [CellSpec(f"{m} {p}", method(m), Budget.parse(BUDGET), p) for m in METHODS for p in names]
    with Engine(loaded.model, loaded.family, rules, loaded.tokenizer) as engine:
        together = engine.answer(prompt, cells)
    for cell, shared in zip(cells, together, strict=True):
        alone = run_alone(loaded.model, loaded.family, rules, loaded.tokenizer, prompt, cell)
        if "ok" not in (shared.status, alone.status) or shared.status != alone.status:
            return f"{cell.cell}: {shared.error or alone.error}"
        if (shared.token_ids, shared.kept_digest) != (alone.token_ids, alone.kept_digest):
            return f"{cell.cell}: shared {shared.token_ids}, alone {alone.token_ids}"
        if shared.entries_planned != BUDGET * loaded.family.num_layers * loaded.family.num_kv_heads:
            return f"{cell.cell}: {shared.entries_planned} entries are kept of {BUDGET} a KV head"
    return None


def _rules(checked: Checked) -> DecodeRules:
    loaded = checked.loaded
    return DecodeRules.read(loaded.model.generation_config, {"max_new_tokens": TOKENS}, loaded.tokenizer)


def _words(sizes: Sequence[tuple[int, int]]) -> str:
    return " and ".join(f"{width}x{height}" for width, height in sizes)


CHECKS: tuple[Callable[[Checked], str | None], ...] = (
    pictures_are_counted,
    videos_are_counted,
    visual_tokens_have_places,
    full_is_generate,
    methods_answer_alike,
)
NEEDED: dict[Callable[[Checked], str | None], str] = {
    pictures_are_counted: "image",
    visual_tokens_have_places: "image",
    videos_are_counted: "video",
}
"""Check -> the medium that a model has to take for it."""


def main(words: Sequence[str]) -> int:
    """Check all promises of a model. Return 0 if they are kept, 1 if one is broken, 2 for a model that is not available."""
    known = canonical(MODEL, words[0]) if len(words) == 1 else ""
    if known not in options(MODEL):
        print(f"name one model of conf/model; {nearest(known, options(MODEL))}", file=sys.stderr)
        return 2
    checked, broken = Checked(known), 0
    try:
        media = " and ".join(f"{kind}s" for kind in checked.media) or "text"
        print(
            f"{known}: {checked.loaded.family.name}, {LAYERS} layers of random weights, float32, takes {media}",
            flush=True,
        )
    except MMKVError as error:
        print(error, file=sys.stderr)
        return 2
    checks = [check for check in CHECKS if NEEDED.get(check) in (None, *checked.media)]
    for check in checks:
        promise = (check.__doc__ or check.__name__).splitlines()[0]
        try:
            fault = check(checked)
        except Exception as error:  # noqa: BLE001 - whatever the family's code raises is the finding
            fault = first_line(error)
        broken += fault is not None
        print(f"ok      {promise}" if fault is None else f"BROKEN  {promise}: {fault}", flush=True)
    print(f"{len(checks) - broken} of {len(checks)} promises are kept")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
