"""Own every process of the service: the outermost process, parent of the backend, of gunicorn and of the proxy.

It holds the listening sockets, so that a child that dies loses no connection that waits; restarts a dead or hung
backend with back-off; and drains: new work is refused, rows run empty or the grace is over, then gunicorn, the proxy
and the backend end. Under a plain `gunicorn -c gunicorn.conf.py` it runs as a child in backend-only mode. One selector
waits for signals, exits and heartbeats. Knows nothing of requests, engines or tenants.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import selectors
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from inference_api.card import print_card
from inference_api.child import Child, reap_orphans
from inference_api.command_line import prepare_command, read_command_line
from inference_api.config import Settings, child_environ, jwt_secret
from inference_api.debug_log import check_debug_folder
from inference_api.errors import InferenceApiError, SettingError
from inference_api.fronts import Front, bind_fronts
from inference_api.logs import set_up_logging
from inference_api.lossy_stream import LossyStream
from inference_api.messages import Drain, Drained, Fatal, Heartbeat, Loading, Ready, StatusMessage, Stop
from inference_api.model_image import build_mock_image
from inference_api.progress import Progress
from inference_api.queues import Connection, ConnectionLostError, listen
from inference_api.restarts import SETTLED_SECONDS, RestartPolicy
from inference_api.run_dir import RunDir

logger = logging.getLogger(__name__)

MAX_START_DEATHS = 3
"""A backend that dies so often before it was ever ready stops the service."""

STOP_SECONDS = 4.0
"""Time between the polite signal and SIGKILL: gunicorn leaves 2 s of it to kept connections (STOP_KEEPALIVE_LINGER)."""

PAUSED_SECONDS = 1.0
"""A watchdog that comes so late tells of this process, not of the backend."""


class Supervisor:
    """Run the children until a signal, or until the backend cannot be started."""

    def __init__(self, settings: Settings, *, proxy: tuple[str, int] | None, status_fd: int | None) -> None:
        self._settings = settings
        self._proxy_address = proxy
        self._status_fd = status_fd
        self._backend_only = status_fd is not None
        self._selector = selectors.DefaultSelector()
        self._timers: dict[str, tuple[float, Callable[[], None]]] = {}
        self._children: dict[str, Child] = {}
        self._control: Connection | None = None
        self._progress = Progress("backend", LossyStream(sys.stderr))
        self._was_ready = False
        self._restarts = {name: RestartPolicy() for name in ("backend", "gunicorn", "proxy")}
        self._run_dir = RunDir(settings)
        self._stopping = False
        self._exit_status = 0
        self._fronts: dict[str, Front] = {}
        self._grace_until = 0.0
        self._cleanup = contextlib.ExitStack()
        self._backend_began = 0.0

    def run(self) -> int:
        """Start everything, serve, stop everything; return the exit status."""
        with self._cleanup:
            self._run_dir.take()
            self._cleanup.callback(self._run_dir.give_back)
            self._watch_signals()
            self._listener = listen(self._settings.socket_path)
            self._cleanup.callback(self._listener.close)
            if not self._backend_only:
                fronts = bind_fronts(self._settings, self._proxy_address, self._cleanup)
                self._fronts = {front.name: front for front in fronts}
            self._start_image()
            while self._children or self._timers:
                self._wait()
        return self._exit_status

    def _start_image(self) -> None:
        """Have the model image prepared, in a process of its own; the rest starts when it is there."""
        if self._settings.engine == "mock":
            try:
                image = build_mock_image(self._settings.cache_path)
            except OSError as error:
                raise SettingError(f"INFERENCE_API_CACHE_DIR cannot be used: {error}") from None
            self._start_on_image(image.path)
            return
        output = self._cleanup.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - the stack closes it

        def prepared(status: int) -> None:
            if self._stopping:
                self._stop_children()
                return
            if status != 0:  # prepare has said why
                self._exit_status = 1
                return
            output.seek(0)
            self._start_on_image(Path(output.read().decode().strip()))

        environ = child_environ(self._settings, secret=False)
        self._add_child(
            Child.start("prepare", prepare_command(self._settings), environ, stdout=output.fileno()), prepared
        )

    def _start_on_image(self, image_path: Path) -> None:
        """Link the image where every process looks for it, then start them."""
        self._run_dir.link_image(image_path)
        for front in self._fronts.values():
            front.listen()
        self._start_backend()
        if self._status_fd is not None:
            os.write(self._status_fd, b"1")
        for name in self._fronts:
            self._start_front(name)

    def _watch_signals(self) -> None:
        """Turn signals into selector events; the handlers themselves do nothing."""
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        reader.setblocking(False)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, _ignore)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup(1) leaves it
            signal.signal(signal.SIGHUP, _ignore)
        self._selector.register(reader, selectors.EVENT_READ, lambda: self._take_signals(reader.recv(64)))
        self._cleanup.callback(writer.close)
        self._cleanup.callback(reader.close)
        self._cleanup.callback(signal.set_wakeup_fd, -1)

    def _take_signals(self, numbers: bytes) -> None:
        for number in numbers:
            # A terminal that closes may say so twice, its shell and its kernel; a second SIGTERM is somebody's haste.
            if number == signal.SIGTERM or (number == signal.SIGHUP and not self._stopping):
                self._drain(self._settings.grace_seconds)
            elif number == signal.SIGINT:
                self._drain(0.0)
            elif number == signal.SIGCHLD:
                self._reap_orphans()

    def _reap_orphans(self) -> None:
        reap_orphans([child.pid for child in self._children.values()])

    def _start_backend(self) -> None:
        self._progress = Progress("backend", LossyStream(sys.stderr))
        self._backend_began = time.monotonic()
        ours, theirs = socket.socketpair()
        command = ["-m", "inference_api.backend.main"]
        command += ["--listen-fd", str(self._listener.fileno()), "--control-fd", str(theirs.fileno())]
        environ = child_environ(self._settings, secret=False)
        child = Child.start("backend", command, environ, pass_fds=(self._listener.fileno(), theirs.fileno()))
        theirs.close()
        self._control = control = Connection(ours, StatusMessage)
        self._selector.register(control, selectors.EVENT_READ, lambda: self._read_status(control))
        self._add_child(child, self._backend_exited)

    def _start_front(self, name: str) -> None:
        self._restarts[name].serves(time.monotonic())
        self._add_child(self._fronts[name].start(), lambda status: self._front_exited(name, status))

    def _add_child(self, child: Child, on_exit: Callable[[int], None]) -> None:
        def exited() -> None:
            self._selector.unregister(child.pidfd)
            del self._children[child.name]
            status = child.reap()
            self._reap_orphans()
            on_exit(status)

        self._children[child.name] = child
        self._selector.register(child.pidfd, selectors.EVENT_READ, exited)

    def _wait(self) -> None:
        """Wait for the next event or timer, and handle it."""
        next_timer = min((at for at, _ in self._timers.values()), default=None)
        timeout = None if next_timer is None else max(0.0, next_timer - time.monotonic())
        for key, _ in self._selector.select(timeout):
            key.data()
        now = time.monotonic()
        for name in [name for name, (at, _) in self._timers.items() if at <= now]:
            at_and_action = self._timers.pop(name, None)
            if at_and_action is not None:
                at_and_action[1]()

    def _set_timer(self, name: str, seconds: float, action: Callable[[], None]) -> None:
        self._timers[name] = (time.monotonic() + seconds, action)

    def _read_status(self, control: Connection) -> None:
        try:
            messages = control.receive()
        except ConnectionLostError:
            self._forget_control()
            return
        for message in messages:
            match message:
                case Loading():
                    self._progress.stage(message.stage)
                case Ready():
                    self._backend_is_ready(message)
                case Heartbeat():
                    self._watch_backend()
                case Drained():
                    self._stop_children()
                case Fatal():
                    self._backend_cannot_start(message.error.message)

    def _forget_control(self) -> None:
        """Close the channel of a backend that is gone: nothing that it still says counts."""
        if self._control is not None:
            self._selector.unregister(self._control)
            self._control.close()
            self._control = None

    def _backend_is_ready(self, ready: Ready) -> None:
        self._restarts["backend"].serves(time.monotonic())
        self._set_timer("settled", SETTLED_SECONDS, self._backend_has_settled)
        self._watch_backend()
        self._progress.finish("ready")
        logger.info("backend is ready after %.1f s", time.monotonic() - self._backend_began)
        if not self._was_ready and not self._backend_only:
            card = functools.partial(print_card, self._settings, ready, proxy=self._proxy_address, secret=jwt_secret())
            threading.Thread(target=card, name="card", daemon=True).start()
        self._was_ready = True

    def _backend_has_settled(self) -> None:
        self._restarts["backend"].settle()
        self._run_dir.write_failed_restarts(0)

    def _backend_cannot_start(self, cause: str) -> None:
        """Stop a service that has never served; one that has is kept, for memory or a disk may come back."""
        self._progress.clear()
        _complain(cause)
        if not self._was_ready:
            self._exit_status = 1
            self._drain(0.0)

    def _watch_backend(self) -> None:
        """Give the backend its time until the next heartbeat."""
        seconds = self._settings.watchdog_seconds
        kill = functools.partial(self._kill_hung_backend, time.monotonic() + seconds)
        self._set_timer("watchdog", seconds, kill)

    def _kill_hung_backend(self, due: float) -> None:
        if time.monotonic() - due > PAUSED_SECONDS:
            # This process stood still, too: a job stopped by its shell, a paused machine. Its backend may be well.
            self._watch_backend()
            return
        backend = self._children.get("backend")
        if backend is not None and not self._stopping:
            logger.error("backend made no step for %g s; it is killed", self._settings.watchdog_seconds)
            backend.kill()

    def _backend_exited(self, status: int) -> None:
        if self._control is not None:
            self._read_status(self._control)  # its last words, a Fatal among them
        self._forget_control()
        self._progress.clear()
        for name in ("watchdog", "settled"):
            self._timers.pop(name, None)
        if self._stopping:
            self._stop_children()
            return
        logger.error("backend ended with status %d", status)
        restarts = self._restarts["backend"]
        wait_seconds = restarts.dies(time.monotonic())
        if not self._was_ready and restarts.num_deaths >= MAX_START_DEATHS:
            self._exit_status = 1
            _complain(f"the backend died {MAX_START_DEATHS} times before it was ready; see its log above")
            self._drain(0.0)
            return
        self._run_dir.write_failed_restarts(restarts.num_failed_restarts)
        logger.warning("backend is started again in %g s", wait_seconds)
        self._set_timer("restart", wait_seconds, self._start_backend)

    def _front_exited(self, name: str, status: int) -> None:
        if self._stopping:
            self._stop_children()
            return
        restarts = self._restarts[name]
        wait_seconds = restarts.dies(time.monotonic())
        if not restarts.has_settled and (not self._was_ready or restarts.num_deaths >= MAX_START_DEATHS):
            self._exit_status = 1
            _complain(f"{name} could not start (status {status}); see its log above")
            self._drain(0.0)
            return
        logger.error("%s ended with status %d; it is started again", name, status)
        self._set_timer(f"restart {name}", wait_seconds, lambda: self._start_front(name))

    def _drain(self, grace_seconds: float) -> None:
        """Refuse new work; stop when the rows are empty or the grace is over.

        A second signal ends the grace; one more while the children end kills them.
        """
        if self._stopping:
            grace_seconds = 0.0
            stop = self._timers.pop("stop", None)
            if stop is not None and stop[0] <= time.monotonic() + STOP_SECONDS:
                self._kill_children()
                return
        logger.info("no new request is taken; what runs has %g s to end", grace_seconds)
        self._stopping = True
        self._grace_until = time.monotonic() + grace_seconds
        for name in ("restart", "watchdog", "settled", *(f"restart {front}" for front in self._fronts)):
            self._timers.pop(name, None)
        if "backend" not in self._children or grace_seconds <= 0:
            self._stop_children()
            return
        self._tell_backend(Drain())
        self._set_timer("grace", grace_seconds, self._stop_children)

    def _stop_children(self) -> None:
        """End the children, politely first. What is computed may still be read until the grace is over."""
        if not self._children:
            self._timers.clear()
        if not self._children or "stop" in self._timers:
            return
        self._timers.pop("grace", None)
        self._tell_backend(Stop())
        for name in ("prepare", *self._fronts):
            if name in self._children:
                self._children[name].terminate()
        self._set_timer("stop", max(STOP_SECONDS, self._grace_until - time.monotonic()), self._kill_children)

    def _kill_children(self) -> None:
        for child in self._children.values():
            logger.warning("%s does not end; it is killed", child.name)
            child.kill()

    def _tell_backend(self, message: Drain | Stop) -> None:
        if self._control is not None and "backend" in self._children:
            with contextlib.suppress(ConnectionLostError):
                self._control.send(message)


def _complain(text: str) -> None:
    """Tell the operator on stderr, or nobody if that is full: the children have to be looked after all the same."""
    LossyStream(sys.stderr).write(f"ERROR: {text}\n")


def _ignore(number: int, frame: FrameType | None) -> None:
    """Let the wakeup descriptor carry the signal."""


def main(argv: list[str] | None = None) -> int:
    """Run the supervisor; return its exit status."""
    try:
        start = read_command_line(argv)
        set_up_logging(start.settings, "supervisor", quote_errors=True)
        check_debug_folder(start.settings)
        return Supervisor(start.settings, proxy=start.proxy, status_fd=start.status_fd).run()
    except InferenceApiError as error:
        _complain(str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main())
