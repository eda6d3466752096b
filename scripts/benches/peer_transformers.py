"""Run `transformers serve` beside the service: its OpenAI routes over the fp32 weights of the model image.

Continuous batching, without which it answers one request after another; all requests then share the generation settings
of the first one, the length apart. Knows the server's options; not what it is compared with.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

from benches.peer_environments import TRANSFORMERS, find_program, make_environment
from benches.peer_process import peer_environ, running_tree, wait_until_ready
from benches.peer_weights import checkpoint_folder
from benches.service import BenchError, Target, free_port
from inference_api.model_image import ModelImage

START_SECONDS = 120.0
BLOCK_TOKENS = 32


@dataclasses.dataclass(frozen=True, slots=True)
class TransformersServer:
    """A running `transformers serve`; it knows its model by the folder's path."""

    pid: int
    target: Target
    model: str


@contextlib.contextmanager
def running_transformers(
    folder: Path, image: ModelImage, *, num_rows: int, context_tokens: int, install: bool
) -> Iterator[TransformersServer]:
    """Install and run the server until the block ends. Raises BenchError if it does not come up."""
    environment = make_environment(TRANSFORMERS, folder, install=install)
    program = find_program(environment, "transformers")
    if program is None:
        raise BenchError("the program `transformers` is not in the environment")
    model, port, log = str(checkpoint_folder(folder / "checkpoints", image)), free_port(), folder / "transformers.log"
    # Without a number of blocks its cache takes a share of the machine's memory, whatever is asked of it.
    num_blocks = num_rows * -(-context_tokens // BLOCK_TOKENS)
    command = [str(program), "serve", model, "--device", "cpu", "--dtype", "float32"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--continuous-batching"]
    command += ["--cb-block-size", str(BLOCK_TOKENS), "--cb-num-blocks", str(num_blocks)]
    with running_tree(command, log, peer_environ({"HF_HUB_OFFLINE": "1"})) as process:
        wait_until_ready(process, port, log, START_SECONDS)
        yield TransformersServer(process.pid, Target(port), model)
