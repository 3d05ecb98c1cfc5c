"""A forecast as text and as data."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mmkv_bench.columns import aligned, size
from mmkv_bench.forecast.forecast import GIB

if TYPE_CHECKING:
    from mmkv_bench.forecast.forecast import Forecast, Given, Lengths, Line

_SOURCES = {
    "given": "--prompt-tokens",
    "asked": "lengths=[...]",
    "pictures": "--image and a question",
    "stored": "the median of its stored answers",
    "assumed": "assumed: only its data tell; --prompt-tokens says otherwise",
}
_HELD = {
    "files": "counted in its files",
    "stated": "as its repository states",
    "shape": "from its shape",
    "bound": "at most, a share of the whole model's",
}


def foretold(forecast: Forecast) -> str:
    """The text."""
    given = forecast.given
    lines = [""]
    if forecast.read is not None:
        whole = "an unknown number of bytes" if forecast.held is None else size(forecast.held)
        how = f" ({_HELD[forecast.sizes.source]})" if forecast.sizes.source else ""
        lines.append(
            f"weights    {whole} on the device{how}; a decode step reads {size(forecast.read)} of them: no vision tower, no "
            "embedding table that is not the head"
        )
        lines.append(f"device     {_device(given)}")
    for one in forecast.datasets:
        lines += ["", *_dataset(one, given)]
    lines += ["", *(f"note       {text}" for text in forecast.missing)] if forecast.missing else []
    if forecast.datasets:
        lines += [
            "",
            "At least, by arithmetic, of one prompt: weights and entries are read once per step, and the prefill holds one MLP's",
            "activations. What a vision tower, attention and a method hold beside that `plan --memory` counts. kept: entries per",
            "KV head; batch: prompts whose entries fit beside the weights to the end of their answers.",
        ]
    return "\n".join(lines)


def document(forecast: Forecast) -> dict[str, Any]:
    """The same as data: bytes, milliseconds and hours, null where something is not known."""
    return asdict(forecast)


def _device(given: Given) -> str:
    told = [
        None if given.memory is None else f"{given.memory / GIB:,.4g} GiB",
        None if given.bandwidth is None else f"reads {given.bandwidth / 1e9:,.4g} GB/s",
        None if given.rate is None else f"{given.rate / 1e12:,.4g} TFLOP/s",
    ]
    words = ", ".join(text for text in told if text) or "unknown"
    return f"{given.device}: {words}" if given.device else words


def _dataset(one: Lengths, given: Given) -> list[str]:
    answer = "answers of unknown length" if one.new_tokens is None else f"answers of at most {one.new_tokens:,} tokens"
    heads = ["budget", "methods", "kept", "of prompt", "KV", "step reads", "ms/token", "speed-up", "needs"]
    heads += [] if given.memory is None else ["batch", f"on {given.memory / GIB:,.4g} GiB"]
    table = aligned(heads, [_cells(line, one.tokens, given) for line in one.lines], words=2)
    return [f"{one.dataset}: prompts of {one.tokens:,} tokens ({_SOURCES[one.source]}), {answer}", *table, _hours(one)]


def _cells(line: Line, tokens: int, given: Given) -> list[str]:
    shown = list(line.methods)
    methods = ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")
    cells = [
        line.label,
        methods + (" (after the last layer)" if line.scope == "model" else ""),
        f"{line.kept:,}",
        f"{line.kept / tokens:.1%}",
        size(line.kv),
        size(line.read),
        "?" if line.ms is None else f"{line.ms:.3g}",
        f"{line.speed_up:.2f}x",
        size(line.needs),
    ]
    if given.memory is not None:
        fits = "may fit" if line.needs <= given.memory else f"{size(line.needs - given.memory)} too many"
        cells += [str(line.batch), fits]
    return cells


def _hours(one: Lengths) -> str:
    def told(hours: float | None, needs: str) -> str:
        if hours is None:
            return f"unknown ({needs})"
        return f"{hours:.3g} h" if hours >= 0.1 else f"{hours * 60:.2g} min"

    prefill = told(one.prefill_hours, "--matmul TFLOP/s")
    decode = told(one.decode_hours, "--bandwidth GB/s" if one.new_tokens else "its answers have no length")
    return f"  time at least: prefills {prefill}, decoding {decode}"
