"""StreamMem's generic query: attention of the chat template's own tokens."""

from __future__ import annotations

from dataclasses import dataclass

from mmkv_bench.compression.scorers.tail_mass import TailMassScorer


@dataclass(frozen=True)
class GenericQueryScorer(TailMassScorer):
    """The attention of the chat template's own tokens, which StreamMem (arXiv 2508.15717) uses as a generic query.

    Under ``protocol=stream`` the tokens that the template puts after a question (for Qwen ``<|im_end|>``, a line's end
    and the assistant's header) are fed after every chunk of the video, where the question would be. Their attention is
    averaged over them and over the g query heads of a KV head. They are dropped again in the same layer, and counted in
    ``entries_peak``. The question has no influence. Under other protocols the last prefilled tokens replace them. Under
    ``paper`` and ``strict`` these are the same tokens, but they follow the question and so have attended to it.

    Args:
        proxies: most tokens of the template that are used, its last ones [tokens].

    No code was found; written from the paper's abstract and notes on it. Not implemented: the filter that leaves out
    frames similar to the one before, the merged prototype entry of each frame, and positions scaled beyond the model's
    context (YaRN).
    """

    proxies: int = 8

    asks_template = True
