"""Own the two processes that clients reach, as the supervisor starts them: gunicorn and the proxy, each on its socket.

The supervisor binds the sockets and keeps them, so that a front that dies loses no connection that waits. Binding and
listening are two steps: a taken port is told before anything starts, and connections are refused until all is ready.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import socket
from collections.abc import Iterator, Mapping, Sequence

from inference_api.child import Child
from inference_api.config import Settings, child_environ, inherits_listeners, proxy_environ
from inference_api.errors import SettingError

LISTEN_BACKLOG = 2048

SERVER_SETTINGS = "INFERENCE_API_BIND, INFERENCE_API_PORT"
PROXY_SETTINGS = "PROXY_BIND, PROXY_PORT"

_EVERY_ADDRESS = frozenset({"0.0.0.0", "::"})  # noqa: S104 - compared, not bound


@dataclasses.dataclass(frozen=True, slots=True)
class Front:
    """A bound socket and the program that serves it."""

    name: str
    listener: socket.socket
    command: Sequence[str]
    environ: Mapping[str, str]
    setting: str

    def listen(self) -> None:
        """Let connections in; they wait until the program takes them. Raises SettingError if that cannot be."""
        host, port, *_ = self.listener.getsockname()
        with _one_line_fault(self.setting, host, port):
            self.listener.listen(LISTEN_BACKLOG)

    def start(self) -> Child:
        """Start the program."""
        return Child.start(self.name, self.command, self.environ, pass_fds=(self.listener.fileno(),))


def bind_fronts(settings: Settings, proxy: tuple[str, int] | None, cleanup: contextlib.ExitStack) -> list[Front]:
    """Bind the public ports and say what runs on them; `cleanup` closes the sockets. Raises SettingError."""
    web = bind_port(settings.bind, settings.port, SERVER_SETTINGS, cleanup)
    command = ["-m", "gunicorn", "--config", "python:inference_api.server.gunicorn_settings"]
    command += ["--bind", f"fd://{web.fileno()}"]
    fronts = [Front("gunicorn", web, command, child_environ(settings), SERVER_SETTINGS)]
    if proxy is not None:
        host, port = proxy
        public = bind_port(host, port, PROXY_SETTINGS, cleanup)
        _refuse_one_address(web, public)
        command = ["-m", "proxy.proxy", "--fd", str(public.fileno()), "--bind", host, "--port", str(port)]
        command += ["--hostname", settings.url]
        fronts.append(Front("proxy", public, command, proxy_environ(settings), PROXY_SETTINGS))
    return fronts


def refuse_taken_ports(addresses: Sequence[object], *, reuse_port: bool) -> None:
    """Bind gunicorn's own TCP addresses for a moment; raise SettingError for one that cannot be had.

    Does nothing where a taken port is no fault: with `reuse_port`, or when gunicorn was handed its sockets.
    """
    if reuse_port or inherits_listeners():
        return
    with contextlib.ExitStack() as cleanup:
        for address in addresses:
            if isinstance(address, tuple):
                bind_port(address[0], address[1], f"--bind, {SERVER_SETTINGS}", cleanup)


def bind_port(host: str, port: int, name: str, cleanup: contextlib.ExitStack) -> socket.socket:
    """Bind without listening; raise SettingError, naming the setting and the address, if that cannot be."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    cleanup.callback(listener.close)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    with _one_line_fault(name, host, port):
        listener.bind((host, port))
    return listener


def _refuse_one_address(web: socket.socket, public: socket.socket) -> None:
    """Raise SettingError if both are bound to one address: the kernel would tell when the second begins to listen."""
    (web_host, web_port, *_), (host, port, *_) = web.getsockname(), public.getsockname()
    if web_port == port and (web_host == host or _EVERY_ADDRESS & {web_host, host}):
        raise SettingError(
            f"INFERENCE_API_PORT and PROXY_PORT (--port, --proxy-port) are both {port}; change one of them"
        )


@contextlib.contextmanager
def _one_line_fault(name: str, host: str, port: int) -> Iterator[None]:
    """Turn the kernel's refusal of an address into a SettingError that names the setting."""
    try:
        yield
    except OSError as error:
        advice = "; take another port" if error.errno == errno.EADDRINUSE else ""
        raise SettingError(f"{name}: cannot listen on {host}:{port}: {error.strerror}{advice}") from None
