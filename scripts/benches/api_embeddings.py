"""Measure embeddings a second over HTTP beside transformers' own model in a process, on the same texts, in turns.

Texts go to the OpenAI route one a request, by one user and by many, and many a request. The baseline pools the same
texts, and the two sides' vectors are compared: a fast wrong answer would be none. Knows requests and their times.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from benches.api_forms import ENGINE_SETTINGS
from benches.api_surface import MODEL
from benches.figures import median, table
from benches.peer_process import last_lines, peer_environ, running_tree
from benches.peer_workloads import Workload
from benches.real_model import load_tokenizer, prepare_image, running_model
from benches.service import BenchError, Target
from benches.streams import Answer, make_request, run_streams
from inference_api.server.tokenizer import Tokenizer

PATH = "/v1/embeddings"
OURS, BASELINE = "ours", "transformers"
Vectors = list[list[float]]
COLUMNS = ("texts", "who", "texts/s", "request p50 ms", "over transformers")


@dataclasses.dataclass(frozen=True, slots=True)
class Mode:
    """One way to ask for embeddings: requests, texts in each, and users."""

    name: str
    num_requests: int
    texts_a_request: int
    num_users: int


@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    """How much a run measures: modes, the length of each text in tokens, rounds; the baseline has a thread a core.

    `baseline_threads` is for a run beside others, where threads that wait for each other in loops hardly get anywhere.
    """

    modes: tuple[Mode, ...]
    text_tokens: int
    rounds: int
    baseline_threads: int | None = None


SIZES = {
    "full": Size(
        (Mode("single_1_user", 64, 1, 1), Mode("single_32_users", 256, 1, 32), Mode("batches_of_32", 8, 32, 1)), 16, 5
    ),
    "quick": Size(
        (Mode("single_1_user", 16, 1, 1), Mode("single_32_users", 64, 1, 32), Mode("batches_of_32", 2, 32, 1)), 16, 2
    ),
    "tiny": Size(
        (Mode("single_1_user", 2, 1, 1), Mode("single_2_users", 2, 1, 2), Mode("batches_of_2", 1, 2, 1)), 8, 1
    ),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Embedded:
    """What a turn came to: seconds from its first send to its last answer, those of each request, and all vectors."""

    seconds: float
    request_seconds: Sequence[float]
    vectors: Vectors

    @property
    def rate(self) -> float:
        """Texts a second."""
        return len(self.vectors) / self.seconds


@dataclasses.dataclass(slots=True)
class Record:
    """What someone did in one mode, a number a round."""

    rates: list[float] = dataclasses.field(default_factory=list)
    request_seconds: list[float] = dataclasses.field(default_factory=list)

    def add(self, turn: Embedded) -> None:
        """Take a turn in."""
        self.rates.append(turn.rate)
        self.request_seconds += turn.request_seconds

    def figures(self, baseline: Record | None) -> dict[str, float]:
        """Return the medians, and the median of the rounds' ratios to the baseline's rates."""
        figures = {
            "texts_per_second": median(self.rates),
            "request_ms_p50": round(1000 * statistics.median(self.request_seconds), 2),
        }
        if baseline is not None and baseline is not self:
            pairs = zip(self.rates, baseline.rates, strict=True)
            figures["over_transformers"] = median([rate / base for rate, base in pairs], 3)
        return figures


def run(size_name: str) -> dict[str, object]:
    """Measure all modes; return the figures and print a table. Raises BenchError if an answer lacks a vector."""
    size, image = SIZES[size_name], prepare_image()
    with running_model(ENGINE_SETTINGS) as service, _Baseline.started(image, size) as baseline:
        records, cosines = _measure(service.direct, baseline, load_tokenizer(image), size)
    figures = {
        mode: {who: record.figures(of.get(BASELINE)) for who, record in of.items()} for mode, of in records.items()
    }
    columns = ("texts_per_second", "request_ms_p50", "over_transformers")
    print(
        table(
            COLUMNS, [(m, who, *(f.get(c, "-") for c in columns)) for m, of in figures.items() for who, f in of.items()]
        )
    )
    closeness = {"min": round(min(cosines), 4), "median": median(cosines, 4)}
    return {"text_tokens": size.text_tokens, "rounds": size.rounds, "modes": figures, "cosine": closeness}


def _measure(
    target: Target, baseline: _Baseline, tokenizer: Tokenizer, size: Size
) -> tuple[dict[str, dict[str, Record]], list[float]]:
    records: dict[str, dict[str, Record]] = {}
    cosines: list[float] = []
    for round_number in range(-1, size.rounds):  # the first one is not counted: threads and buffers are made in it
        for mode in size.modes:
            texts = make_texts(tokenizer, mode, size.text_tokens, round_number)
            turns = {OURS: embed(target, texts, mode.num_users)}
            if mode.num_users == 1:
                turns[BASELINE] = baseline.embed(texts)
                cosines += list(map(cosine, turns[OURS].vectors, turns[BASELINE].vectors))
            for name, turn in turns.items() if round_number >= 0 else ():
                records.setdefault(mode.name, {}).setdefault(name, Record()).add(turn)
                print(f"embeddings, {mode.name}, {name}: {turn.rate:.1f} texts/s", file=sys.stderr)
    return records, cosines


def make_texts(tokenizer: Tokenizer, mode: Mode, text_tokens: int, round_number: int) -> list[list[str]]:
    """Draw the texts of a mode's requests; no round repeats one."""
    num_texts = mode.num_requests * mode.texts_a_request
    lengths = (text_tokens, text_tokens)
    jobs = Workload(mode.name, num_texts, 1, lengths, lengths).make_jobs(tokenizer, round_number)
    texts = [job.text for job in jobs]
    return [texts[start : start + mode.texts_a_request] for start in range(0, num_texts, mode.texts_a_request)]


