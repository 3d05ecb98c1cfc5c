"""KVzip: attention while the model repeats the context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mmkv_bench.compression.lazy_torch import Tensor, torch
from mmkv_bench.compression.numerics.attention import largest_attention
from mmkv_bench.compression.observation import Needs, Observation
from mmkv_bench.compression.parameter_checks import check_least
from mmkv_bench.compression.scorers.base import Scorer
from mmkv_bench.errors import UnsupportedError

if TYPE_CHECKING:
    from mmkv_bench.compression.replay import Replay

KEPT = 2.0  # score of entries that always stay; no attention is above 1


@dataclass(frozen=True)
class KVzipScorer(Scorer):
    """KVzip (arXiv 2505.23416): an entry's score is its largest attention while the model repeats the context.

    After the prefill the context is fed again in chunks of m tokens, each after an instruction to repeat the context
    and the chat template's end of a user's turn. From the second chunk on, the instruction is to repeat the part that
    begins with the 8 tokens before the chunk. With f tokens fed, whose queries are Q, a key of the chunk scores::

        max over the f queries and the g query heads of softmax(Q [K_sinks, K_chunk, K_fed]^T), causal among the fed

    The fed tokens are dropped: the cache is left as after the prefill, bit for bit. If a protocol has a context and a
    question, only the context is fed again, so scores never know the question. Where the whole prompt is compressed,
    the question is part of the context; the template's tokens after it are not, and stay. The replay costs two to three
    prefills, which count as compression. It is refused with several sequences or without a run's prompt (``attach``).

    Pictures, which the paper does not have, are fed as the embeddings that the vision tower gave, at the positions of
    text: one per token on all axes, after the context.

    Args:
        chunk: m [tokens].
        sinks: first keys that are part of every softmax (at most those before the chunk) and that always stay [tokens].

    Paper, authors' release and kvpress: the paper and the release take chunks of 2,000 tokens, kvpress of 2,048. The
    sinks of the release's softmax are the whole system prompt; kvpress uses the first 4 tokens, as here. The template's
    prefix always stays, as in the release; kvpress protects the first 4 tokens alone. Both compute softmax in the
    model's dtype, here float32, and mask evicted entries of a full cache by a threshold, whose ties may change a budget
    by a few entries. Here exactly the budget stays, equal scores by layer, head and token.
    """

    chunk: int = 2048
    sinks: int = 4

    needs = Needs(replay=True)
    streams = False

    def __post_init__(self) -> None:
        check_least(self, 1, "tokens", "chunk")
        check_least(self, 0, "tokens", "sinks")

    def key(self, budget: int, length: int) -> tuple[object, ...]:
        return (self.chunk, self.sinks)

    def score(self, obs: Observation, budget: int, seed: int) -> Tensor:
        """Return zeros, which the replay's scores replace. Raises UnsupportedError for a model with learned sinks."""
        if obs.sinks is not None:
            raise UnsupportedError(
                "kvzip needs a softmax without learned sinks, but this model's attention has them; use another "
                "method or model"
            )
        return torch.zeros(obs.key.shape[:2], dtype=torch.float32, device=obs.device)

    def from_replay(self, replay: Replay) -> list[Tensor]:
        heads = replay.layers[0].keys.shape[1]
        scores = [torch.full((heads, replay.prompt.total), KEPT, device=layer.device) for layer in replay.layers]

        def read(layer: int, first: int, last: int, query: Tensor, key: Tensor, scaling: float) -> None:
            sinks = min(self.sinks, first)
            scores[layer][:, first:last] = largest_attention(query, key, scaling, sinks, first, last)

        replay.feed(self.chunk, read)
        for score in scores:
            score[:, : self.sinks] = KEPT
        return scores

    def fallbacks(self, budget: int, length: int, types: Tensor | None = None) -> tuple[str, ...]:
        """Return ``protected_reduced`` if sinks exceed C entries. The template's protected prefix does not count."""
        return ("protected_reduced",) if self.sinks > budget else ()
