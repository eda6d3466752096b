"""Own every process of the service: the outermost process, parent of the backend, of gunicorn and of the proxy.

It holds the listening sockets, so that a child that dies loses no connection that waits; restarts a dead or hung
backend with back-off; and drains: new work is refused, rows run empty or the grace is over, then gunicorn, the proxy
and the backend end. Under a plain `gunicorn -c gunicorn.conf.py` it runs as a child in backend-only mode. One selector
waits for signals, exits and heartbeats. Knows nothing of requests, engines or tenants.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import logging
import os
import secrets
import selectors
import shutil
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
from inference_api.child import Child
from inference_api.config import Settings, child_environ, jwt_secret
from inference_api.errors import InferenceApiError, SettingError
from inference_api.messages import Drain, Drained, Fatal, Heartbeat, Loading, Ready, StatusMessage, Stop
from inference_api.model_image import build_mock_image
from inference_api.queues import Connection, ConnectionLostError, listen, make_private_dir

logger = logging.getLogger(__name__)

MAX_START_DEATHS = 3
"""A backend that dies so often before it was ever ready stops the service."""

BACKOFF_SECONDS = (0.0, 0.25, 0.5, 1.0, 2.0, 5.0)
"""Waits before a restart, by the number of failed starts in a row; the last one repeats."""

LISTEN_BACKLOG = 2048

STOP_SECONDS = 2.0
"""Time between the polite signal and SIGKILL."""


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
        self._was_ready = False
        self._failed_starts = 0
        self._stopping = False
        self._exit_status = 0
        self._fronts: dict[str, tuple[socket.socket, Callable[[], Child]]] = {}
        self._grace_until = 0.0
        self._cleanup = contextlib.ExitStack()
        self._began = time.monotonic()

    def run(self) -> int:
        """Start everything, serve, stop everything; return the exit status."""
        with self._cleanup:
            self._prepare_run_dir()
            self._watch_signals()
            self._listener = listen(self._settings.socket_path)
            self._cleanup.callback(self._listener.close)
            if not self._backend_only:
                self._bind_fronts()
            self._start_image()
            while self._children or self._timers:
                self._wait()
        return self._exit_status

    def _prepare_run_dir(self) -> None:
        """Make the run folder, lock it against a second start, make the internal key."""
        run_path = self._settings.run_path
        try:
            make_private_dir(run_path)
        except OSError as error:
            raise SettingError(f"INFERENCE_API_RUN_DIR cannot be used: {error}") from None
        lock = (run_path / "lock").open("w")
        self._cleanup.callback(lock.close)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SettingError(f"another service runs in {run_path}; stop it, or set INFERENCE_API_RUN_DIR") from None
        self._cleanup.callback(shutil.rmtree, run_path, ignore_errors=True)
        key_path = self._settings.key_path
        if not self._settings.internal_auth_key and not key_path.exists():
            key_path.touch(mode=0o600)
            key_path.write_text(secrets.token_hex(32))
        self._write_failed_restarts(0)

    def _start_image(self) -> None:
        """Have the model image prepared, in a process of its own; the rest starts when it is there."""
        if self._settings.engine == "mock":
            self._start_on_image(build_mock_image(self._settings.cache_path).path)
            return
        command = ["-m", "inference_api.prepare", "--cache", str(self._settings.cache_path)]
        if self._settings.model:
            command += ["--model", self._settings.model]
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

        self._add_child(
            Child.start("prepare", command, child_environ(self._settings), stdout=output.fileno()), prepared
        )

    def _start_on_image(self, image_path: Path) -> None:
        """Link the image where every process looks for it, then start them."""
        link = self._settings.image_link
        link.unlink(missing_ok=True)
        link.symlink_to(image_path)
        self._start_backend()
        if self._status_fd is not None:
            os.write(self._status_fd, b"1")
        for name, (listener, _) in self._fronts.items():
            listener.listen(LISTEN_BACKLOG)
            self._start_front(name)

    def _watch_signals(self) -> None:
        """Turn SIGTERM and SIGINT into selector events; the handlers themselves do nothing."""
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        reader.setblocking(False)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _ignore)
        self._selector.register(reader, selectors.EVENT_READ, lambda: self._take_signals(reader.recv(64)))
        self._cleanup.callback(writer.close)
        self._cleanup.callback(reader.close)
        self._cleanup.callback(signal.set_wakeup_fd, -1)

    def _take_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number == signal.SIGTERM:
                self._drain(self._settings.grace_seconds)
            elif number == signal.SIGINT:
                self._drain(0.0)

    def _start_backend(self) -> None:
        ours, theirs = socket.socketpair()
        command = ["-m", "inference_api.backend.main"]
        command += ["--listen-fd", str(self._listener.fileno()), "--control-fd", str(theirs.fileno())]
        environ = child_environ(self._settings)
        child = Child.start("backend", command, environ, pass_fds=(self._listener.fileno(), theirs.fileno()))
        theirs.close()
        self._control = control = Connection(ours, StatusMessage)
        self._selector.register(control, selectors.EVENT_READ, lambda: self._read_status(control))
        self._add_child(child, self._backend_exited)

    def _bind_fronts(self) -> None:
        """Take the public ports, so that a taken one is told before anything else starts, and say what runs on them."""
        settings = self._settings
        web = self._bind_port(settings.bind, settings.port, "INFERENCE_API_PORT")
        command = ["-m", "gunicorn", "--config", "python:inference_api.server.gunicorn_settings"]
        command += ["--bind", f"fd://{web.fileno()}"]
        self._fronts["gunicorn"] = (
            web,
            lambda: Child.start("gunicorn", command, child_environ(settings), pass_fds=(web.fileno(),)),
        )
        if self._proxy_address is None:
            return
        host, port = self._proxy_address
        public = self._bind_port(host, port, "the proxy's port")
        proxy_command = ["-m", "proxy.proxy", "--fd", str(public.fileno()), "--bind", host, "--port", str(port)]
        proxy_command += ["--hostname", f"http://{settings.bind}:{settings.port}"]
        extra = {"JWT_SECRET": jwt_secret() or ""}
        if not settings.internal_auth_key:
            extra["INTERNAL_AUTH_KEY_FILE"] = str(settings.key_path)
        self._fronts["proxy"] = (
            public,
            lambda: Child.start("proxy", proxy_command, child_environ(settings, **extra), pass_fds=(public.fileno(),)),
        )

    def _start_front(self, name: str) -> None:
        _, start = self._fronts[name]
        self._add_child(start(), lambda status: self._front_exited(name, status))

    def _bind_port(self, host: str, port: int, name: str) -> socket.socket:
        """Bind without listening: until the service starts, connections are refused."""
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._cleanup.callback(listener.close)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise SettingError(f"{name}: cannot listen on {host}:{port}: {error.strerror}; take another port") from None
        return listener

    def _add_child(self, child: Child, on_exit: Callable[[int], None]) -> None:
        def exited() -> None:
            self._selector.unregister(child.pidfd)
            del self._children[child.name]
            on_exit(child.reap())

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
            self._selector.unregister(control)
            control.close()
            return
        for message in messages:
            match message:
                case Loading():
                    logger.info("backend: %s after %.1f s", message.stage, message.seconds)
                case Ready():
                    self._backend_is_ready(message)
                case Heartbeat():
                    self._set_timer("watchdog", self._settings.watchdog_seconds, self._kill_hung_backend)
                case Drained():
                    self._stop_children()
                case Fatal():
                    self._backend_cannot_start(message.error.message)

    def _backend_is_ready(self, ready: Ready) -> None:
        self._failed_starts = 0
        self._write_failed_restarts(0)
        self._set_timer("watchdog", self._settings.watchdog_seconds, self._kill_hung_backend)
        logger.info("backend is ready after %.1f s", time.monotonic() - self._began)
        if not self._was_ready and not self._backend_only:
            card = functools.partial(print_card, self._settings, ready, proxy=self._proxy_address, secret=jwt_secret())
            threading.Thread(target=card, name="card", daemon=True).start()
        self._was_ready = True

    def _backend_cannot_start(self, cause: str) -> None:
        """Stop a service that has never served; one that has is kept, for memory or a disk may come back."""
        sys.stderr.write(f"ERROR: {cause}\n")
        if not self._was_ready:
            self._exit_status = 1
            self._drain(0.0)

    def _kill_hung_backend(self) -> None:
        backend = self._children.get("backend")
        if backend is not None and not self._stopping:
            logger.error("backend made no step for %g s; it is killed", self._settings.watchdog_seconds)
            backend.kill()

    def _backend_exited(self, status: int) -> None:
        self._timers.pop("watchdog", None)
        if self._stopping:
            self._stop_children()
            return
        self._failed_starts += 1
        logger.error("backend ended with status %d", status)
        if not self._was_ready and self._failed_starts >= MAX_START_DEATHS:
            self._exit_status = 1
            sys.stderr.write(
                f"ERROR: the backend died {MAX_START_DEATHS} times before it was ready; see its log above\n"
            )
            self._drain(0.0)
            return
        # The death of a ready backend is not a failed restart yet; each start after it may be.
        self._write_failed_restarts(max(0, self._failed_starts - 1))
        self._set_timer("restart", BACKOFF_SECONDS[min(self._failed_starts - 1, 5)], self._start_backend)

    def _front_exited(self, name: str, status: int) -> None:
        if self._stopping:
            self._stop_children()
            return
        if not self._was_ready:
            self._exit_status = 1
            sys.stderr.write(f"ERROR: {name} could not start (status {status}); see its log above\n")
            self._drain(0.0)
            return
        logger.error("%s ended with status %d; it is started again", name, status)
        self._set_timer(f"restart {name}", BACKOFF_SECONDS[1], lambda: self._start_front(name))

    def _drain(self, grace_seconds: float) -> None:
        """Refuse new work; stop when the rows are empty or the grace is over. A second signal stops at once."""
        if self._stopping:
            grace_seconds = 0.0
            self._timers.pop("stop", None)
        self._stopping = True
        self._grace_until = time.monotonic() + grace_seconds
        for name in ("restart", "watchdog", *(f"restart {front}" for front in self._fronts)):
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

    def _write_failed_restarts(self, count: int) -> None:
        """Tell the workers' health routes how often the backend could not be started, through a file."""
        partial = self._settings.state_path.with_suffix(".partial")
        partial.write_text(str(count))
        partial.replace(self._settings.state_path)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Let the wakeup descriptor carry the signal."""


def main(argv: list[str] | None = None) -> int:
    """Run the supervisor; return its exit status."""
    parser = argparse.ArgumentParser(prog="serve", description="Run the backend, gunicorn and, if asked, the proxy.")
    parser.add_argument("--proxy-port", type=int, help="start the proxy on this port too")
    parser.add_argument("--proxy-bind", default="127.0.0.1", help="address the proxy listens on")
    parser.add_argument(
        "--status-fd",
        type=int,
        help="start the backend alone, for a gunicorn outside; a byte here tells it that the image is there",
    )
    parser.add_argument("--mock", action="store_true", help="run the mock engine instead of a model")
    parser.add_argument("--model", help="folder, GGUF file or hub id of the model")
    parser.add_argument("--workers", help="number of gunicorn workers")
    parser.add_argument("--insecure-dev", action="store_true", help="serve callers without the proxy, on loopback only")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="supervisor: %(message)s", stream=sys.stderr)
    proxy = (arguments.proxy_bind, arguments.proxy_port) if arguments.proxy_port is not None else None
    try:
        options = {"INFERENCE_API_MODEL": arguments.model, "INFERENCE_API_WORKERS": arguments.workers}
        options["INFERENCE_API_ENGINE"] = "mock" if arguments.mock else None
        options["INFERENCE_API_INSECURE_DEV"] = "1" if arguments.insecure_dev else None
        settings = Settings.from_environ(**{name: text for name, text in options.items() if text is not None})
        return Supervisor(settings, proxy=proxy, status_fd=arguments.status_fd).run()
    except InferenceApiError as error:
        sys.stderr.write(f"ERROR: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
