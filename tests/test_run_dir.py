"""Check the run folder: one service at a time, a key for its owner alone, and nothing of others is ever removed."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from inference_api.config import Settings
from inference_api.errors import SettingError
from inference_api.run_dir import RunDir


def _settings(folder: Path, **changes: str) -> Settings:
    return Settings(run_dir=str(folder), **changes)


def test_a_second_service_in_the_same_folder_is_refused_and_the_first_keeps_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first, second = RunDir(_settings(folder)), RunDir(_settings(folder))
    first.take()
    with pytest.raises(SettingError, match="another service runs"):
        second.take()
    second.give_back()
    key = (folder / "internal_auth_key").stat()
    assert key.st_mode & 0o777 == 0o600 and key.st_size == 64
    first.give_back()
    assert not folder.exists()
    second.take()
    second.give_back()


def test_what_is_not_its_own_stays_in_the_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "thesis.txt").write_text("years of work")
    run_dir = RunDir(_settings(tmp_path))
    run_dir.take()
    run_dir.link_image(tmp_path / "image")
    run_dir.give_back()
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_folder_that_others_can_read_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(SettingError, match="INFERENCE_API_RUN_DIR cannot be used"):
        RunDir(_settings(tmp_path)).take()


def test_a_key_file_that_the_settings_name_is_neither_made_nor_removed(tmp_path: Path) -> None:
    key = tmp_path / "key"
    run_dir = RunDir(_settings(tmp_path / "run", internal_auth_key_file=str(key)))
    with pytest.raises(SettingError, match="INTERNAL_AUTH_KEY_FILE"):
        run_dir.take()
    assert not key.exists()
    run_dir.give_back()
    key.write_text("k" * 64)
    run_dir.take()
    run_dir.give_back()
    assert key.exists()


def test_the_number_of_failed_restarts_is_replaced_whole(tmp_path: Path) -> None:
    settings = _settings(tmp_path / "run")
    run_dir = RunDir(settings)
    run_dir.take()
    run_dir.write_failed_restarts(5)
    assert settings.state_path.read_text() == "5"
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"failed_restarts", "internal_auth_key", "lock"}
    run_dir.give_back()


def test_a_full_disk_neither_stops_the_service_nor_changes_what_was_told_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = _settings(tmp_path / "run")
    run_dir, other = RunDir(settings), RunDir(_settings(tmp_path / "other"))
    run_dir.take()
    run_dir.write_failed_restarts(3)

    def fail(self: Path, text: str) -> int:
        self.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full_disk:
        full_disk.setattr(Path, "write_text", fail)
        run_dir.write_failed_restarts(4)
        with pytest.raises(SettingError, match="INFERENCE_API_RUN_DIR"):
            other.take()
    assert settings.state_path.read_text() == "3"
    run_dir.give_back()
    other.give_back()
    assert list(tmp_path.iterdir()) == []
