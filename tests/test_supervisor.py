"""Check what the supervisor decides when children end, hang or report, with children that only remember."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from inference_api import supervisor as supervisor_module
from inference_api.config import Settings
from inference_api.errors import SettingError
from inference_api.fronts import bind_port
from inference_api.messages import (
    Drain,
    Drained,
    ErrorInfo,
    Fatal,
    Heartbeat,
    Message,
    Ready,
    StatusMessage,
    Stop,
)
from inference_api.queues import Connection
from inference_api.restarts import BACKOFF_SECONDS, SETTLED_SECONDS
from inference_api.supervisor import MAX_START_DEATHS, STOP_SECONDS, Supervisor, main

READY = Ready("incarnation-1", "digest", "mock", "mock", "none", 4, 64, True)
NOW = 5000.0


class FakeChild:
    """A child that remembers what was done to it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ends: list[str] = []

    def terminate(self) -> None:
        self.ends.append("terminate")

    def kill(self) -> None:
        self.ends.append("kill")


class FakeControl:
    """The backend's control channel: what was sent to it, and what comes from it."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.incoming: list[StatusMessage] = []

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def receive(self) -> list[StatusMessage]:
        messages, self.incoming = self.incoming, []
        return messages


class Stage:
    """A supervisor with fake children, and a clock that stands still."""

    def __init__(self, folder: Path) -> None:
        settings = Settings(engine="mock", run_dir=str(folder), grace_seconds=30.0, watchdog_seconds=5.0)
        self.supervisor = Supervisor(settings, proxy=None, status_fd=99)
        self.control = FakeControl()
        self.children = {name: FakeChild(name) for name in ("backend", "gunicorn", "proxy")}
        self.supervisor._control = self.control  # type: ignore[assignment]
        self.supervisor._forget_control = lambda: None  # type: ignore[method-assign]
        self.supervisor._children = dict(self.children)  # type: ignore[arg-type]
        self.supervisor._fronts = dict.fromkeys(("gunicorn", "proxy"))  # type: ignore[assignment]
        self.state_path = settings.state_path

    def report(self, *messages: StatusMessage) -> None:
        self.control.incoming += messages
        self.supervisor._read_status(self.control)  # type: ignore[arg-type]

    def end(self, name: str, status: int = 1) -> None:
        del self.supervisor._children[name]
        if name == "backend":
            self.supervisor._backend_exited(status)
        else:
            self.supervisor._front_exited(name, status)

    def start_backend_again(self) -> None:
        self.supervisor._timers.pop("restart")
        self.supervisor._children["backend"] = FakeChild("backend")  # type: ignore[assignment]

    def timer(self, name: str) -> float | None:
        """Return in how many seconds a timer fires."""
        timer = self.supervisor._timers.get(name)
        return None if timer is None else timer[0] - NOW

    def fire(self, name: str) -> None:
        self.supervisor._timers.pop(name)[1]()


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setattr(supervisor_module.time, "monotonic", lambda: NOW)
    stage = Stage(tmp_path)
    yield stage
    stage.supervisor._cleanup.close()
    stage.supervisor._selector.close()


def test_a_backend_that_was_ready_is_started_again_at_once_then_with_growing_waits(stage: Stage) -> None:
    stage.report(READY)
    waits = []
    for _ in range(len(BACKOFF_SECONDS) + 2):
        stage.end("backend")
        waits.append(stage.timer("restart"))
        stage.start_backend_again()
    assert waits == [*BACKOFF_SECONDS, BACKOFF_SECONDS[-1], BACKOFF_SECONDS[-1]]


def test_failed_restarts_are_told_to_the_workers_and_forgotten_once_settled(stage: Stage) -> None:
    stage.report(READY)
    told = []
    for _ in range(6):
        stage.end("backend")
        told.append(stage.state_path.read_text())
        stage.start_backend_again()
    assert told == ["0", "1", "2", "3", "4", "5"]
    stage.report(READY)
    assert stage.timer("settled") == SETTLED_SECONDS
    stage.fire("settled")
    assert stage.state_path.read_text() == "0"
    stage.end("backend")
    assert (stage.state_path.read_text(), stage.timer("restart")) == ("0", 0.0)


def test_a_backend_that_becomes_ready_and_dies_at_once_again_and_again_waits_longer_and_is_told(stage: Stage) -> None:
    waits = []
    for _ in range(6):
        stage.report(READY)
        stage.end("backend")
        waits.append(stage.timer("restart"))
        stage.start_backend_again()
    assert waits == [*BACKOFF_SECONDS, BACKOFF_SECONDS[-1]]
    assert stage.state_path.read_text() == "5"


def test_a_fatal_cause_at_a_restart_leaves_the_service_answering(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.report(READY)
    stage.report(Fatal(ErrorInfo("memory_short", "weights need 9 MiB")))
    assert not stage.supervisor._stopping
    assert "weights need 9 MiB" in capsys.readouterr().err


def test_a_backend_that_never_was_ready_stops_the_service_after_three_deaths(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(MAX_START_DEATHS - 1):
        stage.end("backend")
        assert not stage.supervisor._stopping
        stage.start_backend_again()
    stage.end("backend")
    assert stage.supervisor._exit_status == 1
    assert stage.children["gunicorn"].ends == ["terminate"]
    assert stage.timer("restart") is None
    assert "died 3 times before it was ready" in capsys.readouterr().err


def test_a_fault_that_no_restart_helps_stops_the_service_with_its_text(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.report(Fatal(ErrorInfo("memory_short", "weights need 9 MiB")))
    assert stage.supervisor._exit_status == 1
    assert stage.children["gunicorn"].ends == ["terminate"]
    assert "weights need 9 MiB" in capsys.readouterr().err


def test_the_last_words_of_a_backend_that_has_exited_count(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    stage.control.incoming.append(Fatal(ErrorInfo("model_error", "the weights are broken")))
    stage.end("backend")
    assert stage.supervisor._exit_status == 1
    assert stage.timer("restart") is None
    assert "the weights are broken" in capsys.readouterr().err


def test_a_heartbeat_that_is_read_after_the_exit_arms_no_watchdog(stage: Stage) -> None:
    stage.report(READY)
    stage.control.incoming.append(Heartbeat())
    stage.end("backend")
    assert stage.timer("watchdog") is None


def test_the_watchdog_watches_a_ready_backend_only(stage: Stage) -> None:
    assert stage.timer("watchdog") is None
    stage.report(READY)
    assert stage.timer("watchdog") == 5.0


def test_each_heartbeat_puts_the_watchdog_off(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.report(READY)
    monkeypatch.setattr(supervisor_module.time, "monotonic", lambda: NOW + 4.0)
    stage.report(Heartbeat())
    assert stage.timer("watchdog") == 9.0


def test_a_backend_without_a_heartbeat_is_killed(stage: Stage) -> None:
    stage.report(READY)
    stage.fire("watchdog")
    assert stage.children["backend"].ends == ["kill"]


def test_a_stopping_service_kills_no_backend_for_a_missing_heartbeat(stage: Stage) -> None:
    stage.report(READY)
    kill = stage.supervisor._timers["watchdog"][1]
    stage.supervisor._drain(30.0)
    assert stage.timer("watchdog") is None
    kill()
    assert stage.children["backend"].ends == []


def test_a_drain_tells_the_backend_and_waits_for_the_rows_within_the_grace(stage: Stage) -> None:
    stage.supervisor._take_signals(bytes([15]))
    assert stage.control.sent == [Drain()]
    assert stage.timer("grace") == 30.0
    assert stage.children["gunicorn"].ends == []


@pytest.fixture
def own_signals() -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("before", "sent"), [(signal.SIG_DFL, [Drain()]), (signal.SIG_IGN, [])])
def test_a_terminal_that_closes_begins_a_drain_unless_nohup_says_otherwise(
    stage: Stage, own_signals: None, before: signal.Handlers, sent: list[Drain]
) -> None:
    signal.signal(signal.SIGHUP, before)
    stage.supervisor._watch_signals()
    for _ in range(2):  # of a shell and of its kernel
        os.kill(os.getpid(), signal.SIGHUP)
        stage.supervisor._set_timer("test", 0.0, lambda: None)
        stage.supervisor._wait()
    assert stage.control.sent == sent


@pytest.mark.parametrize("how", ["drained", "grace over"])
def test_empty_rows_or_the_end_of_the_grace_stop_everything_politely(stage: Stage, how: str) -> None:
    stage.supervisor._take_signals(bytes([15]))
    if how == "drained":
        stage.report(Drained())
    else:
        stage.fire("grace")
    assert stage.control.sent == [Drain(), Stop()]
    assert [stage.children[name].ends for name in ("gunicorn", "proxy")] == [["terminate"], ["terminate"]]
    assert stage.children["backend"].ends == []
    assert stage.timer("stop") is not None


def test_an_interrupt_stops_at_once_and_a_second_one_kills(stage: Stage) -> None:
    stage.supervisor._take_signals(bytes([2]))
    assert stage.control.sent == [Stop()]
    assert stage.timer("stop") == STOP_SECONDS
    stage.supervisor._take_signals(bytes([2]))
    assert [child.ends[-1:] for child in stage.children.values()] == [["kill"]] * 3


def test_an_interrupt_shortens_the_time_that_readers_had_left(stage: Stage) -> None:
    stage.supervisor._take_signals(bytes([15]))
    stage.report(Drained())
    assert stage.timer("stop") == 30.0
    stage.supervisor._take_signals(bytes([2]))
    assert stage.timer("stop") == STOP_SECONDS
    assert "kill" not in stage.children["gunicorn"].ends


def test_a_second_signal_ends_the_grace(stage: Stage) -> None:
    stage.supervisor._take_signals(bytes([15, 15]))
    assert stage.control.sent == [Drain(), Stop()]
    assert stage.timer("grace") is None


def test_what_does_not_end_in_time_is_killed(stage: Stage) -> None:
    stage.supervisor._take_signals(bytes([2]))
    del stage.supervisor._children["proxy"]
    stage.fire("stop")
    assert stage.children["backend"].ends == ["kill"]
    assert stage.children["gunicorn"].ends == ["terminate", "kill"]
    assert stage.children["proxy"].ends == ["terminate"]


def test_a_child_that_ends_while_stopping_is_not_started_again(stage: Stage) -> None:
    stage.report(READY)
    stage.supervisor._take_signals(bytes([15]))
    stage.end("gunicorn")
    stage.end("backend")
    assert stage.timer("restart gunicorn") is None
    assert stage.timer("restart") is None


def test_a_front_that_dies_is_started_again_once_the_service_has_run(stage: Stage) -> None:
    stage.report(READY)
    stage.end("gunicorn")
    assert stage.timer("restart gunicorn") == BACKOFF_SECONDS[0]
    assert not stage.supervisor._stopping


def test_a_front_that_cannot_start_stops_the_service(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    stage.end("proxy", 3)
    assert stage.supervisor._exit_status == 1
    assert stage.supervisor._stopping
    assert "proxy could not start (status 3)" in capsys.readouterr().err


def test_a_front_that_never_lasts_stops_the_service_after_three_deaths(stage: Stage) -> None:
    stage.report(READY)
    for _ in range(MAX_START_DEATHS):
        assert not stage.supervisor._stopping
        stage.end("proxy", 1)
        stage.supervisor._children["proxy"] = stage.children["proxy"]  # type: ignore[assignment]
    assert stage.supervisor._exit_status == 1


def test_a_taken_port_stops_the_start_and_names_the_setting(stage: Stage) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingError, match=f"INFERENCE_API_PORT: cannot listen on 127.0.0.1:{port}"):
            bind_port("127.0.0.1", port, "INFERENCE_API_PORT", stage.supervisor._cleanup)


def test_a_timer_fires_once_and_not_before_its_time(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    fired: list[float] = []
    waits: list[float | None] = []
    monkeypatch.setattr(stage.supervisor._selector, "select", lambda timeout: waits.append(timeout) or [])
    stage.supervisor._set_timer("bell", 2.0, lambda: fired.append(time.monotonic() - NOW))
    stage.supervisor._wait()
    assert (waits, fired) == ([2.0], [])
    monkeypatch.setattr(supervisor_module.time, "monotonic", lambda: NOW + 2.0)
    stage.supervisor._wait()
    stage.supervisor._wait()
    assert fired == [2.0]
    assert waits == [2.0, 0.0, None]


def test_a_control_channel_that_ends_is_closed_and_nothing_else_happens(stage: Stage) -> None:
    ours, theirs = socket.socketpair()
    control = stage.supervisor._control = Connection(ours, StatusMessage)
    del stage.supervisor._forget_control
    stage.supervisor._selector.register(control, selectors.EVENT_READ, None)
    theirs.close()
    stage.supervisor._read_status(control)
    assert control.fileno() == -1
    assert not stage.supervisor._stopping


def test_a_wrong_setting_ends_with_status_one_and_its_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("INFERENCE_API_ROWS", "many")
    assert main(["--mock"]) == 1
    assert "INFERENCE_API_ROWS='many' is not an integer" in capsys.readouterr().err


def test_the_time_until_ready_counts_from_that_backends_own_start(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with socket.socket() as listener:
        stage.supervisor._listener = listener
        monkeypatch.setattr(supervisor_module.Child, "start", lambda name, *_, **__: FakeChild(name))
        monkeypatch.setattr(stage.supervisor, "_add_child", lambda _child, _on_exit: None)
        monkeypatch.setattr(supervisor_module.time, "monotonic", lambda: NOW + 100.0)
        stage.supervisor._start_backend()
        control = stage.supervisor._control
        monkeypatch.setattr(supervisor_module.time, "monotonic", lambda: NOW + 102.5)
        stage.report(READY)
        stage.supervisor._selector.unregister(control)  # type: ignore[arg-type]
        control.close()  # type: ignore[union-attr]
    assert "backend is ready after 2.5 s" in caplog.messages
