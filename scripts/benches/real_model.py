"""Start the service with the real model for a bench, and count what it made from the backend's own figures.

Raw streams carry text, and text does not say how many tokens it was: the count of each request comes from
`/v1/requests/<id>` once all have ended. Knows how jobs are sent, not what is compared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benches.figures import ROOT
from benches.service import BenchError, Service, Target, ending_with_this_process, running_service
from benches.streams import Answer, make_request, run_streams
from benches.workload import Job
from inference_api.config import Settings
from inference_api.model_image import ModelImage
from inference_api.server.tokenizer import Tokenizer

NUM_USERS = 32


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """What a set of jobs came to: tokens made, seconds from the first send to the last byte, and every answer."""

    num_tokens: int
    seconds: float
    answers: Sequence[Answer] = ()

    @property
    def tokens_per_second(self) -> float:
        """Output tokens a second."""
        return self.num_tokens / self.seconds


def prepare_image() -> Path:
    """Return the model's image, made (blocking, minutes the first time) if it is not there yet.

    The model is the default one unless INFERENCE_API_MODEL says otherwise. Raises SettingError or BenchError.
    """
    settings = Settings.from_environ()
    command = ["-m", "inference_api.prepare", "--cache", str(settings.cache_path)]
    command += ["--model", settings.model] if settings.model else []
    command += ["--hf-cache", str(settings.hf_cache_path)]
    prepared = subprocess.run(
        ending_with_this_process(command), cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False, process_group=0
    )
    if prepared.returncode:
        raise BenchError("the model could not be prepared; its message stands above")
    return Path(prepared.stdout.strip())


def load_tokenizer(image: Path) -> Tokenizer:
    """Return an image's tokenizer."""
    return Tokenizer.load(ModelImage.open(image).tokenizer_path)


@contextlib.contextmanager
def running_model(settings: Mapping[str, str]) -> Iterator[Service]:
    """Run the service with the model and 32 rows until the block ends; `settings` by environment name."""
    with running_service(settings, mock=False) as service:
        yield service


def run_jobs(target: Target, jobs: Sequence[Job], num_users: int) -> Batch:
    """Send the jobs, `num_users` at a time, to the end of the last; blocks."""
    requests = [make_request(target, "/inference/falcon40b", job.body) for job in jobs]
    answers = [recording.parse() for recording in run_streams(target, requests, num_users)]
    seconds = max(answer.ended_at for answer in answers) - min(answer.sent_at for answer in answers)
    return Batch(sum(_num_tokens(target, answer) for answer in answers), seconds, answers)


def _num_tokens(target: Target, answer: Answer) -> int:
    count = target.get_json(f"/v1/requests/{answer.headers['request-id']}")["num_completion_tokens"]
    if not isinstance(count, int) or count < 1:
        raise BenchError(f"a request made {count!r} tokens")
    return count
