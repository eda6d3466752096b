"""Check that a saved image is whole or absent, and a copy that nothing else can change."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from inference_api import half_finished, model_image, saved_image
from inference_api.errors import ModelError
from inference_api.model_image import ModelImage, build_mock_image
from inference_api.saved_image import SavedImage


def quiet(_line: str) -> None:
    """Take a progress line."""


@pytest.fixture
def image(tmp_path: Path) -> ModelImage:
    return build_mock_image(tmp_path / "built")


@pytest.fixture
def saved(tmp_path: Path) -> SavedImage:
    return SavedImage.named(tmp_path / "cache" / "tti_cache", "tiny", "v0")


def test_a_save_is_a_copy_that_outlives_the_images_own_files(image: ModelImage, saved: SavedImage) -> None:
    saved.save(image, quiet)
    image.tokenizer_path.write_text("changed behind its back")
    loaded = saved.load(quiet)
    assert (loaded.path, loaded.digest) == (saved.folder / "tiny-v0", image.digest)


def test_packed_weights_come_along_under_their_own_digest_and_change_none_of_the_images(
    image: ModelImage, saved: SavedImage, tmp_path: Path
) -> None:
    packed = tmp_path / f"packed-{image.digest[:16]}-{'1' * 16}-{'2' * 16}.bin"
    packed.write_bytes(b"packed")
    saved.save(image, quiet, [packed])
    assert saved.load(quiet).digest == image.digest
    assert (saved.path / packed.name).read_bytes() == b"packed"
    (saved.path / packed.name).write_bytes(b"PACKED")
    with pytest.raises(ModelError, match=f"{packed.name} does not have the SHA-256 of the manifest"):
        saved.load(quiet)


def test_a_save_that_is_interrupted_leaves_nothing_and_the_next_one_works(
    image: ModelImage, saved: SavedImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(model_image, "verify", interrupt)
        with pytest.raises(KeyboardInterrupt):
            saved.save(image, quiet)
    assert list(saved.folder.iterdir()) == []
    saved.save(image, quiet)
    assert saved.load(quiet).digest == image.digest


def test_what_a_killed_save_left_is_no_image_and_is_swept(image: ModelImage, saved: SavedImage) -> None:
    saved.folder.mkdir(parents=True)
    leftover = half_finished.make(saved.path)
    (leftover / "manifest.json").write_bytes((image.path / "manifest.json").read_bytes())
    with pytest.raises(ModelError, match="provided tti path does not exist: "):
        saved.load(quiet)
    saved.save(image, quiet)
    assert [path.name for path in saved.folder.iterdir()] == ["tiny-v0"]
    assert not (saved.path / half_finished.MARKER_FILE).exists()


def test_a_file_that_cannot_be_read_is_one_line_that_names_it(image: ModelImage, saved: SavedImage) -> None:
    saved.save(image, quiet)
    manifest = json.loads((saved.path / "manifest.json").read_text())
    manifest["files"]["torn"] = {"size_bytes": 0, "sha256": "0" * 64}
    (saved.path / "manifest.json").write_text(json.dumps(manifest))
    # A file whose every read fails: nothing is mapped at the address 0 (proc_pid_mem(5)).
    (saved.path / "torn").symlink_to("/proc/self/mem")
    with pytest.raises(ModelError, match="torn cannot be read: Input/output error"):
        saved.load(quiet)


def test_a_users_folder_that_is_named_like_a_leftover_stays(image: ModelImage, saved: SavedImage) -> None:
    mine = saved.folder / "tiny-v0.partial-draft_v2"
    mine.mkdir(parents=True)
    saved.save(image, quiet)
    assert mine.is_dir()


def test_a_disk_without_room_is_named_with_both_numbers_and_nothing_is_left(
    image: ModelImage, saved: SavedImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_image, "free_disk_bytes", lambda _folder: 7)
    with pytest.raises(ModelError, match=r"no disk space: the saved image needs \d+ bytes in .*, 7 are free"):
        saved.save(image, quiet)
    assert list(saved.folder.iterdir()) == []


def test_a_place_that_cannot_be_written_is_one_line_with_what_to_do(image: ModelImage, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "tti_cache").write_text("a file in the way")
    with pytest.raises(ModelError, match="make it writable, or set INFERENCE_API_CACHE_DIR") as caught:
        SavedImage.named(tmp_path / "cache" / "tti_cache", "tiny", "v0").save(image, quiet)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", ["", "../v0", "a/b", ".hidden", "x" * 65, "v 0"])
def test_a_suffix_that_cannot_end_a_folders_name_is_refused(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(ModelError, match="cannot end a folder's name"):
        SavedImage.named(tmp_path, "tiny", suffix)


def test_a_disk_that_fills_up_in_the_middle_is_told_by_the_place_that_is_full(
    image: ModelImage, saved: SavedImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(source), None, str(target))

    monkeypatch.setattr(saved_image.shutil, "copyfile", fill)
    with pytest.raises(ModelError, match=rf"No space left on device: {saved.folder}/.*; free some space") as caught:
        saved.save(image, quiet)
    assert str(image.path) not in str(caught.value)
    assert list(saved.folder.iterdir()) == []


def test_a_link_to_nothing_in_an_images_place_is_told_as_what_it_is(image: ModelImage, saved: SavedImage) -> None:
    saved.folder.mkdir(parents=True)
    saved.path.symlink_to("nowhere")
    with pytest.raises(ModelError, match=r"provided tti path exists: .*; delete the link or choose another"):
        saved.save(image, quiet)
    with pytest.raises(ModelError, match="is a link that leads to no folder; repair it, or delete it and save again"):
        saved.load(quiet)
