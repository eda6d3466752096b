"""Make the workloads of the `peers` bench, and turn the timelines of a turn into figures.

The jobs of a turn are drawn from a seed that its round sets: all contenders of a round get the same ids, and no round
repeats a prompt. Pure but for reading the tokenizer. Knows nothing of who is measured.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Mapping, Sequence

from benches.figures import MIN_P99_SAMPLES, median, percentile
from benches.peer_contender import PeerJob, Timeline
from benches.service import BenchError
from benches.workload import SEED, WORDS
from inference_api.server.tokenizer import Tokenizer

MAX_DRAWS = 1000
"""Texts are drawn so often until one encodes to the wanted number of ids again."""


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """Jobs that a turn sends: how many, by how many users, and inclusive bounds of prompt and answer in tokens."""

    name: str
    num_jobs: int
    num_users: int
    prompt: tuple[int, int]
    answer: tuple[int, int]

    @classmethod
    def fixed(cls, num_users: int, prompt_tokens: int, answer_tokens: int) -> Workload:
        """Return a workload of one job a user, all of the same lengths."""
        name = f"{num_users}_users" if num_users > 1 else "1_user"
        return cls(name, num_users, num_users, (prompt_tokens, prompt_tokens), (answer_tokens, answer_tokens))

    @classmethod
    def one_prompt(cls, prompt_tokens: int) -> Workload:
        """Return a workload of a prompt alone."""
        return cls(f"prompt_of_{prompt_tokens}", 1, 1, (prompt_tokens, prompt_tokens), (1, 1))

    @property
    def is_prompt_alone(self) -> bool:
        """Say whether nothing is measured but a prompt and its first token."""
        return self.num_jobs == 1 and self.answer == (1, 1)

    @property
    def is_fixed(self) -> bool:
        """Say whether all jobs have the same lengths, and answers that take more than the prompt's own step."""
        return self.prompt[0] == self.prompt[1] and 1 < self.answer[0] == self.answer[1]

    def make_jobs(self, tokenizer: Tokenizer, round_number: int) -> list[PeerJob]:
        """Draw the jobs of a round; the same arguments make the same jobs."""
        source = random.Random(f"{SEED} {self.name} {round_number}")
        return [
            make_job(tokenizer, source, source.randint(*self.prompt), source.randint(*self.answer))
            for _ in range(self.num_jobs)
        ]


def make_job(tokenizer: Tokenizer, source: random.Random, prompt_tokens: int, answer_tokens: int) -> PeerJob:
    """Draw a job whose text encodes to exactly `prompt_tokens` ids; raise BenchError if no text does."""
    words = WORDS.split()
    for _ in range(MAX_DRAWS):
        prompt_ids = tokenizer.encode(" ".join(source.choices(words, k=prompt_tokens)))[:prompt_tokens]
        text = tokenizer.decode(prompt_ids)
        if tokenizer.encode(text) == prompt_ids:
            return PeerJob(tuple(prompt_ids), text, answer_tokens)
    raise BenchError(f"no text of {prompt_tokens} ids is found for this model's tokenizer")


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """What one contender did in one turn of a workload."""

    timelines: Sequence[Timeline]
    others_share: float
    """Of the machine's processors, what neither the contender nor the client took."""

    @property
    def seconds(self) -> float:
        """From the first send to the last byte."""
        return max(line.ended_at for line in self.timelines) - min(line.sent_at for line in self.timelines)

    def figures(self, workload: Workload) -> dict[str, float]:
        """Return the rate, the latencies in milliseconds, and for a prompt alone the rate of its prefill."""
        first = sorted(line.first_token_seconds for line in self.timelines)
        gaps = sorted(seconds for line in self.timelines for _, seconds in line.gaps)
        figures = {
            "tokens_per_second": sum(line.num_tokens for line in self.timelines) / self.seconds,
            "others_share": self.others_share,
            **_spread("first_token_ms", first),
            **_spread("gap_ms", gaps),
        }
        if "gap_ms_p99" in figures and figures["gap_ms_p50"] > 0:
            figures["gap_p99_over_p50"] = figures["gap_ms_p99"] / figures["gap_ms_p50"]
        if workload.is_prompt_alone:
            figures["prefill_tokens_per_second"] = workload.prompt[0] / first[0]
        return figures


