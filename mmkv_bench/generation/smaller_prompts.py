"""Make prompts smaller, to fit a model's context or a budget.

A dataset's generation setting `cut_prompt` says how a prompt that exceeds the model's context is cut:

- `middle` follows LongBench (Bai et al. 2023, section 4.1 and pred.py of its code): keep equally many first and last tokens,
  because instructions and questions are at both ends.
- `left` follows MileBench (Song et al. 2024, utils.py of its code): keep the instruction and as many of the last pieces (texts
  and images) as fit; if not even the last piece fits and it is a text, keep the end of this text.

The methods `pixels` and `cut_prompt` are controls: they use the full cache of a smaller prompt in place of a compressed cache.
`pixels` scales image sides or tiles, and the number of video frames; `cut_prompt` cuts text as `middle` does. Bisection over
`LEVELS` sizes finds the largest size whose prompt fits the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mmkv_bench.compression.compressor import full
from mmkv_bench.errors import UnsupportedError
from mmkv_bench.families.facts import ModelFacts
from mmkv_bench.generation.encode import EncodedPrompt, lengths_of, prompt_length
from mmkv_bench.generation.result import CellSpec, ForkResult, fill_asked
from mmkv_bench.protocols import Lengths, protocol

WAYS = (None, "middle", "left")


def check_way(way: Any) -> str | None:
    """Return the value of the setting `cut_prompt`; raise UnsupportedError if the value is not in `WAYS`."""
    if way not in WAYS:
        raise UnsupportedError(
            f"cut_prompt={way!r}; allowed: middle (text), left (text and images), or null to refuse prompts that are too long"
        )
    return way


def prompt_limit(max_prompt_tokens: int | None, max_context: int | None, max_new_tokens: int) -> int | None:
    """Return the lower of the configured limit and the model's context minus the answer, in tokens; None: no limit."""
    limits = [] if max_prompt_tokens is None else [max_prompt_tokens]
    limits += [] if max_context is None else [max_context - max_new_tokens]
    return min(limits, default=None)


def fitted(
    processor: Any,
    messages: Sequence[dict],
    images: Sequence,
    generation: Mapping[str, Any],
    limit: int | None,
    instruction: str = "",
) -> tuple[list[dict], list]:
    """Return the messages and images of a prompt, cut as `generation` requests if it has more than `limit` tokens.

    Args:
        generation: the dataset's generation settings.
        instruction: beginning of the prompt, which `left` keeps.

    Raises:
        UnsupportedError: see `middle` and `cut_from_left`.
    """
    cut_prompt_way = check_way(generation.get("cut_prompt"))
    if cut_prompt_way == "left":
        return cut_from_left(processor, messages, images, instruction, limit)
    return list(messages) if cut_prompt_way is None else middle(processor, messages, limit), list(images)


def middle(processor: Any, messages: Sequence[dict], limit: int | None, least: int = 0) -> list[dict]:
    """Return the messages, without the middle of the text if the rendered prompt has more than `limit` tokens.

    Args:
        least: number of text tokens to keep even if the limit is exceeded.

    Raises:
        UnsupportedError: anything but one message of text, a text with a media marker, or a limit that leaves no text.
    """
    if limit is None:
        return list(messages)
    tokenizer = getattr(processor, "tokenizer", processor)
    pieces = _pieces(
        messages,
        ("text",),
        "cut_prompt=middle cuts one user message of text, but this prompt has media or several turns; use "
        "cut_prompt=left or null",
    )
    length = prompt_length(processor, messages)
    if length <= limit:
        return list(messages)
    ids = tokenizer("".join(piece["text"] for piece in pieces), add_special_tokens=False)["input_ids"]
    half_tokens = max(limit - (length - len(ids)), least) // 2
    while half_tokens > 0:
        ends = (ids[:half_tokens], ids[-half_tokens:])
        kept = "".join(
            tokenizer.decode(end, skip_special_tokens=True, clean_up_tokenization_spaces=False) for end in ends
        )
        cut = [{"role": messages[0]["role"], "content": [{"type": "text", "text": kept}]}]
        excess = prompt_length(processor, cut) - limit
        if excess <= 0 or 2 * half_tokens <= least:
            return cut
        half_tokens = max(
            half_tokens - (excess + 1) // 2, least // 2
        )  # text that is cut anew may be a few tokens longer
    raise UnsupportedError(
        f"a prompt of {length} tokens cannot be cut to {limit}: its template alone has {length - len(ids)}; raise "
        "model.max_prompt_tokens or lower max_new_tokens"
    )


