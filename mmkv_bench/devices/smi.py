"""What nvidia-smi says of a device. None wherever it is not there, fails, or cannot know: nothing is guessed."""

from __future__ import annotations

import subprocess

# Bits of `clocks_throttle_reasons.active` in NVIDIA's nvml.h. An idle device's low clock is no throttling, and one that a site
# has set (application clocks) is the same in every pass.
_NONE = 0x1 | 0x2
_REASONS = {
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "display clocks",
}


def asked(query: str, identity: str) -> list[str] | None:
    """Lines of `nvidia-smi --query-<query>` for one device; None if it cannot be asked."""
    command = ["nvidia-smi", f"--query-{query}", "--format=csv,noheader,nounits", f"--id={identity}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def foreign(lines: list[str] | None, own: int) -> tuple[int, ...] | None:
    """Process ids of others among those that compute there.

    A process that is not in the list although it has a context there (it asked through CUDA) reads it from inside a
    container that hides or renumbers processes: then nothing is known.
    """
    try:
        found = [int(line) for line in lines or []]
    except ValueError:
        return None
    return tuple(sorted(set(found) - {own})) if own in found else None


def reasons(lines: list[str] | None) -> tuple[str, ...] | None:
    """Names of the reasons in one line with a bit mask as nvidia-smi prints it, `0x0000000000000004`."""
    try:
        mask = int(lines[0], 16) if lines else None
    except ValueError:  # [N/A]
        return None
    if mask is None:
        return None
    known = sum(_REASONS) | _NONE
    unknown = (f"unknown reason {mask & ~known:#x}",) if mask & ~known else ()
    return tuple(name for bit, name in _REASONS.items() if mask & bit) + unknown
