"""Run the programs of this folder as programs: help, addresses and bearers, exit statuses, Ctrl-C, a real terminal.

What must break is broken by a stub; what must work runs against the same service as the other checks.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from inference_api.backend.engines import sampler
from tests.integration.service import free_port, in_parallel, wait_for
from tests.live import program, test_decode, test_inference_api_load
from tests.live.client import Client, Stream, Target
from tests.live.locust_run import read_counts
from tests.live.screen import Screen
from tests.live.stub_service import stub_service
from tests.live.test_inference_api_load import run_load

FOLDER = Path(__file__).resolve().parent
CHECKS = ("test_inference_api.py", "test_frontend_api.py")
LOADS = ("test_inference_api_load.py", "test_inference_api_remote.py", "client_performance.py")
PROGRAMS = (*CHECKS, *LOADS, "locust_run.py")


def environ(**names: str) -> dict[str, str]:
    """Return this process's environment without the names that the programs read, and with those given."""
    hidden = ("LLM_CHAT_API_URL", "AUTHORIZATION", "COLUMNS", "LINES")
    return {**{name: value for name, value in os.environ.items() if name not in hidden}, **names}


def run(program: str, *arguments: str, **names: str) -> subprocess.CompletedProcess[str]:
    """Run a program to its end."""
    command = [sys.executable, str(FOLDER / program), *arguments]
    return subprocess.run(command, env=environ(**names), capture_output=True, text=True, timeout=60)


def addressed(client: Client) -> dict[str, str]:
    """Return the environment that names the service of the checks."""
    return {"LLM_CHAT_API_URL": client.target.base_url, "AUTHORIZATION": client.target.authorization}


def result_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return the JSON line that ends a program's output."""
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def num_rows_in_use(client: Client) -> int:
    """Return the number of rows that decode or prefill now."""
    with client.get("/rows") as answer:
        body = answer.json()
    assert answer.status == 200, body
    return int(body["num_rows_in_use"])


def run_all(
    *arguments: str, programs: Sequence[str] = PROGRAMS, **names: str
) -> list[subprocess.CompletedProcess[str]]:
    """Run every program at once, to its end."""
    return in_parallel([functools.partial(run, program, *arguments, **names) for program in programs])


def test_every_program_explains_itself() -> None:
    for done in run_all("--help"):
        assert done.returncode == 0, done.stderr
        assert all(option in done.stdout for option in ("--url", "--authorization", "--mock"))
        assert len(done.stdout.splitlines()) > 10


def test_without_a_service_every_program_says_so_in_one_line() -> None:
    for names in ({}, {"LLM_CHAT_API_URL": f"http://127.0.0.1:{free_port()}"}):
        for done in run_all(**names):
            assert (done.returncode, done.stdout) == (2, "")
            assert len(done.stderr.splitlines()) == 1
            assert done.stderr.startswith("ERROR: nothing answers at" if names else "ERROR: no service is named")


def test_an_unknown_option_is_one_line_that_names_it() -> None:
    for done in run_all("--frobnicate", programs=(*PROGRAMS, "test_decode.py")):
        assert (done.returncode, done.stdout) == (2, "")
        (line,) = done.stderr.splitlines()
        assert line.startswith("ERROR: unrecognized arguments: --frobnicate; see ") and line.endswith(".py --help")


def test_a_missing_and_a_refused_bearer_are_named_and_an_option_wins_over_the_environment() -> None:
    with stub_service(bearer="Bearer right") as url:
        missing = run("client_performance.py", LLM_CHAT_API_URL=url)
        refused = run(
            "test_inference_api.py", "--url", url, "--authorization", "Bearer x", AUTHORIZATION="Bearer right"
        )
        accepted = run(
            "test_inference_api_load.py", "--url", url, "--authorization", "Bearer right", LLM_CHAT_API_URL="http://x:1"
        )
    assert (missing.returncode, refused.returncode, accepted.returncode) == (2, 2, 0)
    assert "AUTHORIZATION is missing" in missing.stderr and "Bearer x" not in refused.stderr
    assert "AUTHORIZATION is not accepted" in refused.stderr and len(refused.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("fault", "status", "overloaded", "failed"),
    [
        ("none", 0, 0, 0),
        ("overloaded", 0, 99, 0),
        ("503", 1, 0, 99),
        ("warming", 1, 0, 99),
        ("500", 1, 0, 99),
        ("cut", 1, 0, 99),
    ],
)
def test_the_load_tells_refused_from_failed(fault: str, status: int, overloaded: int, failed: int) -> None:
    with stub_service({"predictions": fault}) as url:
        done = run("test_inference_api_load.py", "--url", url, "--threads", "4")
    figures = result_of(done)
    assert (done.returncode, figures["overloaded"], figures["failed"]) == (status, overloaded, failed)
    assert figures["answered"] == 99 - overloaded - failed


