"""Check a child's life with real processes: start, exit through the pidfd, signals, and its end with its parent."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

from inference_api.child import Child
from inference_api.config import Settings, child_environ

WAIT_SECONDS = 20.0


def _start(program: str, pass_fds: tuple[int, ...] = ()) -> Child:
    return Child.start("test", ["-c", program], child_environ(Settings()), pass_fds=pass_fds)


def _reap(child: Child) -> int:
    assert select.select([child.pidfd], [], [], WAIT_SECONDS)[0], "the child does not end"
    return child.reap()


def _read_line(fd: int) -> bytes:
    assert select.select([fd], [], [], WAIT_SECONDS)[0], "the child says nothing"
    return os.read(fd, 100)


def test_an_exit_is_seen_through_the_pidfd_and_collected_with_its_status() -> None:
    assert _reap(_start("raise SystemExit(7)")) == 7


def test_a_child_has_a_process_group_and_no_standard_input_and_the_descriptors_it_is_given() -> None:
    reader, writer = os.pipe()
    program = f"import os, sys; os.write({writer}, b'%d %d %d' % (os.getpid(), os.getpgid(0), len(sys.stdin.read())))"
    child = _start(program, (writer,))
    os.close(writer)
    assert _read_line(reader) == b"%d %d 0" % (child.pid, child.pid)
    assert _reap(child) == 0
    os.close(reader)


def test_terminate_is_polite_and_kill_takes_the_whole_group() -> None:
    reader, writer = os.pipe()
    sleeper = "import signal, os, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(5)); "
    polite = _start(sleeper + f"os.write({writer}, b'up'); signal.pause()", (writer,))
    assert _read_line(reader) == b"up"
    polite.terminate()
    assert _reap(polite) == 5
    stubborn = _start(
        "import signal, os; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        f"os.fork() and os.write({writer}, b'up'); signal.pause()",
        (writer,),
    )
    os.close(writer)
    assert _read_line(reader) == b"up"
    stubborn.terminate()
    stubborn.kill()
    assert _reap(stubborn) == -signal.SIGKILL
    while _read_line(reader):
        continue  # end of file: the last of the group that held the pipe is gone
    os.close(reader)


def test_a_child_ends_when_its_parent_dies() -> None:
    reader, writer = os.pipe()
    grandchild = f"import os, signal; os.write({writer}, b'up'); signal.pause()"
    parent = (
        "import os, signal\n"
        "from inference_api.child import Child\n"
        f"Child.start('inner', ['-c', {grandchild!r}], os.environ, pass_fds=({writer},))\n"
        "signal.pause()\n"
    )
    child = _start(parent, (writer,))
    os.close(writer)
    assert _read_line(reader) == b"up"
    os.kill(child.pid, signal.SIGKILL)
    assert _reap(child) == -signal.SIGKILL
    assert _read_line(reader) == b""
    os.close(reader)


def test_a_program_whose_parent_is_gone_before_it_starts_does_not_run(tmp_path: Path) -> None:
    not_our_parent = str(os.getpid() + 1)
    command = [sys.executable, "-m", "inference_api.child", not_our_parent, "/bin/touch", str(tmp_path / "ran")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "the parent process is gone" in result.stderr
    assert not (tmp_path / "ran").exists()