def embeddings_body(texts: Sequence[str]) -> dict[str, object]:
    """Return the body of a request for the embeddings of some texts."""
    return {"model": MODEL, "input": list(texts)}


def embed(target: Target, requests: Sequence[Sequence[str]], num_users: int) -> Embedded:
    """Send the requests, `num_users` at a time; blocks. Raises BenchError if an answer has not a vector a text."""
    asked = [make_request(target, PATH, embeddings_body(texts)) for texts in requests]
    recordings = sorted(run_streams(target, asked, num_users), key=lambda recording: recording.sent_at)
    answers = [recording.parse() for recording in recordings]
    vectors = [_vectors(answer, len(texts)) for answer, texts in zip(answers, requests, strict=True)]
    return Embedded(
        max(answer.ended_at for answer in answers) - min(answer.sent_at for answer in answers),
        [answer.ended_at - answer.sent_at for answer in answers],
        [vector for of in vectors for vector in of],
    )


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the cosine of the angle between two vectors."""
    products = sum(a * b for a, b in zip(one, other, strict=True))
    return float(products / (sum(a * a for a in one) * sum(b * b for b in other)) ** 0.5)


def _vectors(answer: Answer, num_texts: int) -> Vectors:
    data = json.loads(answer.body).get("data")
    if not isinstance(data, list) or [entry.get("index") for entry in data] != list(range(num_texts)):
        raise BenchError(f"no vector a text, in order: {answer.body[:300]!r}")
    return [entry["embedding"] for entry in data]


@dataclasses.dataclass(frozen=True, slots=True)
class _Baseline:
    """The process of `api_pooled`, by its two pipes."""

    requests: IO[str]
    answers: IO[str]
    log: Path

    @classmethod
    @contextlib.contextmanager
    def started(cls, image: Path, size: Size) -> Iterator[_Baseline]:
        """Run the process until the block ends; blocks until its model is loaded."""
        num_threads = size.baseline_threads or len(os.sched_getaffinity(0))
        command = [sys.executable, "-m", "benches.api_pooled", str(image), str(num_threads)]
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            log = Path(folder) / "log"
            with running_tree(command, log, peer_environ({}), piped=True) as process:
                if process.stdin is None or process.stdout is None or not process.stdout.readline():
                    raise BenchError(f"transformers' model did not start: {last_lines(log)}")
                yield cls(process.stdin, process.stdout, log)

    def embed(self, requests: Sequence[Sequence[str]]) -> Embedded:
        """Embed each request's texts as one batch, one request after the other; blocks."""
        self.requests.write(json.dumps(requests) + "\n")
        self.requests.flush()
        line = self.answers.readline()
        if not line:
            raise BenchError(f"transformers' model ended: {last_lines(self.log)}")
        answers: list[tuple[float, Vectors]] = json.loads(line)
        seconds = [of for of, _ in answers]
        return Embedded(sum(seconds), seconds, [vector for _, vectors in answers for vector in vectors])