@pytest.mark.parametrize("error", [RuntimeError("unforeseen"), ValueError("unforeseen"), OSError("unforeseen")])
def test_whatever_breaks_a_call_of_the_load_counts_its_prompt_as_failed(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_arguments: object, **_parameters: object) -> Stream:
        raise error

    monkeypatch.setattr(Client, "generate", fail)
    result = run_load(Client(Target.parse("http://h:1")), ["a", "b", "c"], 2, 4)
    assert result.failures == [f"{type(error).__name__}: unforeseen"] * 3


def test_a_prompt_whose_fate_nobody_knows_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(test_inference_api_load, "_send", lambda *_arguments: None)
    with stub_service() as url:
        assert test_inference_api_load.main(["--url", url]) == 1
    assert "99 of 99 prompts" in capsys.readouterr().err


def test_a_failed_check_is_shown_and_is_exit_status_1() -> None:
    with stub_service({"inference": "500"}) as url:
        done = run("test_frontend_api.py", "--url", url)
    assert done.returncode == 1
    assert result_of(done)["failed"] > 0
    assert "FAILED test_an_answer_ends_before_its_stop_sequence" in done.stdout


def test_the_checks_run_as_programs(client: Client) -> None:
    done = run("test_frontend_api.py", **addressed(client))
    assert done.returncode == 0, done.stdout + done.stderr
    figures = result_of(done)
    assert figures["failed"] == 0 and figures["passed"] == done.stdout.count("ok     test_")


def test_a_routes_full_url_is_the_route_that_is_called(client: Client) -> None:
    names = {**addressed(client), "LLM_CHAT_API_URL": f"{client.target.base_url}/chat/falcon40b"}
    done = run("test_inference_api_remote.py", "--lines", "3", "--max-tokens", "5", **names)
    assert done.returncode == 0, done.stderr
    assert result_of(done)["done"] == 3
    assert "event:" not in done.stdout and "\x1b" not in done.stdout


def test_the_performance_of_one_and_of_several_clients_is_measured(client: Client) -> None:
    arguments = ("--clients", "1,4", "--requests", "2", "--max-tokens", "16")
    done = run("client_performance.py", *arguments, **addressed(client))
    assert done.returncode == 0, done.stderr
    runs = result_of(done)["clients"]
    assert [(number, run["requests"], run["failed"]) for number, run in runs.items()] == [("1", 2, 0), ("4", 8, 0)]
    assert all(0 < run["ttft_ms"]["p50"] <= run["ttft_ms"]["all_below"] for run in runs.values())
    assert all(run["tokens_per_second_per_stream"] > 0 for run in runs.values())
    if client.counts_digits:
        assert (runs["1"]["tokens"], runs["4"]["tokens"]) == (2 * 16, 8 * 16)


@pytest.mark.parametrize("program", LOADS)
def test_ctrl_c_ends_a_program_in_one_line(client: Client, program: str) -> None:
    command = [sys.executable, str(FOLDER / program), "--max-tokens", "2000"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environ(**addressed(client)), stdout=pipe, stderr=pipe, text=True) as process:
        wait_for(lambda: num_rows_in_use(client) > 0, 30.0, "a row in use")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (130, "interrupted\n")
    wait_for(lambda: num_rows_in_use(client) == 0, 5.0, "free rows")


