"""Tell locust what a user of an OpenAI server does: ask for a completion as events, read it, ask again at once.

Runs in locust's own environment and process, which this import makes cooperative, and imports nothing of this project.
The prompts are dealt to whoever is free; when the last one is answered the run ends. An answer's tokens are what its
server counts (`usage`); its report has them as the length of the answer.
"""

from __future__ import annotations

import collections
import json
import os
import time
from pathlib import Path

import requests
from locust import User, events, task
from locust.exception import StopUser

ORDER = json.loads(Path(os.environ["BENCH_LOCUST_ORDER"]).read_text())
TIMEOUT_SECONDS = 300


class Round:
    """What all users share: the prompts that are left, how many users are, and since when."""

    def __init__(self) -> None:
        self.prompts = collections.deque(ORDER["prompts"])
        self.num_users = ORDER["users"]
        self.began = time.perf_counter()


class Asker(User):
    """One user."""

    round = Round()

    @task
    def ask(self) -> None:
        """Ask for one completion; leave when no prompt is left, and end the run as the last one who does."""
        if not self.round.prompts:
            self.round.num_users -= 1
            if not self.round.num_users:
                self._report("whole run", time.perf_counter() - self.round.began)
                self.environment.runner.quit()
            raise StopUser
        began = time.perf_counter()
        try:
            first_at, num_tokens = self._read(self.round.prompts.popleft())
        except Exception as error:  # whatever it is, locust lists it as a failure
            self._report("failed answer", time.perf_counter() - began, error=error)
            return
        ended = time.perf_counter()
        self._report("answer", ended - began, num_tokens)
        self._report("first token", first_at - began)
        if num_tokens > 1:
            self._report("inter-token", (ended - first_at) / (num_tokens - 1))

    def _read(self, prompt: str) -> tuple[float, int]:
        """Return when the first text came, and how many tokens the server counted."""
        headers = {"Authorization": f"Bearer {ORDER['bearer']}"} if ORDER["bearer"] else {}
        url, body = f"{self.environment.host}/v1/completions", {**ORDER["body"], "prompt": prompt}
        first_at, num_tokens = None, None
        with requests.post(url, json=body, headers=headers, stream=True, timeout=TIMEOUT_SECONDS) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise ValueError(f"the stream broke: {event['error']}")
                if first_at is None and any(choice["text"] for choice in event["choices"]):
                    first_at = time.perf_counter()
                num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
        if first_at is None or num_tokens is None:
            raise ValueError("the answer had no text or no usage")
        return first_at, num_tokens

    def _report(self, name: str, seconds: float, length: int = 0, error: Exception | None = None) -> None:
        events.request.fire(  # type: ignore[no-untyped-call]
            request_type="POST",
            name=name,
            response_time=1000 * seconds,
            response_length=length,
            exception=error,
            context={},
        )
