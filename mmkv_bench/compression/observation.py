"""Observations: what a scorer reads of one layer and one sequence after the prefill, without padding and batch dimension."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from mmkv_bench.compression.lazy_torch import Tensor, torch
from mmkv_bench.compression.numerics.attention import column_sums, window_mass
from mmkv_bench.compression.numerics.moments import ElementMoments, JointMoments, rotate

if TYPE_CHECKING:
    from mmkv_bench.compression.cache import CompressedCache


T = TypeVar("T")

QUERY_MOMENTS_SKIP = 4  # first tokens left out of the query moments (sinks), as in Expected Attention's code


def effective_window(window: int, budget: int, length: int) -> int:
    """Return ``min(window, max(1, C // 2), T)``, the number of queries of an observation window that are used.

    At most half of the budget C is spent on the window itself; a budget of C = 1 keeps the last token.
    """
    return min(window, max(1, budget // 2), length)


@dataclass(frozen=True)
class Needs:
    """Statistics that a scorer needs gathered DURING prefill. ``a | b`` needs all that either needs."""

    tail_queries: int = 0  # the last w post-RoPE queries
    query_moments: bool = False  # mean [Hq,D] and covariance [Hq,D,D] of pre-RoPE queries, first 4 tokens left out
    hidden_moments: bool = False  # elementwise mean and population std [E] of the attention module's input
    hidden_scalars: bool = False  # one mean and one population std of all T*E values of that input
    column_sums: bool = False  # causal attention column sums [Hkv,T], summed over a KV head's query heads
    queries: bool = False  # all post-RoPE queries [Hq,T,D], until the layer is done (query_joint: until all layers are)
    answer: bool = False  # attention of the full cache's own answer, known after the prefill: `Scorer.with_answer`
    replay: bool = False  # the context fed again after the prompt: `Scorer.from_replay`
    states: bool = False  # all inputs of the attention module [T,E] with cos, sin [T,D], as long as `queries`

    def __or__(self, other: Needs) -> Needs:
        own_needs, other_needs = vars(self), vars(other)
        return Needs(**{name: max(own_needs[name], other_needs[name]) for name in own_needs})  # flags are 0 and 1


@dataclass(frozen=True)
class Frames:
    """The video frame that each of the T tokens of a stream belongs to."""

    number: Tensor  # int64 [T], index of the token's temporal patch (for Qwen-VL a pair of frames), -1 for text
    cell: Tensor  # int64 [T], the token's index within its temporal patch, 0 for text
    size: int  # number of tokens of a temporal patch


@dataclass
class Chunk:
    """One prefill chunk of n tokens in one layer; S tokens have been seen so far, this chunk's included."""

    query: Tensor  # [Hq,n,D], rotated
    key: Tensor  # [Hkv,S,D], rotated, ALL tokens so far
    value: Tensor  # [Hkv,S,D], ALL tokens so far
    hidden: Tensor  # [n,E], the attention module's input (after the input norm)
    cos: Tensor  # [n,D] of this chunk, with the axes of mrope already combined
    sin: Tensor  # [n,D], like cos
    reach: Tensor | None = None  # int64 [n] on the CPU, last of the S tokens that each token attends to; None: itself


class Observation:
    """One layer of one sequence: fed chunk by chunk with ``observe``, read after the last chunk.

    Sums run in float64, so chunked and one-shot prefill agree to float32 rounding. Only the statistics in ``needs`` are
    gathered; reading any other raises RuntimeError. All methods of a run share one observation. Each scorer and allocator
    reads its own view (``seen_by``), so that no method depends on which other methods run.

    Args:
        layer: index of the layer.
        layers: number of layers of the model.
        needs: statistics to gather; in a view, those that its reader declared.
        scaling: factor of the attention scores, usually ``head_dim ** -0.5``.
        length: T, tokens of the prompt (context tokens under ``query_agnostic``).
        token_types: int ``[T]``, 0 text, 1 image, 2 video; None when unknown.
        project_query: hidden states ``[m,E]`` -> pre-RoPE queries ``[Hq,m,D]``, with the module's bias and query norm.
        future_rope: offsets ``[m]`` (1 = first position after the prompt's last token) -> cos, sin ``[m,D]``.
        identity: dataset and sample; seeds random streams.
        module: the layer's attention module, for scorers of other libraries that need it.
        sinks: float32 ``[Hq]``, learned scores that take a share of each softmax and go to no key; None: there are none.

    Attributes:
        frames: see ``stream_view``; None outside of a stream.
        reach: int64 ``[T]`` on the CPU, the last token that each token attends to; None: every token attends up to itself.
    """

    def __init__(
        self,
        layer: int,
        layers: int,
        needs: Needs,
        *,
        scaling: float,
        length: int,
        token_types: Tensor | None,
        project_query: Callable[[Tensor], Tensor],
        future_rope: Callable[[Tensor], tuple[Tensor, Tensor]],
        identity: str,
        module: object = None,
        sinks: Tensor | None = None,
    ) -> None:
        self.layer, self.layers, self.needs, self.module, self.sinks = layer, layers, needs, module, sinks
        self.scaling, self.length, self.token_types, self.identity = scaling, length, token_types, identity
        self._project_query, self._future_rope = project_query, future_rope
        self._seen = 0
        self._key: Tensor | None = None
        self._value: Tensor | None = None
        self._tail: Tensor | None = None
        self._dtype: torch.dtype | None = None
        self._query_heads = self._hidden_size = 0
        self._queries = JointMoments() if needs.query_moments else None
        self._hidden = ElementMoments() if needs.hidden_moments or needs.hidden_scalars else None
        self._columns: Tensor | None = None
        self._pieces: dict[str, list[Tensor]] = {}
        self._memo: dict[Hashable, Any] = {}
        self._reader: tuple[Hashable, ...] = ()
        self._observed_tokens = self._rounds = 0  # tokens, and evictions, of a stream
        self._places: Tensor | None = None
        self.frames: Frames | None = None
        self.reach: Tensor | None = None

    def seen_by(self, part: object, needs: Needs, *key: Hashable) -> Observation:
        """Return a view of the layer for one scorer or allocator, after the last chunk.

        The view does not contain values that other parts memoised with ``memo``.

        Args:
            part: the scorer or allocator, which outlives the observation.
            needs: statistics that this part declared.
            key: further values on which the part's results depend (its key at the budget, the seed).
        """
        view = copy.copy(self)
        view.needs, view._reader = needs, (id(part), *key)
        return view

    # ---- during prefill

    def observe(self, chunk: Chunk) -> None:
        """Add the next chunk. Raises RuntimeError if its tokens do not continue the previous ones."""
        rows, total = chunk.query.shape[1], chunk.key.shape[1]
        if total != self._seen + rows or total > self.length:
            raise RuntimeError(
                f"layer {self.layer}: a chunk of {rows} queries and {total} keys after {self._seen} of {self.length}"
                " tokens; feed every prefill chunk once, in order, with all keys so far"
            )
        if chunk.reach is not None or self.reach is not None:
            earlier_reach = torch.arange(self._seen) if self.reach is None else self.reach
            later_reach = torch.arange(self._seen, total) if chunk.reach is None else chunk.reach
            self.reach = torch.cat([earlier_reach, later_reach])
        if self._queries is not None:
            skip = max(0, QUERY_MOMENTS_SKIP - self._observed_tokens)
            self._queries.add(chunk.query[:, skip:], (chunk.cos[skip:], chunk.sin[skip:]))
        if self._hidden is not None:
            self._hidden.add(chunk.hidden)
        if self.needs.column_sums:
            sums = column_sums(chunk.query, chunk.key, self.scaling, self._seen, self.sinks, chunk.reach)
            if self._columns is not None:
                sums[:, : self._seen] += self._columns
            self._columns = sums
        if self.needs.queries:
            self._pieces.setdefault("queries", []).append(chunk.query)
        if self.needs.states:
            for name in ("hidden", "cos", "sin"):
                self._pieces.setdefault(name, []).append(getattr(chunk, name))
        if self.needs.tail_queries:
            tail = chunk.query[:, -self.needs.tail_queries :]
            if self._tail is not None and tail.shape[1] < self.needs.tail_queries:
                tail = torch.cat([self._tail, tail], 1)[:, -self.needs.tail_queries :]
            self._tail = tail.clone()  # a view would keep the chunk's whole query tensor alive
        self._key, self._value, self._dtype = chunk.key, chunk.value, chunk.hidden.dtype
        self._query_heads, self._hidden_size, self._seen = chunk.query.shape[0], chunk.hidden.shape[-1], total
        self._observed_tokens += rows

    def start_after_entries(self, held: int, rounds: int) -> None:
        """Start after entries that are already stored. Statistics then cover only the tokens that follow.

        Args:
            held: number of stored slots.
            rounds: number of earlier evictions, which seeds random streams.
        """
        self._seen = self._observed_tokens = held
        self._rounds = rounds

    def copy_statistics(self, context: Observation) -> None:
        """Start with a copy of the statistics of `context`, the observation of the beginning of this prompt."""
        for name in ("_seen", "_observed_tokens", "_tail", "_dtype", "_query_heads", "_hidden_size", "reach"):
            setattr(self, name, getattr(context, name))
        self._queries, self._hidden = copy.deepcopy(context._queries), copy.deepcopy(context._hidden)
        self._columns, self._pieces = context._columns, {name: [*one] for name, one in context._pieces.items()}

    # ---- between the chunks of a stream

    def stream_view(self, places: Tensor, frames: Frames | None, asked: int = 0) -> Observation:
        """Return a view for a stream's scorers: its prompt has only the stored entries and ends with the newest token.

        Args:
            places: int64 ``[Hkv,S]``, the tokens in the stored slots, ascending.
            frames: the frames of all tokens of the stream, if it is a video.
            asked: number of last tokens that belong to the chat template; only the queries of these tokens are the tail.
                0: there are none.
        """
        view = copy.copy(self)
        view.length, view._places, view.frames, view._memo = self._seen, places, frames, {}
        if asked and view._tail is not None:
            view._tail = view._tail[:, -asked:]
        return view

    def retain(self, index: Tensor) -> None:
        """Adapt the statistics to an eviction.

        Stored last queries are dropped if entries of their tokens were evicted, so that an observation window stays causal.
        index: the kept slots, int64 ``[Hkv,m]``, ascending, without padding.
        """
        kept_count = index.shape[1]
        newest_slots = torch.arange(self._seen - kept_count, self._seen, device=index.device)
        unchanged_count = int((index == newest_slots).flip(-1).cumprod(-1).sum(-1).min())
        if self._tail is not None:
            self._tail = self._tail[:, self._tail.shape[1] - min(unchanged_count, self._tail.shape[1]) :]
        if self._columns is not None:
            self._columns = self._columns.gather(1, index)
        self._key = self._value = None  # they would keep the evicted entries alive
        self._seen, self._rounds = kept_count, self._rounds + 1

    # ---- after the last chunk

    @property
    def key(self) -> Tensor:
        """``[Hkv,T,D]``, rotated at the tokens' own positions, in the model's dtype."""
        return self._complete(self._key)

    @property
    def value(self) -> Tensor:
        """``[Hkv,T,D]`` in the model's dtype."""
        return self._complete(self._value)

    @property
    def device(self) -> torch.device:
        return self.key.device

    @property
    def tokens(self) -> Tensor:
        """int64 ``[Hkv,T]``: the token in each slot; in a stream only tokens whose entries are still stored. Ascending."""
        if self._places is not None:
            return self._places
        return torch.arange(self.length, device=self.device).expand(self.key.shape[0], -1)

    @property
    def groups(self) -> int:
        """g: query heads that share one KV head."""
        return self._query_heads // self.key.shape[0]

    @property
    def hidden_size(self) -> int:
        """E: size of the attention module's input."""
        return self._hidden_size

    def tail(self, w: int) -> Tensor:
        """Return the last ``min(w, T)`` post-RoPE queries, ``[Hq,min(w,T),D]``."""
        self._require(self.needs.tail_queries >= w, f"tail_queries >= {w}")
        tail = self._complete(self._tail)
        # A copy, since another method may need a longer tail: equal numbers in another layout may round differently.
        return tail[:, -w:].clone() if w < tail.shape[1] else tail

    def tail_reach(self, w: int) -> Tensor | None:
        """Return ``reach`` for the queries of ``tail(w)``, int64 ``[min(w,T)]``; None: each query attends up to its own token."""
        return None if self.reach is None else self.reach[-w:]

    @property
    def queries(self) -> Tensor:
        """``[Hq,T,D]``: the post-RoPE queries of all prompt tokens, in the model's dtype."""
        self._require(self.needs.queries, "queries")
        return self._whole("queries", 1)

    @property
    def states(self) -> Tensor:
        """``[T,E]``: the attention module's inputs (after the input norm), in the model's dtype."""
        self._require(self.needs.states, "states")
        return self._whole("hidden", 0)

    @property
    def rotation(self) -> tuple[Tensor, Tensor]:
        """cos, sin ``[T,D]`` of the prompt's own positions."""
        self._require(self.needs.states, "states")
        return self._whole("cos", 0), self._whole("sin", 0)

    def window_mass(self, w: int) -> Tensor:
        """Return the attention of the last w queries to every key, ``[Hkv,T]`` float32.

        The attention is averaged over these queries and over the g query heads of a KV head.
        """
        tail, reach = self.tail(w), self.tail_reach(w)

        def mass() -> Tensor:
            return window_mass(tail, self.key, self.scaling, self.sinks, reach)

        return self.shared(("window_mass", w), mass).clone()  # a scorer that writes to the copy changes no other method

    def last_attention(self) -> Tensor:
        """Return the attention of the prompt's last query, mean over the g query heads: ``[Hkv,T]`` float32."""
        return self.window_mass(1)

    @property
    def query_mean(self) -> Tensor:
        """``[Hq,D]`` float64: mean pre-RoPE query of tokens 4..T-1."""
        self._require(self.needs.query_moments, "query_moments")
        return self._complete(self._queries).mean()

    @property
    def query_covariance(self) -> Tensor:
        """``[Hq,D,D]`` float64: population covariance of the pre-RoPE queries of tokens 4..T-1."""
        self._require(self.needs.query_moments, "query_moments")
        return self._complete(self._queries).covariance()

    @property
    def hidden_mean(self) -> Tensor:
        """``[E]`` float32: elementwise mean of the attention module's input over all T tokens."""
        self._require(self.needs.hidden_moments, "hidden_moments")
        return self._complete(self._hidden).mean().float()

    @property
    def hidden_std(self) -> Tensor:
        """``[E]`` float32: elementwise population standard deviation over all T tokens."""
        self._require(self.needs.hidden_moments, "hidden_moments")
        return self._complete(self._hidden).std().float()

    @property
    def hidden_scalar_moments(self) -> tuple[Tensor, Tensor]:
        """Mean and population standard deviation of all T*E values together, float32 ``[]`` each."""
        self._require(self.needs.hidden_scalars, "hidden_scalars")
        mean, std = self._complete(self._hidden).scalars()
        return mean.float(), std.float()

    @property
    def column_sums(self) -> Tensor:
        """``[Hkv,T]`` float32: number j is the attention to key j, summed over all T queries and the g query heads."""
        self._require(self.needs.column_sums, "column_sums")
        return self._complete(self._columns).clone()  # a copy, see `window_mass`

    def project(self, hidden: Tensor) -> Tensor:
        """Return the pre-RoPE queries ``[Hq,m,D]`` of hidden states ``[m,E]``, through the module in the model's dtype."""
        self._complete(self._key)
        return self._project_query(hidden.to(self._dtype))

    def rope(self, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos, sin ``[m,D]`` at offsets after the prompt's last token (1 = first decoded position)."""
        cos, sin = self._future_rope(offsets)
        return cos.to(self.device), sin.to(self.device)

    def future_queries(self, hidden: Tensor, offsets: Tensor) -> Tensor:
        """Return the queries ``[Hq,m,D]`` (float32) that hidden states ``[m,E]`` would give at future positions."""
        return rotate(self.project(hidden).float(), *self.rope(offsets))

    def generator(self, *salt: object, every_round: bool = True) -> torch.Generator:
        """Return a CPU generator seeded by SHA-256 of (salt..., identity, layer): equal on every device and in any order.

        every_round: each eviction of a stream gets another seed; the first one gets the seed that a prompt outside of a
            stream has.
        """
        rounds = [self._rounds] if every_round and self._rounds else []
        text = json.dumps([*map(str, salt), self.identity, self.layer, *rounds])
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
        return torch.Generator().manual_seed(seed)

    def memo(self, name: Hashable, make: Callable[[], T]) -> T:
        """Return the value of ``make()``, computed once per layer for this reader and its key (``seen_by``).

        Callers must not write to it.
        """
        return self.shared(("memo", *self._reader, name), make)

    def shared(self, name: Hashable, make: Callable[[], T]) -> T:
        """Return a value like ``memo``, but shared by all methods of the run.

        Only for parts of this package: ``name`` must include everything that the value depends on.
        """
        if name not in self._memo:
            self._memo[name] = make()
        value: T = self._memo[name]
        return value

    # ---- checks

    def _whole(self, name: str, axis: int) -> Tensor:
        """Return the stored pieces of all chunks, joined along the token axis. A single piece is not copied."""
        self._complete(self._key)
        parts = self._pieces[name]
        if len(parts) > 1:
            parts[:] = [torch.cat(parts, axis)]
        return parts[0]

    def _complete(self, value: T | None) -> T:
        if value is None or self._seen != self.length:
            raise RuntimeError(
                f"layer {self.layer}: {self._seen} of {self.length} prompt tokens observed; read after the last chunk"
            )
        return value

    def _require(self, declared: bool, need: str) -> None:
        if not declared:
            raise RuntimeError(f"the scorer reads {need} but its `needs` does not declare it ({self.needs})")


def text_fallbacks(obs: Observation, frames: Frames, budget: int) -> tuple[str, ...]:
    """Return ``("text_over_budget",)`` if some KV head stores more text tokens than the budget; otherwise ().

    For methods that keep text before frames.
    """
    text = int((frames.number[obs.tokens] < 0).sum(-1).max())
    return ("text_over_budget",) if text > budget else ()


@dataclass(frozen=True)
class Received:
    """Arguments of the text model's forward over a prompt."""

    embeds: Tensor  # [B, T, E], with visual features in place
    position_ids: Tensor | None  # [3|4, B, T] or [B, T]
    visual: Tensor | None = None  # bool [B, T], tokens to whose hidden states the first layers add features (Qwen3-VL)
    deepstack: list[Tensor] | None = None  # these features, per such layer [tokens, E]


@dataclass
class PromptBatch:
    """One batch of prompts while it is being prefilled.

    `rotations` are cos and sin of positions after each row's last token, shared by all layers of one chunk.
    """

    total: int  # padded prompt length
    pads: list[int]  # left padding of each row
    cache: CompressedCache  # receives the entries
    n_layers: int
    token_types: Tensor | None = None  # 0 text, 1 image, 2 video
    observations: dict[int, list[Observation]] = field(default_factory=dict)  # by layer, one per row
    rotations: dict[tuple[int, ...], tuple[Tensor, Tensor]] = field(default_factory=dict)
    complete: bool = False
    received: Received | None = None  # if a scorer needs a replay
    turn: int = 0  # index of the conversation's turn that is fed after stored entries; 0 for a prompt
    reach: Tensor | None = None  # of the newest chunk, see `attended_prefix.reach_of`
    two_way: bool = False  # whether some token of the prompt attends to later tokens
    context: PromptBatch | None = None  # an earlier batch with this batch's first tokens, whose statistics are copied

    def length(self, row: int) -> int:
        return self.total - self.pads[row]
