"""Run the supervisor beside a plain gunicorn: started by its arbiter, ended with it.

Runs in the arbiter of PROCESS 1. A pipe, not waitpid, tells the supervisor's life, because the arbiter reaps every
child itself: one byte on it says that the model image is in place, end of file that the supervisor is gone.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading

STOP_SECONDS = 5.0
"""Time for the supervisor to end its backend before it is killed."""


class BackendOnly:
    """The supervisor in backend-only mode, as the arbiter sees it."""

    def __init__(self, *, mock: bool) -> None:
        """Start it and wait until the model image is in place; exit with status 1 if it fails before that."""
        self._alive, theirs = os.pipe()
        command = [sys.executable, "-m", "inference_api.child", str(os.getpid())]
        command += [sys.executable, "-m", "inference_api.supervisor", "--status-fd", str(theirs)]
        command += ["--mock"] if mock else []
        process = subprocess.Popen(command, pass_fds=(theirs,), process_group=0)  # noqa: S603 - our own program
        os.close(theirs)
        self._pidfd = os.pidfd_open(process.pid)
        self._stopping = False
        self.failed = False
        if not os.read(self._alive, 1):
            sys.exit(1)
        threading.Thread(target=self._end_together, name="backend-only", daemon=True).start()

    def stop(self) -> None:
        """End the supervisor and its backend; blocks for a few seconds at most."""
        self._stopping = True
        self._signal(signal.SIGINT)
        if not select.select([self._pidfd], [], [], STOP_SECONDS)[0]:
            self._signal(signal.SIGKILL)

    def _end_together(self) -> None:
        """Wait for the supervisor's end; end the arbiter too, for there is nothing left to serve."""
        while os.read(self._alive, 1):
            continue
        if not self._stopping:
            self.failed = True
            os.kill(os.getpid(), signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)
