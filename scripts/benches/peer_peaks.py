"""Measure what this machine can do at best: multiply and accumulate, and read from memory, with all cores.

`… BUILD_FOLDER THREADS` prints one JSON object; run by the `peers` bench between rounds in a process of its own, for a
neighbour makes a single measurement too low, never too high. Knows the engine's library, nothing of models.
"""

from __future__ import annotations

import functools
import json
import math
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from inference_api.backend.engines.fused_library import Library, open_library

PEAK_INSTRUCTIONS = 12_000_000
READ_BYTES = 1 << 29
TRIES = 30


def macs_per_second(library: Library, bits: int, num_threads: int) -> float:
    """Return the best rate of the multiply instruction for weights of so many bits, all threads together."""
    with ThreadPoolExecutor(num_threads) as pool:
        peak = functools.partial(library.functions.fused_peak_macs, bits)
        return max(math.fsum(pool.map(peak, [PEAK_INSTRUCTIONS] * num_threads)) for _ in range(TRIES))


def read_bytes_per_second() -> float:
    """Return the best rate of summing numbers that no cache holds."""
    numbers = torch.ones(READ_BYTES // 8, dtype=torch.int64)
    fastest = float("inf")
    for _ in range(TRIES):
        began = time.perf_counter()
        numbers.sum()
        fastest = min(fastest, time.perf_counter() - began)
    return READ_BYTES / fastest


def main() -> int:
    """Measure both and print them."""
    num_threads = int(sys.argv[2])
    torch.set_num_threads(num_threads)
    library = open_library(Path(sys.argv[1]))
    rates = {f"macs_per_second_{bits}_bits": macs_per_second(library, bits, num_threads) for bits in (4, 8)}
    print(json.dumps(rates | {"read_bytes_per_second": read_bytes_per_second()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
