"""Weigh a batch window: a service that waits a few milliseconds for company takes turns with one that does not.

Both are loaded with the real model, and the one whose turn it is not costs nothing. Embeddings of one text and raw
bodies, by one user, who has only the wait, and by many, whose requests may join. A window pays where its rate is higher
and nobody's latency is worse for it. Knows requests and their times, not how a batch is made.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
from collections.abc import Mapping, Sequence

from benches import api_embeddings
from benches.api_embeddings import Mode, embeddings_body, make_texts
from benches.api_forms import ENGINE_SETTINGS
from benches.figures import median, percentile, table
from benches.real_model import load_tokenizer, prepare_image, running_model
from benches.service import BenchError, Target
from benches.streams import make_request, run_streams
from inference_api.server.tokenizer import Tokenizer

WINDOW_NAME = "INFERENCE_API_BATCH_WINDOW_SECONDS"
WINDOW_SECONDS = 0.005
OFF, ON = "off", "on"
COLUMNS = ("what", "window", "requests/s", "p50 ms", "p95 ms", "rate on/off", "p50 on/off")


@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    """How much a run measures: how requests come, the length of each text in tokens, rounds."""

    modes: tuple[Mode, ...]
    text_tokens: int
    rounds: int


SIZES = {
    "full": Size((Mode("1_user", 32, 1, 1), Mode("8_users", 64, 1, 8), Mode("32_users", 128, 1, 32)), 16, 5),
    "quick": Size((Mode("1_user", 8, 1, 1), Mode("32_users", 64, 1, 32)), 16, 2),
    "tiny": Size((Mode("1_user", 2, 1, 1), Mode("2_users", 2, 1, 2)), 8, 1),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """A route that a window may help: how a text is sent there, and how many requests of each user a turn has."""

    path: str
    is_raw: bool
    requests_a_user: int | None = None
    """None for those of the mode; fewer where each is a whole generation."""

    def body(self, text: str) -> object:
        """Return the body of a request for one text."""
        return text.encode() if self.is_raw else embeddings_body([text])


ASKED = {"embeddings": Asked(api_embeddings.PATH, is_raw=False), "raw_body": Asked("/", is_raw=True, requests_a_user=1)}


@dataclasses.dataclass(slots=True)
class Record:
    """What a service did, a number a round, and the seconds of every request."""

    rates: list[float] = dataclasses.field(default_factory=list)
    p50_seconds: list[float] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)

    def add(self, rate: float, seconds: Sequence[float]) -> None:
        """Take a turn in."""
        self.rates.append(rate)
        self.p50_seconds.append(statistics.median(seconds))
        self.seconds += seconds

    def figures(self) -> dict[str, float]:
        """Return the medians over rounds, and the 95th percentile of all requests."""
        return {
            "requests_per_second": median(self.rates, 2),
            "p50_ms": round(1000 * statistics.median(self.p50_seconds), 2),
            "p95_ms": round(1000 * percentile(sorted(self.seconds), 95), 2),
        }


def run(size_name: str) -> dict[str, object]:
    """Measure both services; return the figures and print a table. Raises BenchError if an answer has no result."""
    size = SIZES[size_name]
    tokenizer = load_tokenizer(prepare_image())
    records: Records = {}
    with (
        running_model({**ENGINE_SETTINGS, WINDOW_NAME: "0"}) as off,
        running_model({**ENGINE_SETTINGS, WINDOW_NAME: str(WINDOW_SECONDS)}) as on,
    ):
        targets = {OFF: off.direct, ON: on.direct}
        for round_number in range(-1, size.rounds):  # the first one is not counted
            for mode in size.modes:
                for name, asked in ASKED.items():
                    texts = _texts(tokenizer, asked, mode, size, round_number)
                    for window in (OFF, ON) if round_number % 2 == 0 else (ON, OFF):
                        rate, seconds = _ask(targets[window], asked, texts, mode.num_users)
                        if round_number >= 0:
                            what = f"{name}_{mode.name}"
                            records.setdefault(what, {OFF: Record(), ON: Record()})[window].add(rate, seconds)
                            print(f"window {window}, {what}: {rate:.1f} requests/s", file=sys.stderr)
    figures = {what: window_figures(of) for what, of in records.items()}
    print(window_table(figures))
    return {"window_seconds": WINDOW_SECONDS, "rounds": size.rounds, "what": figures}


Records = dict[str, dict[str, Record]]


def window_figures(records: Mapping[str, Record]) -> dict[str, dict[str, float]]:
    """Return the figures of both, and those of the window over those without: the medians of the rounds' ratios."""
    off, on = records[OFF], records[ON]
    ratios = {
        "rate": median([a / b for a, b in zip(on.rates, off.rates, strict=True)], 3),
        "p50": median([a / b for a, b in zip(on.p50_seconds, off.p50_seconds, strict=True)], 3),
    }
    return {OFF: off.figures(), ON: on.figures(), "on_over_off": ratios}


def window_table(figures: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """Return a line for each way to ask, with the window and without."""
    lines = []
    for what, of in figures.items():
        for window in (OFF, ON):
            ratios = tuple(of["on_over_off"].values()) if window == ON else ("-", "-")
            lines.append((what, window, *of[window].values(), *ratios))
    return table(COLUMNS, lines)


def _texts(tokenizer: Tokenizer, asked: Asked, mode: Mode, size: Size, round_number: int) -> list[str]:
    if asked.requests_a_user is not None:
        mode = dataclasses.replace(mode, num_requests=mode.num_users * asked.requests_a_user)
    return [text for texts in make_texts(tokenizer, mode, size.text_tokens, round_number) for text in texts]


def _ask(target: Target, asked: Asked, texts: Sequence[str], num_users: int) -> tuple[float, list[float]]:
    """Send a request a text, `num_users` at a time; return requests a second, and the seconds of each."""
    requests = [make_request(target, asked.path, asked.body(text)) for text in texts]
    answers = [recording.parse() for recording in run_streams(target, requests, num_users)]
    for answer in answers:
        if not json.loads(answer.body):
            raise BenchError(f"an answer without a result: {answer.body[:300]!r}")
    seconds = max(answer.ended_at for answer in answers) - min(answer.sent_at for answer in answers)
    return len(answers) / seconds, [answer.ended_at - answer.sent_at for answer in answers]
