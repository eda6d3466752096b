"""Run a file of this folder as a program: its options, the mock on demand, one-line errors, the exit status.

Called by each program's last lines. An option wins over the environment (LLM_CHAT_API_URL, AUTHORIZATION). Exit status:
0 all well, 1 something failed, 2 nothing could be tried (a wrong option too), 130 interrupted. A file of checks runs
under pytest with a line a check. Knows no route and no figure.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

import pytest

from inference_api.options import OneLineParser
from tests.live.client import Client, Target, TargetError

ROOT = Path(__file__).resolve().parent.parent.parent
URL_NAME, AUTHORIZATION_NAME = "LLM_CHAT_API_URL", "AUTHORIZATION"
FAILED_STATUS, UNTRIED_STATUS, INTERRUPTED_STATUS = 1, 2, 130


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that every program has; a module's docstring describes it."""
    summary, _, rest = (description or "").partition("\n\n")
    parser = OneLineParser(description=f"{summary}\n\n{rest}", formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--url", help=f"base URL, or a route's full URL (default: {URL_NAME})")
    parser.add_argument("--authorization", help=f"value of the header Authorization (default: {AUTHORIZATION_NAME})")
    parser.add_argument("--mock", action="store_true", help="start a service with the mock engine for this run")
    return parser


def positive(text: str) -> int:
    """Convert an option's text into a number of at least 1; argparse turns the ValueError into its message."""
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


@contextlib.contextmanager
def mock_target() -> Iterator[Target]:
    """Run a whole service with the mock engine, its proxy in front, and yield it with a bearer that it accepts."""
    import jwt

    from tests.integration.service import SECRET, running_service

    claims = {"team_id": "live", "token_id": "live-1", "exp": int(time.time()) + 3600}
    with running_service(proxy=True, INFERENCE_API_INSECURE_DEV="0") as service:
        yield Target.parse(service.proxy_url, f"Bearer {jwt.encode(claims, SECRET, 'HS256')}")


@contextlib.contextmanager
def connected_client(options: argparse.Namespace) -> Iterator[Client]:
    """Yield a client of the service that the options name, after one call that it answered; raise TargetError."""
    if options.mock:
        with mock_target() as target:
            yield Client(target).connect()
        return
    url = os.environ.get(URL_NAME, "") if options.url is None else options.url
    if not url:
        raise TargetError(f"no service is named: set {URL_NAME}, give --url, or use --mock")
    given = options.authorization
    authorization = os.environ.get(AUTHORIZATION_NAME, "") if given is None else given
    yield Client(Target.parse(url, authorization)).connect()


def run_program(main: Callable[[Sequence[str] | None], int], arguments: Sequence[str] | None = None) -> int:
    """Run `main` and return the exit status; what stops it becomes one line on standard error."""
    try:
        return main(arguments)
    except TargetError as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return UNTRIED_STATUS
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED_STATUS


def print_result(program: str, client: Client, **figures: object) -> None:
    """Print the one JSON line that ends a program: what ran against which engine, and its figures."""
    about = {"program": program, "url": client.target.base_url, "model": client.model, "engine": client.info["engine"]}
    print(json.dumps({**about, **figures}), flush=True)


class LineReporter:
    """Print one line a check, and remember how many passed; the terminal's own reporter is silenced."""

    def __init__(self) -> None:
        self.num_passed = self.num_failed = 0
        self.interrupted = False

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        plugins = config.pluginmanager
        plugins.unregister(name="terminalreporter")
        plugins.register(pytest.TerminalReporter(config, io.StringIO()), "terminalreporter")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.partition("::")[2]
        if report.failed:
            self.num_failed += 1
            print(f"FAILED {name}\n{report.longreprtext}", flush=True)
        elif report.when == "call":
            self.num_passed += 1
            print(f"ok     {name}", flush=True)

    def interrupt(self, number: int, frame: FrameType | None) -> NoReturn:
        """Take SIGINT: wherever the exception ends, in a check's own handling too, the run is known as interrupted."""
        self.interrupted = True
        raise KeyboardInterrupt

    def pytest_runtest_setup(self) -> None:
        if self.interrupted:
            pytest.exit("interrupted")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.num_failed += 1
            print(f"FAILED to read the checks\n{report.longreprtext}", flush=True)


def run_pytest(file: str, reporter: LineReporter) -> int:
    """Run a file's checks in this process; raise KeyboardInterrupt if they were interrupted."""
    options = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), "--capture=no"]
    before = signal.signal(signal.SIGINT, reporter.interrupt)
    try:
        code = pytest.main([file, *options], plugins=[reporter])
    except Exception:
        # A check that was broken off leaves a thread or a socket behind, and the leak detector says so. Where the
        # signal came between two lines, a traceback's line is None (CPython 3.11), and the terminal reporter subtracts.
        if not reporter.interrupted:
            raise
    finally:
        signal.signal(signal.SIGINT, before)
    if reporter.interrupted:
        raise KeyboardInterrupt
    return code


def run_checks(file: str, description: str | None, arguments: Sequence[str] | None = None) -> int:
    """Run a file's checks against the service that the options name, a line each; return the exit status."""
    options = make_parser(description).parse_args(arguments)
    reporter = LineReporter()
    with connected_client(options) as client:
        # The fixture of conftest.py reads the environment, as it does when pytest runs these files.
        os.environ.update({URL_NAME: client.target.base_url, AUTHORIZATION_NAME: client.target.authorization})
        began = time.monotonic()
        code = run_pytest(file, reporter)
        seconds = round(time.monotonic() - began, 2)
        counts = {"passed": reporter.num_passed, "failed": reporter.num_failed, "seconds": seconds}
        print_result(Path(file).stem, client, **counts)
    return 0 if code == pytest.ExitCode.OK else FAILED_STATUS
