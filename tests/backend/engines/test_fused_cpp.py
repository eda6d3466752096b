"""Check that an engine whose threads cannot all start is refused, and leaves those that did."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]

ROOM_BYTES = 1 << 30
"""For a hundred threads' stacks, and not for thousands."""

OPENER = f"""
import resource
import sys
from pathlib import Path

import torch
from inference_api.backend.engines import fused
from inference_api.errors import ModelError
from inference_api.model_image import ModelImage

image, folder = (Path(argument) for argument in sys.argv[1:])
options = dict(num_rows=1, context_tokens=16, build_folder=folder)
fused.load(ModelImage.open(image), num_threads=1, **options)
taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
_, hard = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (taken + {ROOM_BYTES}, hard))
try:
    fused.load(ModelImage.open(image), num_threads=8192, **options)
except ModelError as error:
    print(error)
print(len(list(Path("/proc/self/task").iterdir())) < 64)
"""


def test_threads_that_cannot_start_are_one_line_and_those_before_them_end(
    tiny_image, fused_library_of_tests, fused_build_folder: Path
) -> None:
    command = [sys.executable, "-c", OPENER, str(tiny_image("llama").path), str(fused_build_folder)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (child.returncode, child.stderr) == (0, "")
    text = "the engine fused cannot start its threads or gets no memory for its work space"
    assert child.stdout.splitlines() == [text, "True"]
