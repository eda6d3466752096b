"""Check that a watched file's last right text stays in force, and that a new one is seen however it came."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import gevent
import pytest

from proxy.located_json import FileFault
from proxy.watched_file import MAX_FILE_BYTES, WatchedFile, refresh_safely

LONG_AGO = 1_000_000_000


def read(raw: bytes) -> int:
    return int(raw)


def write(path: Path, text: str, age_seconds: int = 60) -> None:
    path.write_text(text)
    os.utime(path, (LONG_AGO - age_seconds, LONG_AGO - age_seconds))


@pytest.fixture(scope="module", autouse=True)
def hub() -> Iterator[None]:
    """Make this thread's hub before the first test, so that its own descriptors are no test's, and take it down."""
    made = gevent.get_hub()
    made.threadpool.apply(int)
    yield
    made.destroy(destroy_loop=True)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    write(path, "1")
    return path


def watched(path: Path, seen: list[int] | None = None) -> WatchedFile[int]:
    return WatchedFile(path, read, None if seen is None else seen.append, now=lambda: LONG_AGO)


def test_a_changed_file_is_in_force_and_its_owner_is_told(path: Path) -> None:
    seen: list[int] = []
    file = watched(path, seen)
    write(path, "22", age_seconds=50)
    assert file.refresh() and (file.value, seen) == (22, [22])
    assert not file.refresh() and seen == [22]


def test_a_file_that_was_replaced_by_another_of_the_same_age_and_size_is_in_force(path: Path) -> None:
    file = watched(path)
    other = path.with_name("other")
    write(other, "2")
    other.replace(path)
    assert file.refresh() and file.value == 2


def test_two_writes_with_one_time_are_both_seen(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(path, "1", age_seconds=0)
    file, first = watched(path), path.stat()
    path.write_text("2")
    with monkeypatch.context() as patch:
        # As on a file system whose clock ticks every few milliseconds.
        patch.setattr("proxy.watched_file.os.stat", lambda _path: first)
        assert file.refresh() and file.value == 2


def test_a_text_that_was_written_again_is_not_taken_over_again(path: Path) -> None:
    reads: list[bytes] = []

    def count(raw: bytes) -> int:
        reads.append(raw)
        return 1

    file = WatchedFile(path, count, now=lambda: LONG_AGO)
    write(path, "1", age_seconds=50)
    file.refresh()
    assert reads == [b"1"]


@pytest.mark.parametrize("fault", ["wrong", "gone", "large", "folder"])
def test_a_wrong_file_changes_nothing_and_is_told_of_once(
    path: Path, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    file = watched(path)
    path.unlink()
    if fault == "wrong":
        write(path, "x")
    if fault == "large":
        write(path, " " * (MAX_FILE_BYTES + 1))
    if fault == "folder":
        path.mkdir()
    with caplog.at_level(logging.WARNING, logger="proxy"):
        assert not file.refresh() and not file.refresh()
    assert file.value == 1
    assert [record.getMessage().endswith("stays in force") for record in caplog.records] == [True]


def test_a_file_that_was_mended_and_broken_again_is_told_of_again(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = watched(path)
    with caplog.at_level(logging.WARNING, logger="proxy"):
        for age_seconds, text in ((50, "x"), (40, "1"), (30, "x")):
            write(path, text, age_seconds)
            file.refresh()
    assert len(caplog.records) == 2


def test_a_wrong_first_file_stops_the_start(path: Path) -> None:
    write(path, "x")
    with pytest.raises(ValueError, match="invalid literal"):
        watched(path)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        watched(path)


def test_a_pipe_in_the_files_place_is_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileFault, match="not a regular file"):
        watched(tmp_path / "pipe")


def test_a_first_file_that_is_too_large_is_a_fault_of_the_file(path: Path) -> None:
    write(path, "1" * (MAX_FILE_BYTES + 1))
    with pytest.raises(FileFault, match=f"is larger than {MAX_FILE_BYTES} bytes"):
        watched(path)


def test_a_defect_of_a_reader_does_not_end_the_watching_and_quotes_nothing(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_value: int) -> None:
        raise RuntimeError("canary")

    file = WatchedFile(path, read, fail, now=lambda: LONG_AGO)
    write(path, "2", age_seconds=50)
    with caplog.at_level(logging.WARNING, logger="proxy"):
        refresh_safely(file)
    assert "RuntimeError" in caplog.text and "canary" not in caplog.text


def test_the_event_loop_goes_on_while_a_pure_parser_reads_a_large_file(path: Path) -> None:
    ticked = threading.Event()

    def wait_for_a_tick(raw: bytes) -> bool:
        return len(raw) == 1 or ticked.wait(5)

    file = WatchedFile(path, wait_for_a_tick, now=lambda: LONG_AGO, is_pure=True)
    write(path, "2" * 10_000, age_seconds=50)
    timer = gevent.spawn_later(0.01, ticked.set)
    assert gevent.spawn(file.refresh).get() and file.value
    timer.join()


@pytest.mark.parametrize(("text", "is_pure"), [("2" * 10_000, False), ("2", True)])
def test_what_has_effects_or_is_small_is_read_where_it_always_was(path: Path, text: str, is_pure: bool) -> None:
    file = WatchedFile(path, lambda _raw: threading.get_ident(), now=lambda: LONG_AGO, is_pure=is_pure)
    write(path, text, age_seconds=50)
    assert file.refresh() and file.value == threading.get_ident()


def test_a_wrong_large_file_is_told_of_in_the_log_alone(
    path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    file = WatchedFile(path, read, now=lambda: LONG_AGO, is_pure=True)
    write(path, "canary" * 2_000, age_seconds=50)
    with caplog.at_level(logging.WARNING, logger="proxy"):
        assert not file.refresh()
    assert file.value == 1 and caplog.text.count("stays in force") == 1
    assert capfd.readouterr().err == ""
