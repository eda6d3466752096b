"""Check what counts as a half-finished folder of ours, and that one that is being removed stays one to the end."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from inference_api import half_finished


def mount(point: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernel's list say that something is mounted at `point`; to mount really may take rights that we lack."""
    table = point.parent.parent / "mountinfo"
    name = str(point).replace("\\", r"\134").replace(" ", r"\040").replace("\n", r"\012")
    table.write_text(f"22 1 0:20 / / rw - ext4 /dev/a rw\n36 22 0:20 /home {name} rw,relatime - ext4 /dev/a rw\n")
    monkeypatch.setattr(half_finished, "MOUNTS", table)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = half_finished.make(tmp_path / "model-v1")
    (folder / "model.safetensors").write_text("half of it")
    return folder


def test_a_folder_is_ours_by_name_and_marker_together(folder: Path) -> None:
    assert half_finished.is_half_finished(folder)
    assert not half_finished.is_half_finished(folder.rename(folder.with_name("model-v1")))


@pytest.mark.parametrize("name", ["photos.partial-20240101", "thesis.partial-draft_v2", "model-v1.partial-ab12cd34"])
def test_a_name_alone_is_not_enough(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    half_finished.sweep(tmp_path / name.partition(".partial-")[0])
    assert (tmp_path / name).is_dir() and not half_finished.is_half_finished(tmp_path / name)


def test_neither_a_link_to_one_of_our_folders_nor_a_linked_marker_counts(folder: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.partial-ab12cd34"
    link.symlink_to(folder)
    other = tmp_path / "other.partial-ab12cd34"
    other.mkdir()
    (other / half_finished.MARKER_FILE).symlink_to(folder / half_finished.MARKER_FILE)
    assert not half_finished.is_half_finished(link) and not half_finished.is_half_finished(other)


def test_a_sweep_takes_the_leftovers_of_its_own_target_alone(folder: Path, tmp_path: Path) -> None:
    other = half_finished.make(tmp_path / "model-v2")
    half_finished.sweep(tmp_path / "model-v1")
    assert list(tmp_path.iterdir()) == [other]


def test_a_removal_that_is_killed_leaves_a_folder_that_is_still_ours(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its name sorts before everything else in the folder; it goes last all the same.
    (folder / "blobs").mkdir()

    def kill(_path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", kill)
        with pytest.raises(KeyboardInterrupt):
            half_finished.remove(folder)
    assert half_finished.is_half_finished(folder)
    half_finished.remove(folder)
    assert not folder.exists()


def test_a_removal_follows_no_link(folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    (folder / "link").symlink_to(outside)
    half_finished.remove(folder)
    assert (outside / "kept").is_file()


def test_what_goes_wrong_inside_leaves_nothing_and_a_rename_keeps_the_folder(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), half_finished.beside(tmp_path / "a"):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    with half_finished.beside(tmp_path / "a") as folder:
        folder.rename(tmp_path / "a")
    assert (tmp_path / "a" / half_finished.MARKER_FILE).is_file()


@pytest.mark.parametrize("name", ["photos", "my photos", "a\\134b\n"])
def test_a_folder_with_a_mount_in_it_is_swept_by_nobody(
    folder: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = folder / "below" / name
    inside.mkdir(parents=True)
    (inside / "year.jpg").write_text("x")
    mount(inside, monkeypatch)
    half_finished.sweep(tmp_path / "model-v1")
    with pytest.raises(OSError, match="unmount it first"):
        half_finished.remove(folder)
    assert (inside / "year.jpg").is_file() and (folder / "model.safetensors").is_file()
    assert half_finished.is_half_finished(folder)


def test_a_folder_that_is_a_mount_itself_is_not_emptied_and_its_neighbour_is(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "deep").mkdir()
    mount(folder, monkeypatch)
    neighbour = half_finished.make(tmp_path / "model-v1")
    half_finished.sweep(tmp_path / "model-v1")
    assert (folder / "model.safetensors").is_file() and not neighbour.exists()


def test_a_mount_is_seen_through_a_link_to_the_folder_above_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "photos").mkdir()
    mount(folder / "photos", monkeypatch)
    alias = tmp_path / "alias"
    alias.symlink_to(tmp_path)
    with pytest.raises(OSError, match="unmount it first"):
        half_finished.remove(alias / folder.name)


def test_what_nobody_can_tell_the_mounts_of_stays(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(half_finished, "MOUNTS", tmp_path / "none")
    half_finished.sweep(tmp_path / "model-v1")
    assert (folder / "model.safetensors").is_file()
