"""Own the start and the end of PROCESS 3: options, settings, then gunicorn with one gevent worker.

Runs as `python proxy/proxy.py` from the root, as `python proxy.py` from its own folder, or as `python -m proxy.proxy`.
It does not know requests; the worker does. The supervising process of gunicorn never loads the app: the libraries that
talk to the network are imported in the worker, after gevent has patched the sockets.
"""

from __future__ import annotations

import argparse
import logging
import os
import resource
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

_FOLDER = Path(__file__).resolve().parent
if __name__ == "__main__" and sys.path and Path(sys.path[0]).resolve() == _FOLDER:
    # Started as a script, Python puts this folder first: `import proxy` would be this file, `import limits` ours.
    sys.path[0] = str(_FOLDER.parent)

from gunicorn.app.base import BaseApplication  # noqa: E402
from gunicorn.arbiter import Arbiter  # noqa: E402

from proxy.access import Access, AccessFiles  # noqa: E402
from proxy.config import ConfigError, Settings, process_environment, read_settings  # noqa: E402
from proxy.limits import open_tenants  # noqa: E402
from proxy.located_json import FileFault, MemberFault  # noqa: E402
from proxy.logs import START_LOGGER, GunicornLog, set_up_logging  # noqa: E402
from proxy.routes import RouteFault, RouteTable  # noqa: E402

START_FAULTS = (ConfigError, FileFault, MemberFault, RouteFault)
"""What stops a start, in one line that names the setting or the file."""


class ProxyArbiter(Arbiter):  # type: ignore[misc]
    """gunicorn's arbiter, which would end with a new worker that cannot start."""

    def handle_hup(self) -> None:
        """Renew the worker on SIGHUP, unless a file that is wrong by now would stop the new one."""
        try:
            check_start(self.app.settings, is_renewal=True)
        except START_FAULTS as fault:
            self.log.error("%s; the worker is not renewed", fault)
        else:
            super().handle_hup()


class ProxyApplication(BaseApplication):  # type: ignore[misc]
    """Tell gunicorn how to run the proxy."""

    def __init__(self, settings: Settings, listen_fd: int) -> None:
        """Keep the settings for the worker, which is forked from this process."""
        self.settings = settings
        self.listen_fd = listen_fd
        super().__init__()

    def load_config(self) -> None:
        """Set gunicorn's options; nothing is read from files, arguments or the environment."""
        for name, value in gunicorn_options(self.settings).items():
            self.cfg.set(name, value)
        self.cfg.set("bind", f"fd://{self.listen_fd}")

    def load(self) -> Any:
        """Build the app, in the worker."""
        from proxy.app import create_app

        return create_app(self.settings)

    def run(self) -> None:
        """Serve until a signal ends it; exits the process."""
        ProxyArbiter(self).run()


def gunicorn_options(settings: Settings) -> dict[str, Any]:
    """List gunicorn's options for these settings."""
    told = logging.getLogger(START_LOGGER)

    def announce(arbiter: Any) -> None:
        """Say where the proxy listens, once it does."""
        port = arbiter.LISTENERS[0].sock.getsockname()[1]
        told.info("http server is starting on %s port %d", settings.bind, port)
        told.info("http server is running as reverse proxy to %s", settings.upstream_url)

    def say_goodbye(_arbiter: Any) -> None:
        """Say that it has ended."""
        told.info("http server stopped.")

    return {
        "workers": 1,
        "worker_class": "proxy.worker.ProxyWorker",
        "worker_connections": settings.max_connections,
        "backlog": 2048,
        "graceful_timeout": int(settings.drain_grace_seconds),
        "timeout": 15,
        "limit_request_line": 4094,
        "limit_request_fields": 50,
        "limit_request_field_size": 8190,
        # A loopback peer may not rewrite paths, schemes or addresses. Names with underscores are dropped, so that they
        # cannot be mistaken for ours; the header set sent upstream is built from scratch anyway.
        "forwarder_headers": "",
        "forwarded_allow_ips": "",
        "secure_scheme_headers": {},
        "header_map": "drop",
        "control_socket_disable": True,
        "logger_class": GunicornLog,
        "loglevel": "warning",
        "when_ready": announce,
        "on_exit": say_goodbye,
    }