def _spread(name: str, ordered: Sequence[float]) -> dict[str, float]:
    """Return p50, the longest, and p99 if they are enough for one, of ascending seconds."""
    if not ordered:
        return {}
    parts = {"p50": percentile(ordered, 50), "max": ordered[-1]}
    if len(ordered) >= MIN_P99_SAMPLES:
        parts["p99"] = percentile(ordered, 99)
    return {f"{name}_{part}": 1000 * seconds for part, seconds in parts.items()}


def medians(turns: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median over rounds of each figure that every round has, and how often it was taken.

    A round may lack a p99 that another has: tokens that arrive together leave fewer gaps.
    """
    names = [name for name in turns[0] if all(name in turn for turn in turns)]
    return {name: median([turn[name] for turn in turns], 2) for name in names} | {"rounds": len(turns)}


@dataclasses.dataclass(frozen=True, slots=True)
class Admission:
    """Long prompts that come while other rows decode: `num_rows` of them, each until the last prompt has its token."""

    num_rows: int
    row_prompt_tokens: int
    row_answer_tokens: int
    num_prompts: int
    prompt_tokens: int

    def make_jobs(self, tokenizer: Tokenizer) -> list[PeerJob]:
        """Return the rows' jobs, one that ends when all of them decode, and the long prompts that then take its place.

        Served by `num_rows` + 1 users, each prompt is sent when the one before it has ended.
        """
        source = random.Random(SEED)
        rows = [
            make_job(tokenizer, source, self.row_prompt_tokens, self.row_answer_tokens) for _ in range(self.num_rows)
        ]
        trigger = make_job(tokenizer, source, self.row_prompt_tokens, max(1, self.row_answer_tokens // 4))
        prompts = [make_job(tokenizer, source, self.prompt_tokens, 1) for _ in range(self.num_prompts)]
        return [*rows, trigger, *prompts]

    def figures(self, timelines: Sequence[Timeline]) -> dict[str, float]:
        """Return the rows' gaps (milliseconds) while a prompt is admitted and while none is, and what they come to."""
        rows, prompts = timelines[: self.num_rows], timelines[self.num_rows + 1 :]
        windows = [(line.sent_at, line.arrivals[0]) for line in prompts]
        decoding_at = max(line.arrivals[0] for line in timelines[: self.num_rows + 1])
        beside: list[float] = []
        alone: list[float] = []
        for at, seconds in _gaps_from(rows, decoding_at):
            admitting = any(began < at and at - seconds < ended for began, ended in windows)
            (beside if admitting else alone).append(seconds)
        p50_alone = percentile(sorted(alone), 50) if alone else 0.0
        p50, p99 = (percentile(sorted(beside), percent) for percent in (50, 99)) if beside else (0.0, 0.0)
        if not p50 or not p50_alone:
            # The rows had ended before a prompt came, or their ids came several at once.
            return {"gaps_beside": len(beside)}
        return {
            "gaps_beside": len(beside),
            "gap_ms_p50_alone": 1000 * p50_alone,
            "gap_ms_p50_beside": 1000 * p50,
            "gap_ms_p99_beside": 1000 * p99,
            "p99_over_p50_beside": p99 / p50,
            "p99_beside_over_p50_alone": p99 / p50_alone,
            "first_token_ms_p50": 1000 * percentile(sorted(line.first_token_seconds for line in prompts), 50),
        }


def _gaps_from(rows: Sequence[Timeline], start: float) -> Iterator[tuple[float, float]]:
    return ((at, seconds) for line in rows for at, seconds in line.gaps if at - seconds >= start)
