"""The control `pixels`: the full cache of a smaller prompt, in place of a part of the whole one's.

Sizes are `LEVELS` shares of the sides of images, of tiles where a family counts these, and of a video's frames. The largest whose
prompt has no more entries than the budget is found by bisection, each size encoded by the model's own processor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from mmkv_bench.compression.compressor import full
from mmkv_bench.generation.encode import EncodedPrompt, lengths_of
from mmkv_bench.generation.result import CellSpec, ForkResult, fill_asked
from mmkv_bench.models.families import Family
from mmkv_bench.protocols import Lengths, protocol

LEVELS = 256
"""A side of 2,048 pixels is then scaled in steps of 8; tokens are made of squares of 28 and more."""
OVER = "pixels_over_budget"


@dataclass
class Smaller:
    """Prompts of one sample at smaller sizes.

    Attributes:
        encode: share of sides, tiles and frames -> the prompt; whole: the sample's prompt as it is.
    """

    encode: Callable[[float], EncodedPrompt]
    whole: EncodedPrompt
    family: Family
    made: dict[int, EncodedPrompt] = field(default_factory=dict)

    def lengths(self, spec: CellSpec) -> Lengths:
        """What the cell's protocol makes of the whole prompt."""
        return lengths_of(protocol(spec.protocol), self.whole, self.family)

    def at(self, level: int) -> EncodedPrompt:
        """The prompt at this level of `LEVELS`."""
        if level not in self.made:
            self.made[level] = self.encode(level / LEVELS)
        return self.made[level]

    def within(self, spec: CellSpec) -> int:
        """The largest level whose prompt has no more entries than the cell's budget; 1, the smallest, where none has."""
        entries, rule = spec.entries(self.lengths(spec).reduced), protocol(spec.protocol)
        fits, above = 1, LEVELS
        while above - fits > 1:
            middle = (fits + above) // 2
            small = lengths_of(rule, self.at(middle), self.family).reduced <= entries
            fits, above = (middle, above) if small else (fits, middle)
        return fits


def resampled(specs: Sequence[CellSpec], prompt: EncodedPrompt, family: Family) -> list[CellSpec]:
    """Those of the cells that are answered from a smaller prompt; not where the whole one fits, nor without pictures."""
    found = [spec for spec in specs if spec.compressor.resamples and prompt.visual_tokens]
    return [spec for spec in found if spec.evicts(lengths_of(protocol(spec.protocol), prompt, family).reduced)]


def answered(
    smaller: Smaller,
    specs: Sequence[CellSpec],
    answer: Callable[[EncodedPrompt, list[CellSpec]], Iterator[list[ForkResult]]],
) -> Iterator[list[ForkResult]]:
    """Results of the cells as they are there; answer: as for other cells, given the full cache of a smaller prompt."""
    groups: dict[int, list[CellSpec]] = {}
    for spec in specs:
        groups.setdefault(smaller.within(spec), []).append(spec)
    for level, own in groups.items():
        small = smaller.at(level)
        by_name = {spec.cell: spec for spec in own}
        for results in answer(small, [replace(spec, compressor=full(), budget=None) for spec in own]):
            yield [_accounted(result, by_name[result.cell], smaller, small) for result in results]


def _accounted(result: ForkResult, spec: CellSpec, smaller: Smaller, small: EncodedPrompt) -> ForkResult:
    """The row of the cell that was asked: its budget and its share are those of the whole prompt."""
    whole, lengths = smaller.whole, smaller.lengths(spec)
    reduced = lengths_of(protocol(spec.protocol), small, smaller.family).reduced
    result.prompt_tokens, result.visual_tokens = whole.length, whole.visual_tokens
    result.context_tokens, result.budget_entries = lengths.reduced, spec.entries(lengths.reduced)
    if result.status == "ok":
        found = result.fallback
        fill_asked(result, spec, lengths, sum(map(len, result.kept)), whole.types[0])
        result.fallback += [*found, *([OVER] if reduced > spec.entries(lengths.reduced) else [])]
        result.bytes_full = result.bytes_full // reduced * lengths.reduced
        result.tokens_from_compressed = result.n_tokens  # the whole prompt was never prefilled for it
    return result