def check_start(settings: Settings, *, is_renewal: bool = False) -> None:
    """Build what can be wrong (routes, tenants, keys, policy, revocations) before anything is bound; raise as they do.

    A published key set is fetched once: a wrong one stops the start, an issuer that cannot be reached does not, but in
    a renewal: the worker that would be renewed has its keys.
    """
    RouteTable()
    open_tenants(settings)
    files = AccessFiles(settings.jwt_secret or b"", settings.jwt_policy_file, settings.jwt_revocation_file)
    access = Access(files, time.time)
    if access.published_fault is not None:
        raise access.published_fault
    if is_renewal and not access.has_keys:
        raise FileFault("the published keys cannot be fetched")


def hold_standard_descriptors() -> None:
    """Give stdin, stdout and stderr to /dev/null where they are closed: or a client's socket would get their lines."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number: this one


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open files to the hard one: each connection is one."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def hold_sigterm_over_forks() -> None:
    """Keep a SIGTERM that comes between the fork of the worker and its handler pending; the worker lets it in."""
    held = {signal.SIGTERM}
    os.register_at_fork(
        before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, held),
        after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, held),
    )


def bind_listener(settings: Settings) -> socket.socket:
    """Bind the proxy's address, which gunicorn would try for seconds; raise ConfigError if that cannot be."""
    listener = socket.socket(socket.AF_INET6 if ":" in settings.bind else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.bind.strip("[]"), settings.port))
    except OSError as fault:
        listener.close()
        raise ConfigError(
            f"--bind, --port: cannot listen on {settings.bind}:{settings.port}: {fault.strerror}; take another port"
        ) from None
    return listener


class OneLineParser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line on stderr, and that takes no abbreviated option for the one meant."""

    def error(self, message: str) -> NoReturn:
        """Print `ERROR: …; see PROG --help` and exit with status 2, as argparse does."""
        self.exit(2, f"ERROR: {message}; see {self.prog} --help\n")


def parse_options(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line; exits with one line when it is wrong."""
    description = "JWT reverse proxy in front of the inference server"
    parser = OneLineParser(prog="proxy.py", description=description, allow_abbrev=False)
    parser.add_argument("--port", type=int, default=1223, help="port to listen on, 0 for any (default: %(default)s)")
    parser.add_argument(
        "--hostname",
        default="http://127.0.0.1:7000",
        help="URL of the upstream, not of this server (default: %(default)s)",
    )
    parser.add_argument("--bind", help="address to listen on (default: PROXY_BIND or 127.0.0.1)")
    parser.add_argument("--fd", type=int, help="descriptor of a socket that already listens on --bind and --port")
    parser.add_argument("--insecure-dev", action="store_true", help="accept a weak JWT_SECRET on any address")
    parser.add_argument("--check", action="store_true", help="check the settings and end, without binding anything")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the proxy until SIGTERM or SIGINT, or only check its settings; return 1 when one is wrong."""
    options = parse_options(sys.argv[1:] if arguments is None else arguments)
    hold_standard_descriptors()
    try:
        settings = read_settings(
            process_environment(),
            port=options.port,
            upstream_url=options.hostname,
            bind=options.bind,
            insecure_dev=options.insecure_dev,
        )
        set_up_logging(settings.log_format)
        check_start(settings)
        if options.check:
            return 0
        listen_fd = bind_listener(settings).detach() if options.fd is None else options.fd
    except START_FAULTS as fault:
        print(f"ERROR: {fault}", file=sys.stderr)
        return 1
    for warning in settings.warnings:
        logging.getLogger("proxy").warning("%s", warning)
    raise_descriptor_limit()
    hold_sigterm_over_forks()
    ProxyApplication(settings, listen_fd).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
