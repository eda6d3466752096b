"""Check the debug modes' files: who may read them, how large they grow, what a failing disk and a death leave."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import re
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from inference_api.config import Settings
from inference_api.debug_log import MAX_OLD_PROCESSES, MAX_STACK_TRACE_BYTES, DebugLog, StackTrace, check_debug_folder
from inference_api.errors import SettingError

ROOT = Path(__file__).resolve().parent.parent


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def _own_fault_handler() -> Iterator[None]:
    """Give the test runner its fault handler back."""
    yield
    faulthandler.cancel_dump_traceback_later()
    faulthandler.disable()
    faulthandler.enable(sys.__stderr__)


def test_an_event_is_a_line_in_a_file_that_nobody_else_can_read(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "debug_logs"
    log = DebugLog(folder, "frontend-7000")
    log.write("opened", "abc", request_id="req_1", num_prompt_tokens=3)
    log.write("closed", "abc", reason=None)
    log.close()
    assert log.path == folder / f"frontend-7000-{os.getpid()}.jsonl"
    first, second = lines_of(log.path)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", str(first.pop("time")))
    assert first == {"event": "opened", "session_id": "abc", "request_id": "req_1", "num_prompt_tokens": 3}
    assert (second["event"], second["reason"]) == ("closed", None)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(log.path.stat().st_mode) == 0o600


def test_a_folder_that_others_could_read_is_closed_to_them(tmp_path: Path) -> None:
    folder = tmp_path / "debug_logs"
    folder.mkdir(mode=0o755)
    DebugLog(folder, "backend-7000").close()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_two_files_of_the_given_size_are_the_most_a_process_writes(tmp_path: Path) -> None:
    log = DebugLog(tmp_path, "backend-7000", max_bytes=1000)
    for number in range(100):
        log.write("ended", f"{number:032d}")
    log.close()
    paths = sorted(tmp_path.iterdir())
    assert paths == [log.path, log.path.with_name(log.path.name + ".1")]
    assert all(path.stat().st_size <= 1000 and stat.S_IMODE(path.stat().st_mode) == 0o600 for path in paths)
    assert lines_of(log.path)[-1]["session_id"] == f"{99:032d}"


def test_lines_of_many_threads_are_whole(tmp_path: Path) -> None:
    log = DebugLog(tmp_path, "frontend-7000")
    threads = [threading.Thread(target=lambda: [log.write("opened", "x" * 32) for _ in range(50)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    assert len(lines_of(log.path)) == 400


def test_files_of_ended_processes_are_removed_but_for_the_newest_and_no_other_file_is(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    ended = [process.pid + 4_194_304 * number for number in range(1, MAX_OLD_PROCESSES + 3)]  # above pid_max
    for age, pid in enumerate(ended):
        for name in (f"backend-7000-{pid}.jsonl", f"backend-7000-{pid}.jsonl.1"):
            (tmp_path / name).touch()
            os.utime(tmp_path / name, (1000 - age, 1000 - age))
    others = [f"backend-7000-{os.getppid()}.jsonl", f"backend-7001-{ended[-1]}.jsonl", "notes.txt", "stack_trace-7000"]
    for name in others:
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (1, 1))
    DebugLog(tmp_path, "backend-7000").close()
    kept = {f"backend-7000-{pid}.jsonl{end}" for pid in ended[:MAX_OLD_PROCESSES] for end in ("", ".1")}
    assert {path.name for path in tmp_path.iterdir()} == {*kept, *others, f"backend-7000-{os.getpid()}.jsonl"}


def test_a_disk_that_fails_is_told_of_once_and_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = DebugLog(tmp_path, "backend-7000", max_bytes=10)
    log.path.unlink()  # the next turn-over finds nothing to rename
    for _ in range(3):
        log.write("ended", "abc")
    (message,) = caplog.messages
    assert message == f"the debug log {log.path} is given up: No such file or directory"
    assert caplog.records[0].levelno == logging.WARNING


@pytest.mark.parametrize(("field", "name"), [("frontend_debug", "FRONTEND_DEBUG_MODE"), ("backend_debug", "BACKEND_")])
def test_a_folder_that_cannot_be_written_stops_the_start_with_the_settings_name(
    tmp_path: Path, field: str, name: str
) -> None:
    (tmp_path / "debug_logs").write_text("a file stands where the folder should")
    settings = Settings(cache_dir=str(tmp_path))
    check_debug_folder(settings)
    with pytest.raises(SettingError, match=rf"{name}.*cannot write into {tmp_path}/debug_logs: [^\n]*$"):
        check_debug_folder(Settings(cache_dir=str(tmp_path), **{field: True}))


def test_a_folder_that_can_be_written_is_made_and_nothing_is_left_in_it(tmp_path: Path) -> None:
    check_debug_folder(Settings(cache_dir=str(tmp_path), frontend_debug=True))
    assert list((tmp_path / "debug_logs").iterdir()) == []


@pytest.mark.usefixtures("_own_fault_handler")
def test_a_death_by_exception_leaves_its_frames_and_a_quiet_end_nothing(tmp_path: Path) -> None:
    trace = StackTrace(tmp_path, 7000, now=lambda: 0.0)
    trace.close()
    assert list(tmp_path.iterdir()) == []
    trace = StackTrace(tmp_path, 7000, now=lambda: 0.0)
    try:
        hidden_local = "a-value-of-a-local"
        raise RuntimeError(f"{len(hidden_local)} rows are broken")
    except RuntimeError as error:
        trace.write(error)
    trace.close()
    text = trace.path.read_text()
    assert text.startswith(f"1970-01-01T00:00:00.000Z pid {os.getpid()}\nTraceback")
    assert "test_debug_log.py" in text and "18 rows are broken" in text
    assert stat.S_IMODE(trace.path.stat().st_mode) == 0o600


@pytest.mark.usefixtures("_own_fault_handler")
def test_the_stack_trace_of_earlier_deaths_is_kept_within_bounds(tmp_path: Path) -> None:
    for _ in range(2):
        trace = StackTrace(tmp_path, 7000)
        trace.write(RuntimeError("again"))
        trace.close()
    assert trace.path.read_text().count("RuntimeError: again") == 2
    trace.path.write_bytes(b"x" * (MAX_STACK_TRACE_BYTES + 1))
    StackTrace(tmp_path, 7000).close()
    assert not trace.path.exists()


@pytest.mark.usefixtures("_own_fault_handler")
def test_a_service_that_ends_leaves_the_file_of_another_on_the_same_cache_root(tmp_path: Path) -> None:
    other = StackTrace(tmp_path, 7001)
    StackTrace(tmp_path, 7000).close()
    other.write(RuntimeError("the other died"))
    other.close()
    assert [path.name for path in tmp_path.iterdir()] == ["stack_trace-7001"]
    assert "the other died" in other.path.read_text()


def test_a_hang_and_a_fatal_signal_leave_every_threads_frames(tmp_path: Path) -> None:
    program = """
