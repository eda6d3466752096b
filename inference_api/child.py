"""Own one child process: its start in a process group of its own, its exit through a pidfd, its end.

Used by the supervisor. Every child is started through this module's own main, which asks the kernel to end it with its
parent and then becomes the wanted program. Knows nothing of what a child does.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Self

_PR_SET_PDEATHSIG = 1  # prctl(2), linux/prctl.h


class Child:
    """A process that this one started. `pidfd` becomes readable when it exits (pidfd_open(2))."""

    def __init__(self, name: str, process: subprocess.Popen[bytes]) -> None:
        self.name = name
        self.pidfd = os.pidfd_open(process.pid)
        self._process = process

    @classmethod
    def start(
        cls,
        name: str,
        command: Sequence[str],
        environ: Mapping[str, str],
        pass_fds: Sequence[int] = (),
        stdout: int | None = None,
    ) -> Self:
        """Start a Python program (`command` is what follows `python`) that ends when this process ends.

        It has a process group of its own, so that Ctrl-C in the terminal does not reach it. `stdout` is a descriptor.
        """
        wrapper = [sys.executable, "-m", "inference_api.child", str(os.getpid()), sys.executable, *command]
        process = subprocess.Popen(  # noqa: S603 - our own programs
            wrapper,
            env=dict(environ),
            pass_fds=pass_fds,
            process_group=0,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
        )
        return cls(name, process)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def reap(self) -> int:
        """Collect the exit status of a process that has exited; negative for a signal."""
        os.close(self.pidfd)
        return self._process.wait()

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL to the process and to the children in its group."""
        os.killpg(self._process.pid, signal.SIGKILL)


def reap_orphans(own: Collection[int]) -> None:
    """Collect the exit of children that this process did not start; never blocks.

    The kernel hands every orphan of a container to its PID 1, and without this they would stay as zombies. `own` are
    the ids of children still to be reaped: one of them that has ended holds up the rest, so call again after `reap`.
    """
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid in own:
            return
        os.waitpid(ended.si_pid, 0)


def become(parent_pid: int, command: Sequence[str]) -> None:
    """Replace this process by `command`, to which the kernel sends SIGTERM when the parent dies (prctl(2))."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_pid:
        sys.exit("the parent process is gone")
    os.execv(command[0], list(command))  # noqa: S606 - that is its purpose


if __name__ == "__main__":
    become(int(sys.argv[1]), sys.argv[2:])
