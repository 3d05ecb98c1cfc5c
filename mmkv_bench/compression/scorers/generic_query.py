"""StreamMem's generic query: what the chat template's own tokens attend to."""

from __future__ import annotations

from dataclasses import dataclass

from mmkv_bench.compression.scorers.tail_mass import TailMassScorer


@dataclass(frozen=True)
class GenericQueryScorer(TailMassScorer):
    """Attention that the chat template's own tokens pay to each entry, as StreamMem (arXiv 2508.15717) takes for a query.

    Under ``protocol=stream`` the tokens that the template writes behind a question (for Qwen ``<|im_end|>``, a line's end and
    the assistant's header) are fed behind every chunk, where the question would come. Their attention is averaged over them
    and over the g query heads of a KV head; they are forgotten in the same layer and counted in ``entries_peak``. No question
    is known. Under other protocols the last tokens of what is prefilled stand in: the same ones under ``paper`` and
    ``strict``, behind the question that they then know.

    Args:
        proxies: at most so many of the template's tokens, the last ones [tokens].

    Paper and code: by the paper's abstract and notes on it; its equations were not at hand and no code was found, so that
    there is no released reading. Not built are the filter that leaves out frames like the one before, the merged prototype
    entry of each frame, and positions scaled beyond the model's context (YaRN).
    """

    proxies: int = 8

    asks_template = True
