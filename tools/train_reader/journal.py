"""The clock of a training and the lines that it writes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from mmkv_bench import devices

BEGIN = time.perf_counter() - (time.time() - psutil.Process().create_time())
"""When this process began, by `perf_counter`; imports take seconds."""


class Clock:
    """Seconds since the process began, those of earlier parts of the training included."""

    def __init__(self, total: float):
        self.total, self.earlier = total, 0.0

    def now(self) -> float:
        return time.perf_counter() - BEGIN + self.earlier


class Journal:
    """Lines of log.jsonl, and the sums between two of them."""

    def __init__(self, file: Path, clock: Clock, device: str):
        self.file, self.clock, self.device = file, clock, devices.at(device)
        self.spans: list[Any] = []
        self.clear()

    def clear(self) -> None:
        self.sums: dict[str, Any] = {}
        self.counts: dict[str, int] = {}
        self.since, self.wait, self.samples, self.answers, self.steps = self.clock.now(), 0.0, 0, 0, 0

    def add(self, parts: dict[str, torch.Tensor], kind: str | None = None) -> None:
        for name, value in parts.items():
            for key in (name, *((f"{name}.{kind}",) if kind and name in ("answer", "exact") else ())):
                self.sums[key] = self.sums.get(key, 0) + value.detach()
                self.counts[key] = self.counts.get(key, 0) + 1

    def span(self) -> None:
        """Mark a beginning or an end of computing, in turn."""
        self.spans.append(self.device.mark())

    def write(self, **values: Any) -> None:
        """Write a line of the means since the last one."""
        if self.steps:
            wall = self.clock.now() - self.since
            pairs = zip(self.spans[::2], self.spans[1::2], strict=False)
            busy = sum(self.device.between(start, end) for start, end in pairs)
            self.spans.clear()
            values |= {name: round(float(value) / self.counts[name], 4) for name, value in self.sums.items()}
            values |= {"samples_s": round(self.samples / wall, 1), "answers_s": round(self.answers / wall, 1)}
            values |= {
                "steps": self.steps,
                "span_s": round(wall, 2),
                "wait_s": round(self.wait, 2),
                "gpu_s": round(busy, 2),
            }
        self.line(**values)
        self.clear()

    def line(self, **values: Any) -> None:
        text = json.dumps({"wall_s": round(self.clock.now(), 1), **values})
        print(text, flush=True)
        with self.file.open("a") as log:
            log.write(text + "\n")
