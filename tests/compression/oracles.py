"""Slow, obvious versions of every statistic, scorer and selector: float64, one loop per index, straight from the
formulas. Nothing of ``mmkv_bench`` is used here but the data classes that carry a test problem."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mmkv_bench.compression.observation import Chunk, Needs, Observation

THETA = 100.0


# ---------------------------------------------------------------- a layer of a model


def turn(x: Tensor, position: Tensor) -> Tensor:
    """Rotary embedding by complex numbers: dimension i is paired with i + D/2. x [..., n, D], position [n]."""
    half = x.shape[-1] // 2
    angle = position.double()[:, None] * THETA ** (-torch.arange(half, dtype=torch.float64) / half)
    z = torch.complex(x[..., :half].double(), x[..., half:].double()) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag], -1)


def cos_sin(position: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    half = dim // 2
    angle = position.double()[:, None] * THETA ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.cat([angle, angle], -1)
    return angle.cos().float(), angle.sin().float()


@dataclass
class Layer:
    """Random weights and hidden states of one attention layer; everything float64, the product sees float32."""

    hidden: Tensor  # [T,E]
    wq: Tensor  # [Hq*D,E]
    bq: Tensor  # [Hq*D]
    key: Tensor  # [Hkv,T,D], rotated
    value: Tensor  # [Hkv,T,D]
    dim: int

    @property
    def length(self) -> int:
        return self.hidden.shape[0]

    @property
    def scaling(self) -> float:
        return self.dim**-0.5

    def project(self, hidden: Tensor) -> Tensor:
        """[m,E] -> pre-RoPE [Hq,m,D] in the dtype of hidden."""
        q = hidden @ self.wq.to(hidden.dtype).T + self.bq.to(hidden.dtype)
        return q.view(hidden.shape[0], -1, self.dim).transpose(0, 1)

    @property
    def query(self) -> Tensor:
        return turn(self.project(self.hidden), torch.arange(self.length))

    def observe(self, needs: Needs, cuts=(), layer=0, identity="sample", dtype=torch.float32) -> Observation:
        """The product's observation of this layer, fed in the chunks that ``cuts`` (token indices) make."""
        observation = Observation(
            layer,
            4,
            needs,
            scaling=self.scaling,
            length=self.length,
            token_types=None,
            project_query=self.project,
            future_rope=lambda offsets: cos_sin(offsets + self.length - 1, self.dim),
            identity=identity,
        )
        query, key, value = self.query.to(dtype), self.key.to(dtype), self.value.to(dtype)
        edges = [0, *sorted({c for c in cuts if 0 < c < self.length}), self.length]
        for start, end in zip(edges, edges[1:], strict=False):
            cos, sin = cos_sin(torch.arange(start, end), self.dim)
            hidden = self.hidden[start:end].to(dtype)
            observation.observe(Chunk(query[:, start:end], key[:, :end], value[:, :end], hidden, cos, sin))
        return observation


def make_layer(length: int, kv_heads: int, group: int, dim: int = 8, width: int = 12, seed: int = 0) -> Layer:
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):  # float32 values, so that both sides start from the same numbers
        return torch.randn(*shape, generator=g).double()

    hidden = normal(length, width) * 0.7 + normal(width) * 0.5
    heads = kv_heads * group
    key = turn(
        (hidden @ normal(width, kv_heads * dim) * 0.4).view(length, kv_heads, dim).transpose(0, 1), torch.arange(length)
    )
    return Layer(
        hidden=hidden.float().double(),
        wq=(normal(heads * dim, width) * 0.4).float().double(),
        bq=(normal(heads * dim) * 0.3).float().double(),
        key=key.float().double(),
        value=normal(kv_heads, length, dim),
        dim=dim,
    )


# ---------------------------------------------------------------- statistics


def attention(query: Tensor, key: Tensor, scaling: float, position: int | None) -> Tensor:
    """Softmax of one query [D] over keys [S,D]; at a position only keys up to it are seen."""
    scores = key.double() @ query.double() * scaling
    if position is not None:
        scores[position + 1 :] = -math.inf
    e = torch.exp(scores - scores.max())
    return e / e.sum()


