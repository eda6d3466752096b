"""Measure the HTTP API: what each surface, form and load costs, and the service under load tools beside its peers.

Parts: `surfaces` on the mock; `forms`, `embeddings` and `window` on the real model; `load` with guidellm and locust.
Each prints its table, and is a member of the result. A part that does not run through ends the bench; what a part
cannot measure stands in its `not_measured`. Knows the parts by name.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from benches import api_embeddings, api_forms, api_load, api_surfaces, api_window

ALONE: dict[str, Callable[[str], dict[str, object]]] = {
    "surfaces": api_surfaces.run,
    "forms": api_forms.run,
    "embeddings": api_embeddings.run,
    "window": api_window.run,
}
LOAD = "load"
PARTS = (*ALONE, LOAD)


def run(size_name: str, peers_folder: Path | None = None, part: str | None = None) -> dict[str, object]:
    """Run all parts, or one; return their figures. Raises BenchError if any answer is not what it must be."""
    figures: dict[str, object] = {}
    for name in PARTS if part is None else (part,):
        print(f"api: {name}", file=sys.stderr)
        began = time.monotonic()
        measured = api_load.run(size_name, peers_folder) if name == LOAD else ALONE[name](size_name)
        figures[name] = {"seconds": round(time.monotonic() - began, 1), **measured}
        print()
    return figures
