"""Prove that an image opens only when it is whole, and that the mock's image needs no model library."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import pytest
from tokenizers import Tokenizer

from inference_api import model_image
from inference_api.errors import ModelError
from inference_api.model_image import ModelImage, build_mock_image, replacing, required_bytes, verify


@pytest.fixture
def image(tmp_path) -> ModelImage:
    return build_mock_image(tmp_path)


def test_the_mock_image_has_a_byte_an_id_and_three_specials(image):
    assert image.token_bytes[:256] == [bytes([byte]) for byte in range(256)]
    assert image.token_bytes[256:] == [b"<|endoftext|>", b"<|im_start|>", b"<|im_end|>"]
    assert image.special_ids == {256, 257, 258}
    assert image.stop_ids == {256, 258}
    assert image.vocab_size == len(image.token_bytes) == 259


def test_the_mock_tokenizer_maps_text_to_its_utf8_bytes_and_back(image):
    tokenizer = Tokenizer.from_file(str(image.tokenizer_path))
    text = "naïve 日本 🙂\n  x"
    assert tokenizer.encode(text).ids == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.encode("<|im_start|>user").ids == [257, *b"user"]


def test_the_mock_image_is_built_without_torch_transformers_or_numpy(tmp_path):
    code = (
        "import sys; from pathlib import Path; from inference_api.model_image import build_mock_image; "
        f"build_mock_image(Path({str(tmp_path)!r})); "
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_second_build_opens_the_first_ones_folder(image, tmp_path):
    written = (image.path / "manifest.json").stat().st_mtime_ns
    assert build_mock_image(tmp_path) == image
    assert (image.path / "manifest.json").stat().st_mtime_ns == written
    assert [path.name for path in tmp_path.iterdir()] == [image.path.name]


def test_builds_at_the_same_time_all_get_the_same_image(tmp_path):
    found: list[ModelImage] = []
    threads = [threading.Thread(target=lambda: found.append(build_mock_image(tmp_path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({image.digest for image in found}) == 1
    assert len(found) == 8
    assert [path.name for path in tmp_path.iterdir()] == [found[0].path.name]


def test_a_broken_mock_image_is_built_again(image, tmp_path):
    (image.path / "tokenizer.json").write_text("{}")
    assert build_mock_image(tmp_path).digest == image.digest


@pytest.mark.parametrize("name", ["tokenizer.json", "token_bytes.msgpack", "chat_template.jinja", "manifest.json"])
def test_an_image_without_one_of_its_files_does_not_open(image, name):
    (image.path / name).unlink()
    with pytest.raises(ModelError, match=name):
        ModelImage.open(image.path)


def test_a_file_of_another_size_is_named_with_both_sizes(image):
    file = image.path / "tokenizer.json"
    size = file.stat().st_size
    file.write_bytes(file.read_bytes() + b" ")
    with pytest.raises(ModelError, match=f"tokenizer.json has {size + 1} bytes instead of {size}"):
        ModelImage.open(image.path)


def test_an_image_of_another_format_does_not_open(image):
    manifest = json.loads((image.path / "manifest.json").read_text())
    manifest["format_version"] += 1
    (image.path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ModelError, match="has format 2, this version reads 1"):
        ModelImage.open(image.path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format_version": 1}', b"\xff\xfe"])
def test_a_manifest_that_is_not_one_is_a_model_error_in_one_line(image, content):
    (image.path / "manifest.json").write_bytes(content)
    with pytest.raises(ModelError) as caught:
        ModelImage.open(image.path)
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_not_there_says_how_to_make_it(tmp_path):
    with pytest.raises(ModelError, match=r"python -m inference_api\.prepare"):
        ModelImage.open(tmp_path / "nothing")


def test_verify_finds_a_flipped_bit_that_the_cheap_checks_miss(image):
    verify(image.path)
    file = image.path / "tokenizer.json"
    content = bytearray(file.read_bytes())
    content[10] ^= 1
    file.write_bytes(content)
    ModelImage.open(image.path)
    with pytest.raises(ModelError, match=r"tokenizer\.json does not have the SHA-256"):
        verify(image.path)


def test_the_digest_changes_with_any_file(image):
    (image.path / "chat_template.jinja").write_text("{{ messages }}")
    facts = model_image._read_manifest(image.path).facts
    (image.path / "manifest.json").unlink()
    model_image.seal(image.path, facts)
    assert ModelImage.open(image.path).digest != image.digest


def test_an_interrupted_write_leaves_nothing_and_keeps_what_was_there(tmp_path):
    target = tmp_path / "image"
    target.mkdir()
    (target / "old").write_text("old")

    def interrupted_write() -> None:
        with replacing(target) as folder:
            (folder / "half").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted_write()
    assert [path.name for path in tmp_path.iterdir()] == ["image"]
    assert (target / "old").read_text() == "old"


def test_required_bytes_are_weights_and_every_slot_of_every_row(image):
    sized = ModelImage(**{**vars(image), "weight_bytes": 1000, "kv_bytes_per_token": 7})
    assert required_bytes(sized, 32, 2048) == 1000 + 32 * 2048 * 7
    assert required_bytes(sized, 32, 2048, weight_bits=8, kv_bits=16) == 250 + 32 * 2048 * 7 // 2
