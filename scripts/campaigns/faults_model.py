"""Let rows of the real model fail among others that decode: the second half of the part `faults_rows`.

The service runs a checkpoint of the real model in which one id's embedding is not a number, so that the engine's own
arithmetic makes the logits that are not finite; nothing in the service knows of it. A row takes that id in with its
prompt, or draws it in mid-stream. What it had been sent must be its own, its end must say that it failed, and 31
neighbours must say byte for byte what they say when nothing fails. Knows no scripted fault.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benches.figures import ROOT

from campaigns.faults_streams import draw_prompt, parse_events
from campaigns.part import CampaignError, Context
from campaigns.poisoned_model import write_poisoned_checkpoint
from inference_api.config import Settings
from inference_api.engine_artefacts import ARTEFACTS_FOLDER
from tests.integration.raw_http import RawStream
from tests.integration.service import Service, bearer, running_service

POISONED_WORD = " giraffe"
WORDS = (" of", " and", " in", " to", " for", " is", " on")
"""What a row that will fail draws from, until it draws the poisoned word."""

NAME = "poisoned"
NUM_NEIGHBOURS = 31
NEIGHBOUR_TOKENS = 32
NEIGHBOUR_SECONDS = 120.0
CULPRIT_TOKENS = 64
MAX_DRAWN_TOKENS = 12
"""A culprit whose seed has not drawn the poisoned word by then gets another one."""

MAX_SEEDS = 40
"""Of five seeds four draw it."""


ROUTES = ("inference", "chat")
WHOLE, CUT = "whole", "cut"


@dataclasses.dataclass(frozen=True, slots=True)
class Culprit:
    """A call whose row fails, and the text that it is sent before: none if its prompt has the poisoned word."""

    route: str
    body: dict[str, Any]
    delivered: str = ""


def check_model_rows(context: Context) -> dict[str, int]:
    """Fail as many rows as the counts say; return how many, and how many neighbours ran beside them."""
    rng, num_rows = context.random, context.counts["model_rows"]
    with _poisoned_service(context) as (service, vocab):
        neighbours = [_neighbour(rng) for _ in range(NUM_NEIGHBOURS)]
        with concurrent.futures.ThreadPoolExecutor(NUM_NEIGHBOURS) as clients:
            undisturbed = list(clients.map(lambda body: _ask(service, "inference", body), neighbours))
            if {end for _, end in undisturbed} != {WHOLE}:
                raise CampaignError(f"an undisturbed run of the real model failed: {undisturbed}")
            culprits = [_make_culprit(service, rng, vocab, number) for number in range(num_rows)]
            failed_before, num_run = _num_failed(service), 0
            while culprits:
                running = [clients.submit(_ask, service, "inference", body) for body in neighbours]
                while culprits and not all(future.done() for future in running):
                    number, culprit = len(culprits) - 1, culprits.pop()
                    expected = (culprit.delivered, CUT if culprit.delivered else "500 generation_failed")
                    found = _ask(service, culprit.route, culprit.body)
                    context.count(f"row {number} of the model", _unlike(found, expected))
                for expected, future in zip(undisturbed, running, strict=True):
                    context.count("neighbour of the model", _unlike(future.result(NEIGHBOUR_SECONDS), expected))
                num_run += len(running)
        counted = _num_failed(service) - failed_before
        context.count("rows of the model that failed are counted", _unlike(counted, num_rows))
        foreign = service.metric("inference_api_foreign_tokens_total")
        context.count("ids of the model that match no rule", _unlike(foreign, 0))
    return {"model_rows": num_rows, "model_neighbours": num_run}


@contextlib.contextmanager
def _poisoned_service(context: Context) -> Iterator[tuple[Service, dict[str, int]]]:
    """Run the whole service with the poisoned model until the block ends; give it and the ids of the model's pieces."""
    cache = Settings.from_environ().cache_path
    command = [sys.executable, "-m", "inference_api.prepare", "--cache", str(cache)]
    image = Path(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, cwd=ROOT).stdout.strip())
    vocab: dict[str, int] = json.loads((image / "tokenizer.json").read_text())["model"]["vocab"]
    with tempfile.TemporaryDirectory(prefix="poisoned-", dir=context.folder) as name:
        folder = Path(name)
        write_poisoned_checkpoint(image, folder / NAME, _id_of(vocab, POISONED_WORD))
        if (cache / ARTEFACTS_FOLDER).is_dir():
            # The engine's library, which else would be compiled again; the weights are packed anew.
            ignore = shutil.ignore_patterns("*.bin")
            shutil.copytree(cache / ARTEFACTS_FOLDER, folder / "cache" / ARTEFACTS_FOLDER, ignore=ignore)
        settings: dict[str, Any] = {"INFERENCE_API_CACHE_DIR": str(folder / "cache"), "SERVED_MODEL_NAMES": NAME}
        with running_service("--model", str(folder / NAME), proxy=True, mock=False, **settings) as service:
            yield service, vocab