def test_ctrl_c_ends_the_checks_and_the_service_that_they_started() -> None:
    command = [sys.executable, str(FOLDER / "test_inference_api.py"), "--mock"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env=environ(), stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("ok ")
        # A terminal sends the signal to every process in front, the service's too.
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (130, "interrupted\n")
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


@pytest.mark.parametrize("body", ["raise", "swallow"])
def test_an_interrupt_ends_the_checks_wherever_its_exception_ends(
    body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handling = {"raise": "raise", "swallow": "pass"}[body]
    checks = tmp_path / "test_broken_off.py"
    checks.write_text(
        "import signal\n"
        "def test_broken_off():\n"
        "    try:\n"
        "        signal.raise_signal(signal.SIGINT)\n"
        "    except KeyboardInterrupt:\n"
        f"        {handling}\n"
        "def test_after_it():\n"
        "    raise SystemExit(9)\n"
    )

    def fail(reporter: pytest.TerminalReporter, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        raise TypeError("unsupported operand type(s) for -: 'NoneType' and 'int'")

    monkeypatch.setattr(pytest.TerminalReporter, "pytest_keyboard_interrupt", fail)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        program.run_pytest(str(checks), program.LineReporter())
    assert signal.getsignal(signal.SIGINT) is before


def shown_on_a_terminal(client: Client, num_rows: int, *arguments: str) -> tuple[Screen, bytes]:
    """Run the live display on a terminal of 100 columns; return what its screen shows at the end, and every byte."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", num_rows, 100, 0, 0))
    command = [sys.executable, str(FOLDER / "test_inference_api_remote.py"), *arguments]
    written = b""
    try:
        with subprocess.Popen(command, env=environ(**addressed(client)), stdin=slave, stdout=slave, stderr=slave) as it:
            os.close(slave)
            # Linux answers EIO once the last process has closed the terminal (pty(7)).
            while part := _read(master):
                written += part
        assert it.returncode == 0
    finally:
        os.close(master)
    screen = Screen(num_rows, 100)
    screen.write(written.decode())
    return screen, written


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:
        return b""


def test_a_terminal_shows_each_stream_on_its_line_redrawn_in_place(client: Client) -> None:
    screen, written = shown_on_a_terminal(client, 40, "--max-tokens", "64")
    rows = [row for row in screen.rows if " done " in row]
    assert len(rows) == 32
    assert [int(row.split()[0]) for row in rows] == list(range(32))
    assert written.count(b"\x1b[32A") >= 2, "drawn once, then over itself"
    assert [row for row in screen.rows if row.startswith("32 done, 0 overloaded, 0 failed")]
    if client.counts_digits:
        assert all(row.split()[2].isdigit() and len(row.split()[2]) == 64 for row in rows)


def test_a_low_terminal_shows_as_many_streams_as_fit_and_counts_the_others(client: Client) -> None:
    screen, _ = shown_on_a_terminal(client, 12, "--max-tokens", "16")
    assert [row for row in screen.rows if row == "... and 24 more"]
    assert len([row for row in screen.rows if " done " in row]) >= 5


def test_locust_finds_requests_and_no_failure(client: Client, tmp_path: Path) -> None:
    arguments = ("--users", "4", "--spawn-rate", "4", "--seconds", "2", "--max-tokens", "8")
    done = run("locust_run.py", *arguments, "--out", str(tmp_path / "run"), **addressed(client))
    assert done.returncode == 0, done.stdout + done.stderr
    counts = read_counts(tmp_path / "run_stats.csv")
    assert counts["requests"] > 0 and counts["failed"] == 0
    assert counts.items() <= result_of(done).items()
    assert (tmp_path / "run.html").stat().st_size > 1000


def test_locust_counts_refusals_apart_from_failures(tmp_path: Path) -> None:
    def run_against(name: str, faults: dict[str, str]) -> subprocess.CompletedProcess[str]:
        arguments = ("--users", "4", "--spawn-rate", "4", "--seconds", "2", "--out", str(tmp_path / name))
        with stub_service(faults) as url:
            return run("locust_run.py", "--url", url, *arguments)

    refused, failed = in_parallel(
        [
            lambda: run_against("refused", {"predictions": "overloaded", "chat": "overloaded"}),
            # A chat without its close event has failed, as a raw answer that was cut has.
            lambda: run_against("failed", {"predictions": "cut", "chat": "none"}),
        ]
    )
    counts = result_of(refused)
    assert (refused.returncode, counts["failed"]) == (0, 0)
    assert counts["overloaded"] == counts["requests"] > 0
    counts = result_of(failed)
    assert (failed.returncode, counts["overloaded"]) == (1, 0)
    assert counts["failed"] == counts["requests"] > 0


@pytest.mark.torch
def test_the_comparison_of_samplers_prints_how_many_it_made(capsys: pytest.CaptureFixture[str]) -> None:
    assert test_decode.main(["--batches", "5"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["compared"] > 5 and figures["different"] == 0


@pytest.mark.torch
def test_the_comparison_of_samplers_finds_a_wrong_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    right = sampler.sample

    def wrong(*arguments: Any) -> Any:
        draws = right(*arguments)
        return [*draws[:-1], draws[-1]._replace(token_id=draws[-1].token_id + 1)]

    monkeypatch.setattr(sampler, "sample", wrong)
    assert test_decode.main(["--batches", "5"]) == 1