def cut_from_left(
    processor: Any, messages: Sequence[dict], images: Sequence, instruction: str, limit: int | None
) -> tuple[list[dict], list]:
    """Return the messages and images of a prompt, without the first pieces if the prompt has more than `limit` tokens.

    Args:
        instruction: beginning of the message, which is kept; "" for none.
        limit: None: no limit.

    Raises:
        UnsupportedError: anything but one message of text and images that begins with the instruction, or a limit that leaves no
            piece.
    """
    if limit is None:
        return list(messages), list(images)
    pieces = _pieces(
        messages,
        ("text", "image"),
        "cut_prompt=left cuts one user message of text and images, but this prompt has videos or several turns; "
        "use cut_prompt=null",
    )
    length = prompt_length(processor, messages, images)
    if length <= limit:
        return list(messages), list(images)
    head, text_after_instruction = _behind(pieces, instruction)

    def kept(count: int, last: str | None = None) -> tuple[list[dict], list]:
        """Return messages and images with the instruction and the last `count` pieces, or the text `last` in their place."""
        tail = (
            text_after_instruction[len(text_after_instruction) - count :]
            if last is None
            else [{"type": "text", "text": last}]
        )
        count = sum(part["type"] == "image" for part in tail)
        return [{"role": messages[0]["role"], "content": [*head, *tail]}], list(images)[len(images) - count :]

    def fits(prompt: tuple[list[dict], list]) -> bool:
        return prompt_length(processor, *prompt) <= limit

    fitting_count, largest_count = 0, len(text_after_instruction) - 1  # bounds of the number of pieces that fit
    while fitting_count < largest_count:
        middle = (fitting_count + largest_count + 1) // 2
        fitting_count, largest_count = (middle, largest_count) if fits(kept(middle)) else (fitting_count, middle - 1)
    if fitting_count:
        return kept(fitting_count)
    return _end_of(
        processor,
        text_after_instruction[-1],
        kept,
        fits,
        f"a prompt of {length} tokens cannot be cut to {limit} from the left",
    )


def _end_of(processor: Any, piece: dict, kept: Any, fits: Any, refusal: str) -> tuple[list[dict], list]:
    """Return messages and images of a prompt: the instruction, and as many of the last tokens of `piece` as fit.

    kept, fits: the functions of `cut_from_left`. refusal: beginning of the error message.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    ids = tokenizer(piece["text"], add_special_tokens=False)["input_ids"] if piece["type"] == "text" else []
    fitting_count, largest_count = 0, len(ids)

    def prompt(count: int) -> tuple[list[dict], list]:
        end = tokenizer.decode(ids[len(ids) - count :], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return kept(0, end)

    while fitting_count < largest_count:
        middle = (fitting_count + largest_count + 1) // 2
        fitting_count, largest_count = (middle, largest_count) if fits(prompt(middle)) else (fitting_count, middle - 1)
    if not fitting_count:
        raise UnsupportedError(
            f"{refusal}: its template, its instruction and its last piece do not fit; raise model.max_prompt_tokens or "
            "lower max_new_tokens"
        )
    return prompt(fitting_count)


def _pieces(messages: Sequence[dict], kinds: Sequence[str], refusal: str) -> list[dict]:
    """Return the pieces of a prompt of one message; raise UnsupportedError if a piece is not of these `kinds`."""
    content = messages[0]["content"] if len(messages) == 1 else None
    pieces = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not pieces or any(piece["type"] not in kinds for piece in pieces):
        raise UnsupportedError(refusal)
    return list(pieces)


def _behind(parts: Sequence[dict], instruction: str) -> tuple[list[dict], list[dict]]:
    """Split the pieces of a prompt into the instruction and the rest; raise UnsupportedError without the instruction."""
    if not instruction:
        return [], list(parts)
    first_text = parts[0].get("text", "")
    if not first_text.startswith(instruction):
        raise UnsupportedError(
            "cut_prompt=left keeps the prompt's instruction, but this prompt does not begin with it; use "
            "cut_prompt=null"
        )
    remaining_text = first_text[len(instruction) :]
    remaining_parts = [{"type": "text", "text": remaining_text}] if remaining_text else []
    return [{"type": "text", "text": instruction}], [*remaining_parts, *parts[1:]]


LEVELS = 256
"""Number of sizes: a side of 2,048 pixels is scaled in steps of 8; a token covers a square of at least 28 pixels."""


@dataclass
class SmallerPrompts:
    """Prompts of one sample at smaller sizes, called levels, from 1 to `LEVELS`.

    Attributes:
        encode: function from a share (of sides, tiles and frames, or of text) to the prompt of this size.
        whole: the sample's prompt at full size.
        made: level -> prompt, for the levels encoded so far.
    """

    encode: Callable[[float], EncodedPrompt]
    whole: EncodedPrompt
    family: ModelFacts
    made: dict[int, EncodedPrompt] = field(default_factory=dict)

    def lengths(self, spec: CellSpec) -> Lengths:
        """Return the whole prompt's lengths under the cell's protocol."""
        return lengths_of(protocol(spec.protocol), self.whole, self.family)

    def at(self, level: int) -> EncodedPrompt:
        if level not in self.made:
            self.made[level] = self.encode(level / LEVELS)
        return self.made[level]

    def within(self, spec: CellSpec) -> int:
        """Return the largest level below `LEVELS` whose prompt fits the cell's budget; 1 if none does."""
        entries, protocol_rules = spec.entries(self.lengths(spec).reduced), protocol(spec.protocol)
        fitting_level, too_large_level = 1, LEVELS
        while too_large_level - fitting_level > 1:
            middle = (fitting_level + too_large_level) // 2
            is_small_enough = lengths_of(protocol_rules, self.at(middle), self.family).reduced <= entries
            fitting_level, too_large_level = (middle, too_large_level) if is_small_enough else (fitting_level, middle)
        return fitting_level


