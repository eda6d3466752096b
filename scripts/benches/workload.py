"""Make the requests of the real model's benches: seeded, of mixed lengths, the same for everything that is compared.

Pure but for reading the image's tokenizer. A prompt is plain English words, so that a text of n tokens encodes to about
n again; the counts that the figures use are the backend's own. Knows nothing of HTTP.
"""

from __future__ import annotations

import dataclasses
import random

from inference_api.server.tokenizer import Tokenizer

SEED = 20
WORDS = """
time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work government number night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Lengths:
    """Inclusive bounds of prompt and answer, in tokens."""

    prompt: tuple[int, int]
    answer: tuple[int, int]


MIXED = Lengths(prompt=(16, 400), answer=(32, 256))
SHORT = Lengths(prompt=(8, 50), answer=(4, 32))
TINY = Lengths(prompt=(4, 8), answer=(2, 4))


@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    """How much a bench of the real model sends: jobs, and their lengths."""

    num_jobs: int
    lengths: Lengths


SIZES = {"full": Size(64, MIXED), "quick": Size(64, SHORT), "tiny": Size(3, TINY)}


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One generation to ask for: greedy, so that only the lengths vary."""

    text: str
    max_tokens: int

    @property
    def body(self) -> dict[str, object]:
        """The JSON body of the native routes."""
        return {"text": self.text, "max_tokens": self.max_tokens, "top_k": 1, "seed": SEED}


def make_jobs(count: int, lengths: Lengths, tokenizer: Tokenizer) -> list[Job]:
    """Draw `count` jobs with lengths uniform within the bounds; the same arguments make the same jobs."""
    source = random.Random(SEED)
    words = WORDS.split()
    jobs = []
    for _ in range(count):
        num_tokens = source.randint(*lengths.prompt)
        token_ids = tokenizer.encode(" ".join(source.choices(words, k=num_tokens)))[:num_tokens]
        jobs.append(Job(tokenizer.decode(token_ids), source.randint(*lengths.answer)))
    return jobs