import os, pathlib, signal, sys, threading
from inference_api.debug_log import StackTrace
trace = StackTrace(pathlib.Path(sys.argv[1]), 7000)
trace.expect_step(60.0)
trace.expect_step(0.05)
def hang_here():
    threading.Event().wait(0.5)
hang_here()
os.kill(os.getpid(), signal.SIGSEGV)
"""
    run = subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, capture_output=True, check=False)
    text = (tmp_path / "stack_trace-7000").read_text()
    assert run.returncode < 0 and b"Fatal" not in run.stderr
    assert "Timeout" in text and "in hang_here" in text
    assert "Fatal Python error: Segmentation fault" in text


@pytest.mark.parametrize("leads_to", ["foreign", "nowhere"])
def test_a_link_in_the_folders_place_is_refused_and_what_it_leads_to_stays_as_it_is(
    tmp_path: Path, leads_to: str
) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir(mode=0o755)
    (tmp_path / "debug_logs").symlink_to(tmp_path / leads_to)
    with pytest.raises(SettingError, match=rf"cannot write into {tmp_path}/debug_logs: it is a symbolic link; [^\n]*$"):
        check_debug_folder(Settings(cache_dir=str(tmp_path), backend_debug=True))
    with pytest.raises(OSError, match="symbolic link"):
        DebugLog(tmp_path / "debug_logs", "backend-7000")
    assert stat.S_IMODE(foreign.stat().st_mode) == 0o755 and list(foreign.iterdir()) == []


@pytest.mark.parametrize("has_reader", [False, True])
def test_a_fifo_in_the_stack_traces_place_is_refused_and_never_waited_for(tmp_path: Path, has_reader: bool) -> None:
    folder = tmp_path / "debug_logs"
    folder.mkdir()
    os.mkfifo(folder / "stack_trace-7000")
    with contextlib.ExitStack() as cleanup:
        if has_reader:
            cleanup.callback(os.close, os.open(folder / "stack_trace-7000", os.O_RDONLY | os.O_NONBLOCK))
        with pytest.raises(SettingError, match=rf"cannot write {folder}/stack_trace-7000: [^\n]*$"):
            check_debug_folder(Settings(cache_dir=str(tmp_path), backend_debug=True))
        with pytest.raises(OSError, match="stack_trace-7000"):
            StackTrace(folder, 7000)
