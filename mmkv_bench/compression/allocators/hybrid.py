"""HybridKV: heads are static or dynamic, and each kind gets its share of the model's budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil
from typing import Any, Literal

from mmkv_bench.compression.allocators.base import Allocator
from mmkv_bench.compression.allocators.waterfill import water_fill
from mmkv_bench.compression.context import Composed, Context
from mmkv_bench.compression.lazy_torch import Tensor, torch
from mmkv_bench.compression.numerics.entropy import top_mass
from mmkv_bench.compression.numerics.exact import exact_decimal
from mmkv_bench.compression.observation import Needs, Observation, effective_window
from mmkv_bench.compression.parameter_checks import check_least, check_share, check_words
from mmkv_bench.errors import ConfigError


@dataclass(frozen=True)
class HeadClasses:
    """A rule that divides KV heads into static and dynamic ones (HybridKV, section 3.1).

    A head is static if its text attends to few tokens: its sparsity score S* (see ``Hybrid``) is at least theta.

    Args:
        theta: lowest sparsity score of a static head, in [0, 1] (table 6).
        threshold: "absolute": theta itself; "quantile": the theta-quantile (linear interpolation) of the scores of all
            KV heads of the model, so that about the fraction theta of the heads is dynamic.
        classes: "hybrid"; "static" or "dynamic" makes all heads one kind (table 4).
        calibration: ``{"theta": value}`` measured on the model, which replaces theta (null = theta); absolute only. In
            a configuration ``auto`` (the committed artefact of the model) or a path; heads can be classified only after
            it is loaded.

    Paper: the text calls theta "quantile-based", but its appendix sweeps 0.75 to 0.95 on scores that cluster at the
    upper end, which only an absolute cutoff explains.
    """

    theta: float = 0.9
    threshold: Literal["absolute", "quantile"] = "absolute"
    classes: Literal["hybrid", "static", "dynamic"] = "hybrid"
    calibration: Mapping[str, Any] | str | None = None

    calibrated_by = "hybridkv"

    def __post_init__(self) -> None:
        check_words(self)
        if self.calibration is not None and self.threshold == "quantile":
            raise ConfigError(
                "a calibrated theta is a score, so threshold=quantile cannot use it; allowed with a calibration: "
                "threshold=absolute"
            )
        if self.calibration is not None and self.theta != type(self).theta:
            raise ConfigError(
                f"theta={self.theta} has no effect with a calibration, whose theta is used; leave theta or the "
                "calibration at its default"
            )
        for theta in (self.theta, self.theta if self.calibration is None or self._unloaded else self.cutoff):
            if not 0 <= theta <= 1:
                raise ConfigError(f"theta is {theta}; allowed: a share of attention, 0 <= theta <= 1")

    @property
    def _unloaded(self) -> bool:
        return isinstance(self.calibration, str)

    @property
    def cutoff(self) -> float:
        """The lowest score of a static head (threshold=absolute)."""
        if self.calibration is None:
            return self.theta
        if isinstance(self.calibration, str) or "theta" not in self.calibration:
            raise ConfigError(
                f"calibration={self.calibration!r} gives no theta; make a calibration of this model with python "
                "-m mmkv_bench calibrate hybridkv, or leave calibration empty"
            )
        return float(self.calibration["theta"])

    def dynamic(self, summaries: Mapping[int, Tensor]) -> Tensor:
        """Return which heads are dynamic, bool ``[L, Hkv]``, from S* of all L layers (layer -> float64 ``[Hkv]``)."""
        sparsity = torch.stack([summaries[layer] for layer in sorted(summaries)])
        if self.classes != "hybrid":
            return torch.full_like(sparsity, self.classes == "dynamic", dtype=torch.bool)
        if self.threshold == "quantile":
            return sparsity < torch.quantile(sparsity.flatten(), self.theta)
        return sparsity < self.cutoff


@dataclass(frozen=True)
class HeadBudgets:
    """The division of a budget among all heads.

    Attributes:
        dynamic: bool ``[L, Hkv]``, True for dynamic heads.
        entries: int64 ``[L, Hkv]``, each head's budget.
        clipped: whether r of ``Hybrid`` had to be cut.
    """

    dynamic: Tensor
    entries: Tensor
    clipped: bool


@dataclass(frozen=True)
class Hybrid(Allocator):
    """HybridKV (arXiv 2604.05887, sections 3.1 and 3.2, equations 2 to 5): the model's budget is divided top down.

    A text row's sparsity is the sum of its ``k = ceil(top * T)`` largest attention probabilities (causal, softmax in
    float32). A KV head's S* is the mean over the prompt's text rows and its g query heads. With ``B = C * L * Hkv``
    entries for N heads, N_dyn of them dynamic and N_stat static:

    - ``B_dyn = ceil(r * C * N_dyn)``, at most B. A model with heads of one kind gives B to them.
    - Dynamic heads share B_dyn equally. The entries that a head may read per step are rounded to a power of two and to
      whole chunks. Static heads gain the entries saved by rounding and lose those added by it.
    - Static head h gets ``alpha * B_stat / N_stat + (1 - alpha) * B_stat * S*_h / sum(S*)``, at most all candidates.
      The other static heads divide the excess, and the total is exact.

    Static entries and the entries that dynamic heads read per step add up to at most B (except with ``power=up``), and
    to less only if no static head can take the entries saved by rounding (fallback ``budget_unused``).

    Args:
        heads: which heads are dynamic.
        r: budget of a dynamic head over the mean budget (table 7); above ``N / N_dyn`` r is cut to this value (fallback
            ``infeasible_allocation``).
        alpha: part of the static budget that all static heads share equally, in [0, 1]; 1 is the paper's "w/o H" (table
            5), with r=1 its "w/o H & HT".
        top: keys per text row whose attention is the sparsity score, as a fraction of the prompt's tokens, in (0, 1].
        chunk: tokens per chunk, as in the decode policy.
        window: the selector's observation window [tokens].
        power: rounding of a dynamic head's share. "nearest": the nearest power of two (the lower one if two are equally
            near); the power below if rounding up would take more than the static heads have. "up": the next higher
            power, so that the total is above B if this takes more than the static heads have. "down": the power of two
            below. "none": whole chunks only.

    No code was released. Open in the paper and chosen here: k (its section 2 counts the top 5 %), alpha, the causal
    mask of equation 2, the head dimension as d in its scaling, the classes of query heads that share keys, and power.
    The paper pads dynamic budgets "to its nearest powers of 2": the nearest power (the default), or, as padding
    suggests, the next higher one ("up", whose rows may exceed their budget and are marked). The paper also rounds each
    head's share up, which would exceed the budget; here totals are exact.
    """

    heads: HeadClasses = field(default_factory=HeadClasses)
    r: float = 0.75
    alpha: float = 0.5
    top: float = 0.05
    chunk: int = 8
    window: int = 32
    power: Literal["nearest", "down", "up", "none"] = "nearest"

    scope = "model"
    needs = Needs(queries=True)

    def __post_init__(self) -> None:
        check_words(self)
        if not self.r > 0:
            raise ConfigError(f"r is {self.r}; allowed: a share coefficient above 0")
        check_share(self, "alpha", "the budget")
        if not 0 < self.top <= 1:
            raise ConfigError(f"top is {self.top}; allowed: a fraction of the prompt's tokens, 0 < top <= 1")
        check_least(self, 1, "tokens", "chunk")

    @property
    def exceeds(self) -> bool:
        return self.power == "up"

    printed = True  # the paper's own sentence may mean the next power of two

    def method_version(self, method: Composed) -> int:
        """Return 2 with ``power=up``, else 1.

        Since version 2 rounding up takes entries from static heads, and exceeds the total only if these have too few.
        """
        return 2 if self.power == "up" else 1

    @property
    def falls_short(self) -> bool:
        return self.heads.classes != "static"

    # ---- which heads are sparse

    def summary_key(self, budget: int, length: int) -> tuple[float, ...]:
        return (self.top,)

    def summary(self, obs: Observation, budget: int, seed: int) -> Tensor:
        """Return S* of the layer's KV heads, float64 ``[Hkv]``."""
        types = obs.token_types
        rows = [] if types is None else (types == 0).nonzero().flatten().tolist()
        top = ceil(exact_decimal(self.top) * obs.length)
        return top_mass(obs.queries, obs.key, obs.scaling, rows or range(obs.length), top, obs.sinks, obs.reach)

    def fallbacks(self, budget: int, length: int, types: Tensor | None = None) -> tuple[str, ...]:
        return ("no_text_tokens",) if types is not None and bool((types > 0).all()) else ()

    def outcome(self, context: Context) -> tuple[str, ...]:
        """Return the fallbacks of a division of the budget.

        ``text_over_budget``: a static head's budget is smaller than window and text together.
        ``chunk_reduced``: dynamic heads cannot read a whole chunk.
        ``infeasible_allocation``: r was cut.
        ``budget_unused``: no static head can take the entries saved by rounding.
        """
        head_budgets = self.divide(context.summaries, context.budget - context.refed, context.candidates)
        window = effective_window(self.window, context.budget, context.length) if self.window else 0
        types = context.candidate_types
        text_count = context.candidates if types is None else int((types[: context.length - window] == 0).sum())
        text_entries = min(text_count + window - min(context.refed, window), context.candidates)
        chunk_tokens = min(self.chunk, context.candidates)
        entries, dynamic = head_budgets.entries, head_budgets.dynamic
        happened = {
            "text_over_budget": bool((entries[~dynamic] < text_entries).any()),
            "chunk_reduced": bool((entries[dynamic] < chunk_tokens).any()),
            "infeasible_allocation": head_budgets.clipped,
            "budget_unused": int(entries.sum()) < (context.budget - context.refed) * entries.numel(),
        }
        return tuple(name for name, true in happened.items() if true)

    # ---- how many entries they get

    def caps(
        self,
        scores: Sequence[Tensor],
        budget: int,
        layers: Sequence[int],
        n_layers: int,
        context: Context | None = None,
    ) -> list[Tensor]:
        if context is None:
            raise ValueError(
                "the context has no summaries (sparsity scores) of the layers; give a context with `summaries`"
            )
        return list(self.divide(context.summaries, budget, scores[0].shape[1]).entries)

    def divide(self, summaries: Mapping[int, Tensor], budget: int, candidates: int) -> HeadBudgets:
        """Return classes and budgets of all heads.

        Args:
            summaries: layer -> S* float64 ``[Hkv]``, all L layers.
            budget: C, entries per KV head on average.
            candidates: n, the most that a head can hold.
        """
        dynamic = self.heads.dynamic(summaries)
        if budget >= candidates:
            return HeadBudgets(dynamic, torch.full(dynamic.shape, candidates), False)
        n_dynamic = int(dynamic.sum())
        n_static = dynamic.numel() - n_dynamic
        total = budget * dynamic.numel()
        requested = ceil(exact_decimal(self.r) * budget * n_dynamic)
        # What static heads cannot hold (everything, if there are none) goes to the dynamic heads.
        dynamic_budget = min(max(requested, total - n_static * candidates), total)
        entries_per_head = 0
        if n_dynamic:
            entries_per_head = self._readable_entries(dynamic_budget // n_dynamic, candidates, total // n_dynamic)
        static_entries = max(total - entries_per_head * n_dynamic, 0)
        sparsity = torch.stack([summaries[layer] for layer in sorted(summaries)])
        weights = self._weights(sparsity[~dynamic].tolist())
        static = water_fill(weights, min(static_entries, n_static * candidates), candidates)
        entries = torch.full(dynamic.shape, entries_per_head)
        entries[~dynamic] = torch.tensor(static, dtype=torch.int64)
        return HeadBudgets(dynamic, entries, bool(n_static) and requested > total)

    def _readable_entries(self, share: int, candidates: int, most: int) -> int:
        """Round a dynamic head's share to a power of two, if not all candidates fit, and then to whole chunks.

        The result is above ``most`` only with power=up.
        """
        if share >= candidates or share == 0:
            return min(share, candidates)
        if self.power != "none":
            lower_power, upper_power = 1 << share.bit_length() - 1, 1 << (share - 1).bit_length()
            nearer_above = upper_power - share < share - lower_power and self._floor(upper_power, candidates) <= most
            share = upper_power if self.power == "up" or (self.power == "nearest" and nearer_above) else lower_power
        return self._floor(share, candidates)

    def _floor(self, share: int, candidates: int) -> int:
        """Round a share of one chunk or more down to whole chunks; return at most all candidates."""
        return min(share if share < self.chunk else share - share % self.chunk, candidates)

    def _weights(self, sparsity: list[float]) -> list[Fraction]:
        alpha, scores = exact_decimal(self.alpha), [Fraction(value) for value in sparsity]
        total = sum(scores)
        return [alpha * total + (1 - alpha) * len(scores) * score for score in scores]
