"""Hold an engine for the bench `memory`: `… IMAGE`, numbers of positions on stdin, an answer a line on stdout.

The process has what the decode backend has around its engine loaded, warmed up as there, and nothing else. The first
line tells what is loaded; each line `N` is answered when all rows hold N positions. Whoever started it measures.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benches.row_steps import GREEDY, execute, fill, unlike_ids
from inference_api.backend.engines.base import Engine, PrefixCopy, RowPlan, SampleSpec
from inference_api.backend.main import load_engine
from inference_api.backend.warmup import warm_up
from inference_api.config import Settings
from inference_api.model_image import ModelImage

PREFILL_CHUNK_TOKENS = 128
"""Set, not tuned: how far the tuning goes changes from start to start, and with it what it leaves in memory."""


def hold(engine: Engine, num_positions: int) -> None:
    """Make all rows hold so many positions, the last one from a step of all rows that draws an id in each.

    Where the engine copies prefixes only row 0 is computed and the others copy it: the same memory is written.
    """
    last = num_positions - 1
    computed = range(1 if engine.info.copies_prefixes and last else engine.info.num_rows)
    for row in computed:
        fill(engine, row, unlike_ids(row, 0, last))
    execute(
        engine,
        [
            RowPlan(
                row,
                last,
                unlike_ids(row, last, 1),
                SampleSpec(GREEDY, 0, num_positions),
                prefix=None if row in computed else PrefixCopy(computed[0], last),
            )
            for row in range(engine.info.num_rows)
        ],
    )


def main() -> int:
    """Load the engine that the settings name, say so, then answer each line of stdin until it ends."""
    settings = Settings.from_environ()
    image = ModelImage.open(Path(sys.argv[1]))
    engine = load_engine(settings, image, min(settings.context_tokens, image.context_tokens))
    warm_up(engine, PREFILL_CHUNK_TOKENS)
    info = engine.info
    facts = {
        "numeric_path": info.device,
        "rows": info.num_rows,
        "context_tokens": info.context_tokens,
        "weight_bytes": info.weight_bytes,
        "kv_bytes": info.kv_bytes,
    }
    print(json.dumps(facts), flush=True)
    for line in sys.stdin:
        hold(engine, int(line))
        print(flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
