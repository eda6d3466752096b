"""Tell locust what a user of the service does; `locust --locustfile` and locust_run.py take it.

Runs in locust's process, which this import makes cooperative: nothing else may import it. The service and its bearer
come from LLM_CHAT_API_URL and AUTHORIZATION. A refusal by a full service stands in a row of its own and is no
failure; an answer that was cut is one.
"""

from __future__ import annotations

import os
import random

import gevent
import requests
from locust import HttpUser, between, events, stats, task

from tests.live.client import OVERLOADED_TEXT, TIMEOUT_SECONDS, Target
from tests.live.locust_run import MAX_TOKENS_NAME, OVERLOADED
from tests.live.program import AUTHORIZATION_NAME, URL_NAME
from tests.live.test_inference_api_load import PROMPTS_FILE, read_prompts

TARGET = Target.parse(os.environ.get(URL_NAME, "http://127.0.0.1:1223"), os.environ.get(AUTHORIZATION_NAME, ""))


def write_the_last_rows(**_: object) -> None:
    """Let locust's writer of tables come round once more: it writes at intervals, and not at the end."""
    gevent.sleep(stats.CSV_STATS_INTERVAL_SEC + 0.25)


events.quit.add_listener(write_the_last_rows)  # type: ignore[no-untyped-call]


class Caller(HttpUser):
    """One user, who reads an answer, thinks for up to a second and asks again."""

    host = TARGET.base_url
    wait_time = between(0, 1)
    prompts = read_prompts(PROMPTS_FILE)
    max_tokens = int(os.environ.get(MAX_TOKENS_NAME, "32"))

    def on_start(self) -> None:
        """Send the bearer with every call."""
        if TARGET.authorization:
            self.client.headers["Authorization"] = TARGET.authorization

    @task(3)
    def raw(self) -> None:
        """Ask as a user, for plain text."""
        self._ask("predictions")

    @task(1)
    def chat(self) -> None:
        """Ask as a user, for events."""
        self._ask("chat")

    def _ask(self, route: str) -> None:
        path = f"/{route}/{TARGET.model}"
        body = {"text": random.choice(self.prompts), "max_tokens": self.max_tokens}
        with self.client.post(path, json=body, catch_response=True, timeout=TIMEOUT_SECONDS) as answer:
            if answer.status_code == requests.codes.unavailable and OVERLOADED_TEXT in (answer.content or b""):
                answer.request_meta["name"] = path + OVERLOADED
                answer.success()
            elif answer.status_code == requests.codes.ok and route == "chat" and "event: close" not in answer.text:
                answer.failure("the events ended without a close")
