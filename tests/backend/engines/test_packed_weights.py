"""Check the file of packed weights: found again by what it holds, refused if it is not that, harmless if missing."""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path

import pytest

from inference_api import half_finished
from inference_api.backend.engines import packed_weights
from inference_api.backend.engines.packed_weights import ALIGNMENT, PackedKey, PackedWeights

KEY = PackedKey("a1" * 32, "b2" * 32)
PARTS = {"norm": b"\1\2\3", "weights": bytes(range(256)) * 3, "last": b"x" * 65}


@pytest.fixture
def packed() -> PackedWeights:
    weights = PackedWeights.reserve((name, len(content)) for name, content in PARTS.items())
    for name, content in PARTS.items():
        ctypes.memmove(weights.address(name), content, len(content))
    return weights


@pytest.fixture
def saved(packed: PackedWeights, tmp_path: Path) -> Path:
    packed.save(tmp_path, KEY)
    (file,) = tmp_path.iterdir()
    return file


def contents(weights: PackedWeights) -> dict[str, bytes]:
    return {name: ctypes.string_at(weights.address(name), len(content)) for name, content in PARTS.items()}


def test_what_was_saved_is_read_again_aligned_and_the_same(saved: Path, tmp_path: Path) -> None:
    found = PackedWeights.open([tmp_path / "absent", tmp_path], KEY)
    assert found is not None
    assert contents(found) == PARTS
    assert all(found.address(name) % ALIGNMENT == 0 for name in PARTS)
    assert found.find("bias") is None
    assert saved.name.startswith(f"packed-{'a1' * 8}-{'b2' * 8}-")


def test_of_another_image_or_packing_nothing_is_taken(saved: Path, tmp_path: Path) -> None:
    for other in (PackedKey("a1" * 31 + "ff", KEY.packing), PackedKey(KEY.image, "b2" * 31 + "ff")):
        assert other.prefix == KEY.prefix  # the name alone proves nothing
        assert PackedWeights.open([tmp_path], other) is None
    assert PackedWeights.open([tmp_path], PackedKey("c3" * 32, KEY.packing)) is None


@pytest.mark.parametrize("position", [0, 8, 16, 40, -66, -1])
def test_a_flipped_bit_anywhere_is_found_out(
    position: int, saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = bytearray(saved.read_bytes())
    content[position] ^= 4
    saved.write_bytes(content)
    assert PackedWeights.open([tmp_path], KEY) is None
    assert f"{saved} is broken, and is made again" in caplog.text


@pytest.mark.parametrize("size", [0, 10, 20, 100, -1])
def test_a_file_that_is_cut_short_is_found_out(size: int, saved: Path, tmp_path: Path) -> None:
    saved.write_bytes(saved.read_bytes()[:size])
    assert PackedWeights.open([tmp_path], KEY) is None


def test_a_file_that_is_too_long_is_found_out(saved: Path, tmp_path: Path) -> None:
    saved.write_bytes(saved.read_bytes() + b"\0")
    assert PackedWeights.open([tmp_path], KEY) is None


def test_a_new_file_takes_the_place_of_the_images_older_ones_and_of_no_others(
    saved: Path, packed: PackedWeights, tmp_path: Path
) -> None:
    other_image = PackedKey("c3" * 32, KEY.packing)
    packed.save(tmp_path, other_image)
    newer = PackedKey(KEY.image, "d4" * 32)
    packed.save(tmp_path, newer)
    assert PackedWeights.open([tmp_path], KEY) is None
    assert PackedWeights.open([tmp_path], newer) is not None
    assert PackedWeights.open([tmp_path], other_image) is not None
    assert len(list(tmp_path.iterdir())) == 2


def test_what_a_killed_writer_left_is_swept_and_nothing_else(packed: PackedWeights, tmp_path: Path) -> None:
    leftover = half_finished.make(tmp_path / "packed")
    (leftover / "packed-0.bin").write_bytes(b"half")
    mine = tmp_path / "packed.partial-abcdefgh"
    mine.mkdir()
    packed.save(tmp_path, KEY)
    assert not leftover.exists()
    assert mine.is_dir()


def test_a_disk_that_refuses_is_a_warning_and_leaves_nothing(
    packed: PackedWeights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(packed_weights.Path, "rename", refuse)
        packed.save(tmp_path, KEY)
    assert caplog.messages == [f"the packed weights cannot be kept in {tmp_path}: No space left on device"]
    assert list(tmp_path.iterdir()) == []
    assert contents(packed) == PARTS
    (tmp_path / "file").touch()
    packed.save(tmp_path / "file", KEY)
    assert "cannot be kept" in caplog.messages[-1]
