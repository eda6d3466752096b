"""Price answers in a form on the real model: masked rows beside plain ones of equal length, and their neighbours.

Every form runs at several numbers of rows, in turns with its plain kind. Then one masked row runs among plain ones, and
what those make is set beside what they make among themselves. Tokens are the backend's own counts (`usage`), and every
answer must be as long as it was ordered. Knows how forms are compared, not what they are.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence

from benches.api_form import FORMS, PLAIN, Form
from benches.api_surface import MODEL
from benches.figures import median, table
from benches.peer_contender import Timeline, read_events
from benches.peer_workloads import Turn, Workload
from benches.real_model import load_tokenizer, prepare_image, running_model
from benches.service import BenchError, Service
from benches.streams import Recording, make_request, run_streams
from inference_api.server.tokenizer import Tokenizer

ENGINE_SETTINGS = {"INFERENCE_API_ENGINE": "fused", "INFERENCE_API_SERVED_MODEL_NAMES": MODEL}
BESIDE = "json_schema"
"""The form of the one masked row among plain ones."""


@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    """How much a run measures: rows at a time, the lengths of all prompts and answers in tokens, rounds, forms."""

    rows: tuple[int, ...]
    prompt_tokens: int
    answer_tokens: int
    rounds: int
    forms: tuple[str, ...] = tuple(FORMS)


SIZES = {
    "full": Size((1, 8, 32), 32, 128, 3),
    "quick": Size((1, 8, 32), 16, 32, 1),
    "tiny": Size((1, 2), 4, 8, 1, (PLAIN, "json_schema", "regex", "choice")),
}
Rates = dict[str, list[float]]
"""Tokens a second by form, a number a round."""


def run(size_name: str) -> dict[str, object]:
    """Measure all forms; return the figures and print a table. Raises BenchError if an answer is not as ordered."""
    size = SIZES[size_name]
    tokenizer = load_tokenizer(prepare_image())
    rates: dict[int, Rates] = {num_rows: {} for num_rows in size.rows}
    beside: Rates = {}
    with running_model(ENGINE_SETTINGS) as service:
        bench = _FormBench(service, tokenizer, size)
        for name in size.forms:
            bench.serve([name] * 2)  # its first request waits for the form to be compiled
        for round_number in range(size.rounds):
            names = size.forms if round_number % 2 == 0 else tuple(reversed(size.forms))
            for num_rows in size.rows:
                for name in names:
                    rate = bench.serve([name] * num_rows).rate
                    rates[num_rows].setdefault(name, []).append(rate)
                    print(f"{num_rows} rows, {name}: {rate:.1f} tokens/s", file=sys.stderr)
            for name in (PLAIN, BESIDE) if round_number % 2 == 0 else (BESIDE, PLAIN):
                rate = bench.serve([PLAIN] * (size.rows[-1] - 1) + [name]).rate_of_all_but_the_last
                beside.setdefault(name, []).append(rate)
                print(f"{size.rows[-1] - 1} plain rows beside one of {name}: {rate:.1f} tokens/s", file=sys.stderr)
    figures = {f"{num_rows}_rows": form_figures(of) for num_rows, of in rates.items()}
    neighbours = _neighbour_figures(beside, size.rows[-1] - 1)
    print(forms_table(figures, neighbours))
    lengths = {"prompt_tokens": size.prompt_tokens, "answer_tokens": size.answer_tokens, "rounds": size.rounds}
    return {**lengths, "forms": figures, "neighbours": neighbours}


@dataclasses.dataclass(frozen=True, slots=True)
class Served:
    """Answers in the order in which they were asked for."""

    timelines: Sequence[Timeline]

    @property
    def rate(self) -> float:
        """Tokens a second over all."""
        turn = Turn(self.timelines, 0.0)
        return sum(line.num_tokens for line in turn.timelines) / turn.seconds

    @property
    def rate_of_all_but_the_last(self) -> float:
        """Tokens a second over all answers but the last one."""
        return Served(self.timelines[:-1]).rate


class _FormBench:
    """Ask a service for answers in forms; no prompt comes twice, so that no row begins with what another has read."""

    def __init__(self, service: Service, tokenizer: Tokenizer, size: Size) -> None:
        self._service = service
        self._tokenizer = tokenizer
        self._size = size
        self._num_served = 0

    def serve(self, names: Sequence[str]) -> Served:
        """Ask for an answer in each form, all at once; blocks to the end of the last one."""
        workload = Workload.fixed(len(names), self._size.prompt_tokens, self._size.answer_tokens)
        jobs = workload.make_jobs(self._tokenizer, self._num_served)
        self._num_served += 1
        target, forms = self._service.direct, [FORMS[name] for name in names]
        requests = [make_request(target, form.path, form.body(job)) for form, job in zip(forms, jobs, strict=True)]
        recordings = sorted(run_streams(target, requests, len(requests)), key=lambda recording: recording.sent_at)
        return Served(
            [_timeline(form, recording, workload.answer[0]) for form, recording in zip(forms, recordings, strict=True)]
        )


def _timeline(form: Form, recording: Recording, num_tokens: int) -> Timeline:
    answer = recording.parse()
    arrivals, events = read_events(answer, lambda event: bool(event.get("choices")))
    usage = events[-1].get("usage") if events else None
    made = usage.get("completion_tokens") if isinstance(usage, dict) else None
    if made != num_tokens:
        raise BenchError(f"{form.name} made {made} tokens of {num_tokens}: {answer.body[-300:]!r}")
    return Timeline(answer.sent_at, answer.ended_at, tuple(arrivals), num_tokens)


def form_figures(rates: Rates) -> dict[str, dict[str, float]]:
    """Return each form's rate, and what it is over its plain kind's: the median of the rounds' ratios."""
    figures: dict[str, dict[str, float]] = {}
    for name, values in rates.items():
        figures[name] = {"tokens_per_second": median(values)}
        plain = FORMS[name].plain
        if plain is not None:
            figures[name]["over_plain"] = _ratio(values, rates[plain])
    return figures


def forms_table(figures: Mapping[str, Mapping[str, Mapping[str, float]]], neighbours: Mapping[str, float]) -> str:
    """Return a line a form and number of rows, and below it what neighbours pay."""
    lines = [
        (rows, name, of["tokens_per_second"], of.get("over_plain", "-"))
        for rows, forms in figures.items()
        for name, of in forms.items()
    ]
    blocks = (
        table(("rows", "form", "tokens/s", "over plain"), lines),
        table(("plain rows beside one other", "tokens/s"), list(neighbours.items())),
    )
    return "\n\n".join(blocks)


def _neighbour_figures(beside: Rates, num_neighbours: int) -> dict[str, float]:
    return {
        f"{num_neighbours}_beside_plain": median(beside[PLAIN]),
        f"{num_neighbours}_beside_{BESIDE}": median(beside[BESIDE]),
        "ratio": _ratio(beside[BESIDE], beside[PLAIN]),
    }


def _ratio(values: Sequence[float], plain: Sequence[float]) -> float:
    return median([value / base for value, base in zip(values, plain, strict=True)], 3)
