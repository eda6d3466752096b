"""Run OpenVINO GenAI as a contender of the `peers` bench: its continuous batching, in a process of its own.

It has no server of its own in this package, so its figures lack what HTTP costs the others. It reads the Q8_0 file that
llama.cpp's program makes, for that was its fastest type.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from benches import peer_openvino_runner
from benches.peer_environments import LLAMA, OPENVINO, find_program, make_environment, python_of
from benches.peer_piped import PipedContender, running_piped
from benches.peer_process import peer_environ
from benches.peer_weights import quantized_gguf
from benches.service import BenchError

QUANTIZATION = "Q8_0"


@contextlib.contextmanager
def running_openvino(folder: Path, *, num_rows: int, install: bool) -> Iterator[PipedContender]:
    """Install and run the pipeline until the block ends. Raises BenchError if it does not come up."""
    environment = make_environment(OPENVINO, folder, install=install)
    quantize = find_program(make_environment(LLAMA, folder, install=install), "llama-quantize")
    if quantize is None:
        raise BenchError("llama-quantize, which makes its weights, is not in the environment")
    model = quantized_gguf(folder, quantize, QUANTIZATION)
    command = [python_of(environment), peer_openvino_runner.__file__, str(model), str(num_rows)]
    with running_piped(command, folder / "openvino.log", peer_environ({})) as contender:
        yield contender
