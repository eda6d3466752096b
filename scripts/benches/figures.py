"""Turn samples into the figures that a bench prints: medians, percentiles, and the machine they were taken on.

Pure but for `machine`, which asks the system and git. Knows nothing of requests or processes.
"""

from __future__ import annotations

import math
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path

MIN_P99_SAMPLES = 1000
"""Below this a 99th percentile is an anecdote, and none is printed."""

ROOT = Path(__file__).resolve().parents[2]


def median(values: Sequence[float], digits: int = 1) -> float:
    """Return the rounded median."""
    return round(statistics.median(values), digits)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return the nearest-rank percentile of ascending values."""
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def spread_ms(seconds: Sequence[float]) -> dict[str, float | int]:
    """Return count, p50, p99 (from 1,000 samples on) and maximum of durations in seconds, in milliseconds."""
    ordered = sorted(seconds)
    if not ordered:
        return {"samples": 0}
    figures: dict[str, float | int] = {"samples": len(ordered), "p50": round(1000 * percentile(ordered, 50), 2)}
    if len(ordered) >= MIN_P99_SAMPLES:
        figures["p99"] = round(1000 * percentile(ordered, 99), 2)
    figures["max"] = round(1000 * ordered[-1], 2)
    return figures


def table(columns: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    """Return lines under their columns' names, as wide as their contents: texts to the left, the rest to the right."""
    cells = [[str(cell) for cell in line] for line in (columns, *lines)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    is_text = [all(isinstance(cell, str) for cell in column) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if text else cell.rjust(width)
            for cell, width, text in zip(line, widths, is_text, strict=True)
        ).rstrip()
        for line in cells
    )


def machine() -> dict[str, object]:
    """Describe where and from what the figures come: processors, memory in GiB, Python, commit."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=8"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "cpu": _cpu_name(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "python": platform.python_version(),
        "commit": described.stdout.strip() or "unknown",
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()