def _id_of(vocab: dict[str, int], word: str) -> int:
    """Return the one id of a word with its blank, as byte-level vocabularies write it."""
    return vocab[word.replace(" ", "\u0120")]


def _neighbour(rng: random.Random) -> dict[str, Any]:
    return {"text": draw_prompt(rng, rng.randint(1, 60)), "seed": rng.randrange(2**31), "max_tokens": NEIGHBOUR_TOKENS}


def _make_culprit(service: Service, rng: random.Random, vocab: dict[str, int], number: int) -> Culprit:
    """Return a call that fails; of one in mid-stream the service itself says, with fewer tokens, what comes before."""
    text, route = draw_prompt(rng, rng.randint(1, 40)), ROUTES[number // 2 % 2]
    if number % 2 == 0:
        return Culprit(route, {"text": f"{text}{POISONED_WORD} {text}", "max_tokens": CULPRIT_TOKENS})
    ids = [_id_of(vocab, word) for word in (*WORDS, POISONED_WORD)]
    # The temperature leaves each of them about as likely as another.
    body = {"text": text, "allowed_token_ids": ids, "temperature": 100, "top_p": 1, "top_k": 1000}
    for _ in range(MAX_SEEDS):
        body["seed"] = rng.randrange(2**31)
        delivered = _text_before_the_fault(service, route, body)
        if delivered:
            return Culprit(route, {**body, "max_tokens": CULPRIT_TOKENS}, delivered)
    raise CampaignError(f"no row has failed in mid-stream with {MAX_SEEDS} seeds")


def _text_before_the_fault(service: Service, route: str, body: dict[str, Any]) -> str:
    """Return the longest text that comes whole: the id at its end is drawn, and not taken in any more; "": too long.

    Raises CampaignError if a row goes on with what cannot be read.
    """
    text = ""
    for num_tokens in range(1, MAX_DRAWN_TOKENS + 1):
        longer, end = _ask(service, route, {**body, "max_tokens": num_tokens})
        if end != WHOLE:
            return text if text.endswith(POISONED_WORD) else ""
        if POISONED_WORD in longer.removesuffix(POISONED_WORD):
            raise CampaignError(f"a row of the model went on after the poisoned word: {longer!r}")
        text = longer
    return ""


def _ask(service: Service, route: str, body: dict[str, Any]) -> tuple[str, str]:
    """Return an answer's text and its end: whole, cut with nothing that looks whole, or a status and its code."""
    with RawStream(service.proxy_port or 0, f"/{route}/{NAME}", body, bearer()) as stream:
        answer = stream.read_all()
        if stream.status != 200:
            return "", f"{stream.status} {stream.headers.get('x-error-code')}"
        if route == "inference":
            return answer.decode(), WHOLE if stream.whole else CUT
        events = list(parse_events(answer))
    text = [data["message"] for name, data in events if name == "answer"][-1]
    ends = [name if name == "close" else data["code"] for name, data in events if name in ("close", "error")]
    return text, WHOLE if ends == ["close"] else CUT if ends == ["generation_failed"] else f"ends {ends}"


def _num_failed(service: Service) -> float:
    return service.metric('inference_api_finished_total{reason="error"}')


def _unlike(found: object, expected: object) -> str | None:
    return None if found == expected else f"{found!r} in place of {expected!r}"
