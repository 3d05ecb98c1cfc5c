"""The static card: what will run and what it must cost at least, printed before any work. A pure function of facts."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import TextIO

from mmkv_bench.columns import size


@dataclass(frozen=True)
class PromptSize:
    """The first prompt of a dataset: all its tokens, the visual ones among them, and those a budget is counted over
    (fewer than all under query_agnostic)."""

    tokens: int
    visual_tokens: int
    context_tokens: int


@dataclass(frozen=True)
class DatasetLine:
    """One dataset of a run: samples of this run (limit and shard applied), cells of each, rows there are already."""

    name: str
    samples: int
    cells: int
    rows_done: int
    prompt: PromptSize | None = None

    @property
    def rows(self) -> int:
        return self.samples * self.cells


@dataclass(frozen=True)
class BudgetLine:
    """One asked budget (`64`, `20%`) and what it comes to: entries per KV head for the first prompt."""

    label: str
    entries: int


@dataclass(frozen=True)
class CardFacts:
    """Everything the card shows.

    Attributes:
        weights_bytes: bytes of all parameters, 0 where that is not known yet; weights: `hub`, `folder` or `random`.
        layers: 0 where nothing is known of the model; device: empty where no model is loaded.
        kv_bytes_per_token: keys and values of all layers and KV heads.
        budgets: in order; empty when every method of the run is `full`.
        out: folder of the rows; notes: sentences about merged cells and the like.
    """

    model: str
    family: str
    fingerprint: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    attention: str
    device: str
    weights_bytes: int
    kv_bytes_per_token: int
    datasets: Sequence[DatasetLine]
    methods: Sequence[str]
    budgets: Sequence[BudgetLine]
    protocols: Sequence[str]
    readings: Sequence[str]
    seeds: Sequence[int]
    out: str
    weights: str = "hub"
    shard: str = "0/1"
    notes: Sequence[str] = ()


_INDENT = " " * 11


def columns(stream: TextIO) -> int | None:
    """How wide a terminal is; None where the stream is none, whose lines are nobody's to wrap."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


def render(facts: CardFacts, width: int | None = None) -> str:
    """The card as text; width: columns that its lines are wrapped at, None for lines as long as they are."""
    lines = _model(facts)
    prompt = next((line.prompt for line in facts.datasets if line.prompt), None)
    if prompt is not None:
        lines.append(f"full       {_full(facts, prompt)}")
        lines += [f"budget     {_budget(facts, line, prompt)}" for line in facts.budgets]
    lines.append(f"methods    {', '.join(facts.methods)}")
    lines.append(
        f"protocol   {', '.join(facts.protocols)}; reading {', '.join(facts.readings) or 'none'}{_seeds(facts)}"
    )
    lines += [f"dataset    {_dataset(line)}" for line in facts.datasets]
    lines.append(f"rows       {_rows(facts)}")
    lines += [f"note       {note}" for note in facts.notes]
    return "\n".join(lines if width is None else [part for line in lines for part in _wrapped(line, width)])


def _wrapped(line: str, width: int) -> list[str]:
    """One line of the card, what does not fit below its text."""
    room = max(width, 2 * len(_INDENT))
    return wrap(line, room, subsequent_indent=_INDENT, break_long_words=False, break_on_hyphens=False)


def _model(facts: CardFacts) -> list[str]:
    where = f", on {facts.device}" if facts.device else ""
    loading = f"           {_weights(facts)}, {facts.dtype}, {facts.attention}{where}"
    if not facts.layers:
        return [f"model      {facts.model}, whose files are not here", loading]
    heads = f"{facts.layers} layers, {facts.query_heads} query / {facts.kv_heads} KV heads, head_dim {facts.head_dim}"
    return [
        f"model      {facts.model} ({facts.family}, {facts.fingerprint}), {heads}",
        loading,
        f"KV cache   {size(facts.kv_bytes_per_token)} per token",
    ]


def _weights(facts: CardFacts) -> str:
    known = f"{size(facts.weights_bytes)} " if facts.weights_bytes else ""
    if facts.weights == "random":
        return f"{known}random weights (answers mean nothing: speed and memory only)"
    return f"{known}weights" if known else "weights not loaded"


def _full(facts: CardFacts, prompt: PromptSize) -> str:
    cache = prompt.tokens * facts.kv_bytes_per_token
    return (
        f"{prompt.tokens} tokens ({prompt.visual_tokens} visual) in the first prompt: {size(cache)} cache; each decode "
        f"step reads {size(facts.weights_bytes + cache)} at least"
    )


def _budget(facts: CardFacts, line: BudgetLine, prompt: PromptSize) -> str:
    length = prompt.context_tokens
    kept = min(line.entries, length)
    total = kept * facts.layers * facts.kv_heads
    text = (
        f"{line.label}: {kept} of {length} entries per KV head ({100 * kept / length:.1f}%), {total} in all, "
        f"{size(kept * facts.kv_bytes_per_token)}"
    )
    return text + ("; the first prompt is kept whole" if line.entries >= length else "")


def _seeds(facts: CardFacts) -> str:
    return f"; seed {', '.join(map(str, facts.seeds))}" if facts.seeds else ""


def _dataset(line: DatasetLine) -> str:
    text = f"{line.name}: {line.samples} samples x {line.cells} cells"
    if line.prompt is not None:
        text += f", first prompt {line.prompt.tokens} tokens"
    return text + (f", {line.rows_done} of {line.rows} rows there already" if line.rows_done else "")


def _rows(facts: CardFacts) -> str:
    rows, done = sum(d.rows for d in facts.datasets), sum(d.rows_done for d in facts.datasets)
    todo = f"{rows - done} to make" if done < rows else "nothing to generate"
    part = "" if facts.shard == "0/1" else f", shard {facts.shard}"
    return f"{rows} rows, {done} done, {todo}{part}, in {facts.out}"
