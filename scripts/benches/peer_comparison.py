"""Compare what the contenders of the `peers` bench came to: ratios to the best peer, and the table of a run.

The best peer is each figure's own: the fastest in tokens a second, the shortest in every latency. Pure; knows figures
by name, not how they were taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from benches.figures import table
from benches.peer_contender import ENGINE, OURS

Summary = Mapping[str, Mapping[str, float]]
"""The figures of one workload, by contender."""

COLUMNS = (
    *("workload", "contender", "tokens/s", "of best peer"),
    *("first token p50 ms", "of best", "p99 ms", "of best"),
    *("gap p50 ms", "p99 ms", "p99/p50"),
)
EMPTY = "-"
NOT_COMPARED = frozenset({"others_share", "rounds"})


def best_peer(figure: str, summary: Summary) -> str | None:
    """Return who of the peers is best in a figure; None if one of them lacks it, or if there is no peer."""
    peers = [name for name in summary if name not in (OURS, ENGINE)]
    if not peers or not all(figure in summary[name] for name in peers):
        return None
    return (max if figure.endswith("per_second") else min)(peers, key=lambda name: summary[name][figure])


def over_best(figure: str, name: str, summary: Summary) -> float | None:
    """Return a contender's figure over the best peer's; None where there is none to compare."""
    best = best_peer(figure, summary)
    if best is None or figure not in summary[name] or not summary[best][figure]:
        return None
    return round(summary[name][figure] / summary[best][figure], 3)


def ratios(summary: Summary) -> dict[str, dict[str, object]]:
    """Return our figures over those of the best peer, each figure's own; empty where no peer was measured."""
    compared = {figure: over_best(figure, OURS, summary) for figure in summary[OURS] if figure not in NOT_COMPARED}
    return {
        figure: {"ours_over_best": ratio, "best": best_peer(figure, summary)}
        for figure, ratio in compared.items()
        if ratio is not None
    }


def comparison_table(
    workloads: Mapping[str, Summary], efficiency: Summary, admission: Mapping[str, float], memory: Mapping[str, float]
) -> str:
    """Return the table of a run, and below it shares of engine and machine, the admission's gaps, and memory.

    A prompt alone stands with the rate of its prefill; `max` marks the longest of all where they are too few for a p99.
    """
    lines = [line for name, summary in workloads.items() for line in _lines(name, summary)]
    shares = [
        (name, *(found.get(share, EMPTY) for share in ("http_over_engine", "engine_over_bound")))
        for name, found in efficiency.items()
    ]
    blocks = (
        table(COLUMNS, lines),
        table(("workload", "HTTP over engine", "engine over bound"), shares),
        table(("prompts beside decoding rows", "ours"), list(admission.items())),
        table(("contender", "memory MiB"), list(memory.items())),
    )
    return "\n\n".join(blocks)


def _lines(workload: str, summary: Summary) -> Iterator[tuple[object, ...]]:
    for name, figures in summary.items():
        rate = "prefill_tokens_per_second" if "prefill_tokens_per_second" in figures else "tokens_per_second"
        yield (
            workload,
            name,
            figures[rate],
            _ratio_cell(rate, name, summary),
            figures["first_token_ms_p50"],
            _ratio_cell("first_token_ms_p50", name, summary),
            *_longest_cells("first_token_ms", name, summary),
            figures.get("gap_ms_p50", EMPTY),
            _longest_cells("gap_ms", name, summary)[0],
            figures.get("gap_p99_over_p50", EMPTY),
        )


def _ratio_cell(figure: str, name: str, summary: Summary) -> object:
    ratio = over_best(figure, name, summary)
    return EMPTY if ratio is None else ratio


def _longest_cells(spread: str, name: str, summary: Summary) -> tuple[object, object]:
    """Return a spread's p99 or longest, and what it is over the best peer's."""
    for part, mark in (("p99", ""), ("max", " max")):
        figure = f"{spread}_{part}"
        if figure in summary[name]:
            return f"{summary[name][figure]}{mark}", _ratio_cell(figure, name, summary)
    return EMPTY, EMPTY
