"""Compare what an engine will allocate with what the machine and the cgroup have left, before it allocates.

Runs once in PROCESS 2's start. Reads /proc/meminfo and the cgroup's files; knows nothing of tensors.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from inference_api.errors import MemoryShortError

_CGROUP_V2 = ("memory.max", "memory.current")
_CGROUP_V1 = ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")


def free_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that may still be allocated: MemAvailable, or the cgroup's rest if that is less.

    Sources: proc(5) for MemAvailable, cgroups(7) for the limits. Page cache that the cgroup holds can be reclaimed and
    counts as free where memory.stat tells it.
    """
    fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines() if ":" in line)
    available = int(fields["MemAvailable"].split()[0]) * 1024
    for limit_name, usage_name in (_CGROUP_V2, _CGROUP_V1):
        limit, usage = _read_number(cgroup / limit_name), _read_number(cgroup / usage_name)
        if limit is not None and usage is not None:
            available = min(available, max(0, limit - usage + _reclaimable_bytes(cgroup)))
    return available


def check_memory(needed_bytes: int, available_bytes: int, num_rows: int, context_tokens: int) -> None:
    """Raise MemoryShortError with both numbers and the settings that lower the need, if it does not fit."""
    if needed_bytes > available_bytes:
        raise MemoryShortError(
            f"weights and KV cache need {needed_bytes / 2**20:.0f} MiB and {available_bytes / 2**20:.0f} MiB are free: "
            f"{_advice(num_rows, context_tokens)}"
        )


@contextmanager
def one_line_shortage(num_rows: int, context_tokens: int) -> Iterator[None]:
    """Turn memory that runs out while an engine loads into a MemoryShortError with what lowers the need."""
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as error:
        # torch raises a RuntimeError with these words (c10/core/impl/alloc_cpu.cpp).
        is_shortage = isinstance(error, MemoryError) or "allocate memory" in str(error).lower()
        if not is_shortage and getattr(error, "errno", None) != errno.ENOMEM:
            raise
        raise MemoryShortError(
            f"the memory ran out while the engine loaded: {_advice(num_rows, context_tokens)}"
        ) from error


def _advice(num_rows: int, context_tokens: int) -> str:
    return (
        f"lower INFERENCE_API_ROWS ({num_rows}) or INFERENCE_API_CONTEXT_TOKENS ({context_tokens}), "
        "or take a smaller INFERENCE_API_MODEL"
    )


def _reclaimable_bytes(cgroup: Path) -> int:
    """Return the file cache in this cgroup that the kernel drops under pressure."""
    for name in ("memory.stat", "memory/memory.stat"):
        path = cgroup / name
        if path.is_file():
            stat = dict(line.split() for line in path.read_text().splitlines())
            return int(stat.get("inactive_file", stat.get("total_inactive_file", 0)))
    return 0


def _read_number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