def window_mass(query: Tensor, key: Tensor, scaling: float, w: int) -> Tensor:
    """query [Hq,T,D] (all rows), key [Hkv,T,D] -> [Hkv,T]: mean over the last w rows and the heads of a KV head."""
    heads, total = key.shape[:2]
    group = query.shape[0] // heads
    out = torch.zeros(heads, total, dtype=torch.float64)
    for h in range(query.shape[0]):
        for i in range(total - w, total):
            out[h // group] += attention(query[h, i], key[h // group], scaling, i)
    return out / (w * group)


def column_sums(query: Tensor, key: Tensor, scaling: float) -> Tensor:
    """All T rows, summed over rows and over the heads of a KV head."""
    group = query.shape[0] // key.shape[0]
    return window_mass(query, key, scaling, key.shape[1]) * key.shape[1] * group


def covering_set(mass: list[float], tau: float, side: str = "left") -> set[int]:
    """The definition: sort, accumulate, cut."""
    order = sorted(range(len(mass)), key=lambda j: (-mass[j], j))
    target, cum, chosen = tau * math.fsum(mass), 0.0, set()
    for j in order:
        if side == "left" and cum >= target:
            break
        if side == "right" and cum + mass[j] > target:
            break
        cum += mass[j]
        chosen.add(j)
    return chosen


def sure_and_possible(mass: Tensor, tau: float, side: str = "left", slack: float = 3e-5) -> tuple[Tensor, Tensor]:
    """Members of the covering set that rounding of relative size ``slack`` cannot change, and those it could add."""
    target = tau * float(mass.sum())
    sure, possible = [], []
    for t, m in enumerate(mass.tolist()):
        others = torch.cat([mass[:t], mass[t + 1 :]])
        most = float(others[others >= m * (1 - slack)].sum())
        least = float(others[others > m * (1 + slack)].sum())
        own = m if side == "right" else 0.0
        sure.append(most + own < target * (1 - slack))
        possible.append(least + own < target * (1 + slack))
    return torch.tensor(sure), torch.tensor(possible)


# ---------------------------------------------------------------- scorers


def snapkv(layer: Layer, window: int, pool: int, budget: int) -> Tensor:
    w = min(window, max(1, budget // 2), layer.length)
    mass = window_mass(layer.query.float(), layer.key, layer.scaling, w)
    out = mass.clone()
    prefix = layer.length - w
    for h in range(mass.shape[0]):
        for j in range(prefix):
            near = [mass[h, i] for i in range(j - pool // 2, j + pool // 2 + 1) if 0 <= i < prefix]
            out[h, j] = sum(near) / pool  # zero padding counts in the divisor
    return out


def half_snapkv(layer: Layer, parameters: tuple, dtype: torch.dtype) -> Tensor:
    """What releases do with a model in half precision: every product, quotient, probability and mean is rounded to it."""
    w, pool, pooling, heads = parameters

    def r(x: Tensor) -> Tensor:
        return x.to(dtype).double()

    query, key, (kv_heads, total, dim) = r(layer.query), r(layer.key), layer.key.shape
    group, prefix = len(query) // kv_heads, total - w
    of_head = torch.zeros(len(query), total, dtype=torch.float64)
    for h in range(len(query)):
        rows = []
        for i in range(prefix, total):
            logits = r(r(key[h // group] @ query[h, i]) / math.sqrt(dim))
            logits[i + 1 :] = -math.inf
            rows.append(r(logits.softmax(-1)))
        of_head[h] = r(sum(rows) / w)

    def pooled(row: Tensor) -> Tensor:
        out = row.clone()
        for j in range(prefix if pool > 1 else 0):
            near = [row[i] for i in range(j - pool // 2, j + pool // 2 + 1) if 0 <= i < prefix]
            out[j] = max(near) if pooling == "max" else r(sum(near) / pool)
        return out

    out = []
    for first in range(0, len(query), group):
        mine = of_head[first : first + group]
        if heads == "last":
            out.append(r(sum(pooled(row) for row in mine) / group))
        else:
            out.append(pooled(r(sum(mine) / group)))
    return torch.stack(out).to(dtype)


def half_keydiff(layer: Layer, window: int, dtype: torch.dtype) -> Tensor:
    """As ``keydiff`` with every quotient, product, norm and mean rounded to half precision."""

    def r(x: Tensor) -> Tensor:
        return x.to(dtype).double()

    def unit(x: Tensor) -> Tensor:
        return r(x / r(x.norm()))

    out = torch.zeros(layer.key.shape[:2], dtype=torch.float64)
    for h, keys in enumerate(r(layer.key)):
        prefix = keys[: len(keys) - window]
        anchor = r(sum(unit(k) for k in prefix) / len(prefix))
        for j, k in enumerate(keys):
            out[h, j] = -r(r(unit(k) * unit(anchor)).sum())
    return out.to(dtype)


def keydiff(layer: Layer, window: int = 0) -> Tensor:
    out = torch.zeros(layer.key.shape[:2], dtype=torch.float64)
    for h, keys in enumerate(layer.key):
        prefix = keys[: max(0, len(keys) - window)]
        if len(prefix) == 0:
            continue
        anchor = sum(k / k.norm() for k in prefix) / len(prefix)
        for j, k in enumerate(keys):
            out[h, j] = -(k @ anchor) / (k.norm() * anchor.norm())
    return out


def expected_attention(layer: Layer, future: int, sinks: int, epsilon=0.0, covariance=True, value_norm=True) -> Tensor:
    heads, total, dim = layer.key.shape
    pre = layer.project(layer.hidden)
    group = pre.shape[0] // heads
    rotation = torch.zeros(dim, dim, dtype=torch.float64)
    for t in range(1, future + 1):
        rotation += turn(torch.eye(dim), torch.full((dim,), layer.length - 1 + t)).T / future
    out = torch.zeros(heads, total, dtype=torch.float64)
    for h in range(pre.shape[0]):
        rows = pre[h, 4:]
        mu = rows.mean(0)
        sigma = sum(torch.outer(r - mu, r - mu) for r in rows) / len(rows)
        mu, sigma = rotation @ mu, rotation @ sigma @ rotation.T
        keys = layer.key[h // group, sinks:]
        z = torch.stack(
            [mu @ k * layer.scaling + (k @ sigma @ k * layer.scaling**2 / 2 if covariance else 0) for k in keys]
        )
        out[h // group, sinks:] += torch.softmax(z, 0) / group
    out[:, sinks:] += epsilon
    if value_norm:
        out[:, sinks:] *= layer.value[:, sinks:].norm(dim=-1)
    out[:, :sinks] = out[:, sinks:].amax(1, keepdim=True)
    return out


def proxy_group_masses(layer: Layer, states: Tensor, offsets: list[int], groups: int) -> Tensor:
    """[Hq,G,T]: summed attention of each group's proxies, query heads apart."""
    pre = layer.project(states.double())
    share = pre.shape[0] // layer.key.shape[0]
    size = states.shape[0] // groups
    out = torch.zeros(pre.shape[0], groups, layer.length, dtype=torch.float64)
    for i, offset in enumerate(offsets):
        q = turn(pre[:, i : i + 1], torch.tensor([layer.length - 1 + offset]))[:, 0]
        for h in range(pre.shape[0]):
            out[h, i // size] += attention(q[h], layer.key[h // share], layer.scaling, None)
    return out


# ---------------------------------------------------------------- selection


def select(scores: Tensor, caps: list[int], protected: list[bool]) -> list[list[int]]:
    rows = []
    for row, cap in zip(scores.tolist(), caps, strict=True):
        kept = [j for j in range(len(row)) if protected[j]]
        kept = kept[len(kept) - cap :] if len(kept) > cap else kept
        rest = sorted((j for j in range(len(row)) if not protected[j]), key=lambda j: (-row[j], j))
        rows.append(sorted(kept + rest[: max(0, cap - len(kept))]))
    return rows


# ---------------------------------------------------------------- memory


def allocator_peak(work) -> int:
    """Largest number of bytes that ``work()`` holds at once beyond what existed before, from the allocator's events."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        work()
    held = peak = 0
    for event in sorted(trace.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak
