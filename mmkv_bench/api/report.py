"""What an attached session kept of a prompt, counted from the stored tensors."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from mmkv_bench.generation.result import CellSpec, ForkResult
from mmkv_bench.generation.single import fill_account
from mmkv_bench.protocols import protocol as protocol_named

if TYPE_CHECKING:
    from mmkv_bench.compression.budget import Budget
    from mmkv_bench.compression.compressor import Compressor
    from mmkv_bench.compression.session import Session


@dataclass(frozen=True)
class SessionReport:
    """One prompt right after its reduction; names and units are those of result rows (docs/rows.md).

    Attributes:
        method, reading: what compressed it; budget: as it was asked, `64` or `20%`; None where there is none.
        prompt_tokens: T; budget_entries: C, entries per KV head.
        kept: entries per layer and KV head, `[layers][Hkv]`.
        entries_asked, entries_planned, entries_resident, entries_reachable: over all layers and heads: C times their
            number (T where that is less), selected, stored, and stored or to be fetched from the host.
        bytes_device, bytes_host, bytes_metadata: of keys and values, of those in host memory, of positions and scales.
        bytes_held: of all tensors of the cache, slack and buffers included; bytes_full: keys and values of the full cache.
        fallback: names of what could not be done as asked (docs/rows.md).
        allowed_over: the method's own formula, or its released code, may exceed the budget.
    """

    method: str
    reading: str
    budget: str | None
    prompt_tokens: int
    budget_entries: int | None
    kept: tuple[tuple[int, ...], ...]
    entries_asked: int | None
    entries_planned: int
    entries_resident: int
    entries_reachable: int
    bytes_device: int
    bytes_host: int
    bytes_metadata: int
    bytes_held: int
    bytes_full: int
    fallback: tuple[str, ...] = ()
    allowed_over: bool = False

    @property
    def audit(self) -> str:
        """Whether what is stored is what was selected, and within what was asked."""
        if self.entries_resident != self.entries_planned:
            return f"failed: {self.entries_resident} entries are stored where {self.entries_planned} were selected"
        if self.entries_asked is None:
            return "passed: no budget"
        over = self.entries_resident - self.entries_asked
        if over > 0:
            why = f"as {self.method} says of itself" if self.allowed_over else "which nothing allows"
            return f"{'passed' if self.allowed_over else 'failed'}: {over} entries over the budget, {why}"
        return "passed: exactly the budget" if not over else f"passed: {-over} entries below the budget"

    def __str__(self) -> str:
        name = self.method if self.budget is None else f"{self.method}@{self.budget}"
        full = self.prompt_tokens * sum(len(layer) for layer in self.kept)
        stored = self.bytes_device + self.bytes_host + self.bytes_metadata
        asked = "no budget" if self.entries_asked is None else f"{self.entries_asked:,}"
        lines = [
            f"{name} reading={self.reading}: {self.entries_resident:,} of {full:,} entries kept of "
            f"{self.prompt_tokens} prompt tokens",
            f"  entries  asked {asked}, planned {self.entries_planned:,}, resident "
            f"{self.entries_resident:,}, reachable {self.entries_reachable:,}",
            f"  bytes    {stored:,} of {self.bytes_full:,} ({self.bytes_device:,} device, {self.bytes_host:,} host, "
            f"{self.bytes_metadata:,} metadata), {self.bytes_held:,} with slack",
            f"  audit    {self.audit}",
        ]
        if self.fallback:
            lines.append(f"  fallback {', '.join(self.fallback)}")
        lines += [f"  layer {i:<3}{' '.join(f'{count:6d}' for count in heads)}" for i, heads in enumerate(self.kept)]
        return "\n".join(lines)


def counted(session: Session, compressor: Compressor, budget: Budget | None, protocol: str) -> SessionReport:
    """The report of a session whose prompt, of one row, has just been reduced: the single run's account of it."""
    prompt = session.prompt
    assert prompt is not None, "its prompt has just been reduced"
    length = prompt.length(0)
    types = None if prompt.token_types is None else prompt.token_types[0, prompt.pads[0] :]
    row = ForkResult(cell="", prompt_tokens=length)
    cell = CellSpec("", compressor, budget, protocol)
    fill_account(row, cell, protocol_named(protocol).lengths(length, length), session, types)
    own = {"method", "reading", "budget", "kept", "fallback", "allowed_over"}
    return SessionReport(
        method=compressor.name,
        reading=compressor.reading,
        budget=None if budget is None else str(budget),
        kept=tuple(map(tuple, row.kept)),
        fallback=tuple(row.fallback),
        allowed_over=compressor.exceeds,
        **{field.name: getattr(row, field.name) for field in fields(SessionReport) if field.name not in own},
    )
