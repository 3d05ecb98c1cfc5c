"""Control `pixels`: the full cache of a smaller prompt, in place of a part of the whole one's cache.

There are `LEVELS` sizes: shares of the sides of images, of tiles where a family counts these, and of a video's frames. The
largest size whose prompt has no more entries than the budget is found by bisection; the model's own processor encodes each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from mmkv_bench.compression.compressor import full
from mmkv_bench.families.facts import ModelFacts
from mmkv_bench.generation.encode import EncodedPrompt, lengths_of
from mmkv_bench.generation.result import CellSpec, ForkResult, fill_asked
from mmkv_bench.protocols import Lengths, protocol

LEVELS = 256
"""Number of sizes: a side of 2,048 pixels is scaled in steps of 8; a token covers a square of at least 28 pixels."""
OVER = "pixels_over_budget"


@dataclass
class SmallerPrompts:
    """Prompts of one sample at smaller sizes.

    Attributes:
        encode: share of sides, tiles and frames -> the prompt. whole: the sample's prompt at full size.
    """

    encode: Callable[[float], EncodedPrompt]
    whole: EncodedPrompt
    family: ModelFacts
    made: dict[int, EncodedPrompt] = field(default_factory=dict)

    def lengths(self, spec: CellSpec) -> Lengths:
        """Return the whole prompt's lengths under the cell's protocol."""
        return lengths_of(protocol(spec.protocol), self.whole, self.family)

    def at(self, level: int) -> EncodedPrompt:
        """Return the prompt at this level of `LEVELS`."""
        if level not in self.made:
            self.made[level] = self.encode(level / LEVELS)
        return self.made[level]

    def within(self, spec: CellSpec) -> int:
        """Return the largest level whose prompt fits the cell's budget; 1, the smallest, where none does."""
        entries, rule = spec.entries(self.lengths(spec).reduced), protocol(spec.protocol)
        fits, above = 1, LEVELS
        while above - fits > 1:
            middle = (fits + above) // 2
            small = lengths_of(rule, self.at(middle), self.family).reduced <= entries
            fits, above = (middle, above) if small else (fits, middle)
        return fits


def resampled(specs: Sequence[CellSpec], prompt: EncodedPrompt, family: ModelFacts) -> list[CellSpec]:
    """Return the cells that are answered from a smaller prompt: those of `pixels` whose whole prompt does not fit."""
    candidates = [spec for spec in specs if spec.compressor.resamples and prompt.visual_tokens]
    return [spec for spec in candidates if spec.evicts(lengths_of(protocol(spec.protocol), prompt, family).reduced)]


def answered(
    smaller: SmallerPrompts,
    specs: Sequence[CellSpec],
    answer: Callable[[EncodedPrompt, list[CellSpec]], Iterator[list[ForkResult]]],
) -> Iterator[list[ForkResult]]:
    """Yield results of the cells as they are ready. answer: answers cells of `full` on a smaller prompt."""
    groups: dict[int, list[CellSpec]] = {}
    for spec in specs:
        groups.setdefault(smaller.within(spec), []).append(spec)
    for level, members in groups.items():
        small = smaller.at(level)
        by_name = {spec.cell: spec for spec in members}
        for results in answer(small, [replace(spec, compressor=full(), budget=None) for spec in members]):
            yield [_accounted(result, by_name[result.cell], smaller, small) for result in results]


def _accounted(result: ForkResult, spec: CellSpec, smaller: SmallerPrompts, small: EncodedPrompt) -> ForkResult:
    """Rewrite a result as the cell's row, whose budget and ratios refer to the whole prompt."""
    whole, lengths = smaller.whole, smaller.lengths(spec)
    reduced = lengths_of(protocol(spec.protocol), small, smaller.family).reduced
    result.prompt_tokens, result.visual_tokens = whole.length, whole.visual_tokens
    result.context_tokens, result.budget_entries = lengths.reduced, spec.entries(lengths.reduced)
    if result.status == "ok":
        fallbacks = result.fallback
        fill_asked(result, spec, lengths, sum(map(len, result.kept)), whole.types[0])
        result.fallback += [*fallbacks, *([OVER] if reduced > spec.entries(lengths.reduced) else [])]
        result.bytes_full = result.bytes_full // reduced * lengths.reduced
        result.tokens_from_compressed = result.n_tokens  # the whole prompt was never prefilled for it
    return result
