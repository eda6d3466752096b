"""Check that a stream whose disk is full, or whose reader is gone, loses text and never stops the writer."""

from __future__ import annotations

import io
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from inference_api.lossy_stream import LossyStream

ROOT = Path(__file__).resolve().parent.parent


def test_text_goes_to_the_descriptor_at_once(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file:
        stream = LossyStream(file)
        assert stream.write("one\ntwö\n") == 8
        assert (tmp_path / "log").read_text("utf-8") == "one\ntwö\n"
        assert (stream.fault, stream.num_lost_lines, stream.isatty()) == ("", 0, False)


def test_a_full_disk_loses_lines_and_counts_them_until_there_is_room_again(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        stream = LossyStream(full)
        stream.write("one\ntwo\n")
        stream.write("three\n")
        assert (stream.fault, stream.num_lost_lines) == ("No space left on device", 3)
        with (tmp_path / "log").open("w") as file:
            os.dup2(file.fileno(), full.fileno())
            stream.write("four\n")
        assert (tmp_path / "log").read_text() == "four\n"
        assert (stream.fault, stream.num_lost_lines) == ("", 3)


def test_a_reader_that_is_gone_and_a_closed_stream_are_no_errors() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        stream = LossyStream(pipe)
        stream.write("one\n")
        assert stream.fault == "Broken pipe"
    stream.write("two\n")
    assert stream.num_lost_lines == 2


def test_a_line_that_was_written_in_part_ends_before_the_next_begins(tmp_path: Path) -> None:
    held = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with (tmp_path / "log").open("w") as file:
            stream = LossyStream(file)
            resource.setrlimit(resource.RLIMIT_FSIZE, (6, hard))
            stream.write("torn apart\n")
            assert stream.fault == "File too large"
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            stream.write("whole\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, held)
    assert (tmp_path / "log").read_text() == "torn a\nwhole\n"


def test_a_stream_in_memory_is_written_as_it_is() -> None:
    memory = io.StringIO()
    LossyStream(memory).write("one\n")
    assert memory.getvalue() == "one\n"


@pytest.mark.parametrize("stream", ["stderr", "stdout"])
def test_lines_that_were_lost_do_not_change_the_exit_status(stream: str) -> None:
    program = f"import sys; from inference_api.lossy_stream import LossyStream; LossyStream(sys.{stream}).write('x\\n')"
    with open("/dev/full", "w") as full:
        outputs = {"stdout": None, "stderr": None} | {stream: full}
        run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, **outputs, check=False)
    assert run.returncode == 0