def resampled(specs: Sequence[CellSpec], prompt: EncodedPrompt, family: ModelFacts) -> list[CellSpec]:
    """Return the cells of `pixels` and `cut_prompt` for which the whole prompt exceeds the budget."""
    candidates = [spec for spec in specs if spec.compressor.resamples]
    candidates = [spec for spec in candidates if prompt.visual_tokens or not spec.compressor.needs_visual]
    return [spec for spec in candidates if spec.evicts(lengths_of(protocol(spec.protocol), prompt, family).reduced)]


def answered(
    smaller: SmallerPrompts,
    specs: Sequence[CellSpec],
    answer: Callable[[EncodedPrompt, list[CellSpec]], Iterator[list[ForkResult]]],
) -> Iterator[list[ForkResult]]:
    """Answer each cell from its smaller prompt; yield lists of results. answer: answers cells of `full` on a prompt."""
    groups: dict[int, list[CellSpec]] = {}
    for spec in specs:
        groups.setdefault(smaller.within(spec), []).append(spec)
    for level, members in groups.items():
        small = smaller.at(level)
        by_name = {spec.cell: spec for spec in members}
        for results in answer(small, [replace(spec, compressor=full(), budget=None) for spec in members]):
            yield [_accounted(result, by_name[result.cell], smaller, small) for result in results]


def _accounted(result: ForkResult, spec: CellSpec, smaller: SmallerPrompts, small: EncodedPrompt) -> ForkResult:
    """Return the smaller prompt's result as the cell's result, with budget and ratios relative to the whole prompt."""
    whole, lengths = smaller.whole, smaller.lengths(spec)
    reduced = lengths_of(protocol(spec.protocol), small, smaller.family).reduced
    result.prompt_tokens, result.visual_tokens = whole.length, whole.visual_tokens
    result.context_tokens, result.budget_entries = lengths.reduced, spec.entries(lengths.reduced)
    if result.status == "ok":
        fallbacks, over_budget_name = result.fallback, spec.compressor.eviction.scorer.over_budget
        fill_asked(result, spec, lengths, sum(map(len, result.kept)), whole.types[0])
        result.fallback += [*fallbacks, *([over_budget_name] if reduced > spec.entries(lengths.reduced) else [])]
        result.bytes_full = result.bytes_full // reduced * lengths.reduced
        result.tokens_from_compressed = result.n_tokens  # the whole prompt was never prefilled for it
    return result
