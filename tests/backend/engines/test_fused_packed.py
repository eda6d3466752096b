"""Check that packed weights are made once, by `prepare` or the first load, kept, trusted only if sound, and saved."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from inference_api import engine_artefacts, prepare
from inference_api.backend.engines import code_digest, fused, fused_library, fused_packed
from inference_api.backend.engines.fused_packed import packed_weights
from inference_api.backend.engines.packed_weights import PackedKey, PackedWeights
from inference_api.engine_artefacts import ARTEFACTS_FOLDER, make_artefacts, packed_files
from inference_api.errors import ModelError
from inference_api.model_image import ModelImage, verify
from tests.backend.engines import tiny_models as tiny
from tests.backend.engines.fused_checks import same_bits, traces_of

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]


@pytest.fixture
def cache(tmp_path: Path, fused_library_of_tests, fused_build_folder: Path) -> Path:
    """Return a cache root that holds the library and nothing else."""
    folder = tmp_path / "cache" / ARTEFACTS_FOLDER
    folder.mkdir(parents=True)
    for file in fused_build_folder.glob("*.so"):
        shutil.copy(file, folder)
    return tmp_path / "cache"


@pytest.fixture
def packs(monkeypatch: pytest.MonkeyPatch) -> list[ModelImage]:
    """Return a list that grows by an image each time one is packed."""
    packed: list[ModelImage] = []
    pack = fused_packed._pack
    monkeypatch.setattr(fused_packed, "_pack", lambda library, image: [pack(library, image), packed.append(image)][0])
    return packed


def logits_of(image: ModelImage, cache: Path):
    engine = fused.load(image, num_rows=2, context_tokens=96, build_folder=cache / ARTEFACTS_FOLDER)
    return traces_of(engine, [tiny.Job([5, 6, 7, 8], 3)], 16, seed=1)[0]


def test_a_second_load_takes_what_the_first_has_packed_and_computes_the_same_bits(cache, tiny_image, packs):
    first = logits_of(tiny_image("qwen2"), cache)
    second = logits_of(tiny_image("qwen2"), cache)
    assert len(packs) == 1
    assert same_bits(first, second)


def test_a_broken_file_is_packed_again_in_its_place(cache, tiny_image, packs):
    first = logits_of(tiny_image("llama"), cache)
    (file,) = packed_files(tiny_image("llama"), cache)
    content = bytearray(file.read_bytes())
    content[-1000] ^= 1
    file.write_bytes(content)
    assert same_bits(first, logits_of(tiny_image("llama"), cache))
    assert len(packs) == 2
    assert packed_files(tiny_image("llama"), cache) == [file]
    assert bytes(content) != file.read_bytes()


def test_another_library_packs_anew(cache, tiny_image, packs, fused_library_of_tests):
    image, folder = tiny_image("llama"), cache / ARTEFACTS_FOLDER
    packed_weights(fused_library_of_tests, image, folder)
    (before,) = packed_files(image, cache)
    other = fused_library.Library(fused_library_of_tests.functions, "f" * 64)
    packed_weights(other, image, folder)
    (after,) = packed_files(image, cache)
    assert len(packs) == 2 and before.name != after.name


@pytest.mark.parametrize("part", ["0.gate_up.8-bit weights", "1.mlp_norm", "final_norm", "head.8-bit weights"])
@pytest.mark.parametrize("lost", ["all of it", "a byte"])
def test_a_part_that_is_missing_or_too_short_has_the_file_packed_again(
    part, lost, cache, tiny_image, packs, fused_library_of_tests
):
    image, folder = tiny_image("llama"), cache / ARTEFACTS_FOLDER
    key = PackedKey(image.digest, fused_library_of_tests.packing)
    whole = fused_packed._pack(fused_library_of_tests, image)
    packs.clear()
    sizes = {name: place.num_bytes for name, place in whole._parts.items()}
    sizes[part] -= 1
    if lost == "all of it":
        del sizes[part]
    PackedWeights.reserve(sizes.items()).save(folder, key)
    found = packed_weights(fused_library_of_tests, image, folder)
    assert len(packs) == 1
    assert {name: place.num_bytes for name, place in found._parts.items()} == {
        name: place.num_bytes for name, place in whole._parts.items()
    }


@pytest.mark.parametrize("module", ["fused_packed.py", "fused_weights.py", "fused_shape.py"])
def test_another_state_of_the_code_that_decides_the_contents_packs_anew(
    module, tmp_path, monkeypatch, fused_library_of_tests
):
    before = fused_library_of_tests.packing
    for file in code_digest._FOLDER.glob("*.py"):
        shutil.copy(file, tmp_path)
    monkeypatch.setattr(code_digest, "_FOLDER", tmp_path)
    assert fused_library_of_tests.packing == before
    with (tmp_path / module).open("a") as file:
        file.write("# changed\n")
    assert fused_library_of_tests.packing != before


def test_a_folder_that_cannot_be_written_costs_the_next_start_and_nothing_else(
    tiny_image, packs, fused_library_of_tests, tmp_path
):
    (tmp_path / "file").touch()
    for _ in range(2):
        assert packed_weights(fused_library_of_tests, tiny_image("llama"), tmp_path / "file").num_bytes > 0
    assert len(packs) == 2


def test_prepare_compiles_and_packs_what_is_not_there_and_says_so(cache, tiny_image, packs, monkeypatch):
    stages: list[str] = []
    make_artefacts(tiny_image("llama"), cache, stages.append)
    assert stages == ["packing the weights"]
    make_artefacts(tiny_image("llama"), cache, stages.append)
    assert len(stages) == len(packs) == 1
    logits_of(tiny_image("llama"), cache)
    assert len(packs) == 1
    monkeypatch.setattr(engine_artefacts, "is_built", lambda folder: False)
    make_artefacts(tiny_image("llama"), cache, stages.append)
    assert stages[1:] == ["compiling the engine"]


def test_prepare_leaves_to_the_backend_what_cannot_be_made(cache, tiny_image, packs, monkeypatch):
    stages: list[str] = []

    def refuse(folder: Path) -> None:
        raise ModelError("no compiler to be had")

    monkeypatch.setattr(engine_artefacts, "open_library", refuse)
    make_artefacts(tiny_image("llama"), cache, stages.append)
    monkeypatch.setattr(engine_artefacts, "find_obstacle", lambda folder: "g++ is not installed")
    make_artefacts(tiny_image("llama"), cache, stages.append)
    make_artefacts(tiny_image("gpt2"), cache, stages.append)
    assert stages == [] == packs


def test_a_saved_image_brings_its_packed_weights_to_another_cache(cache, tiny_checkpoint, packs, tmp_path, capsys):
    spec = str(tiny_checkpoint("llama")[1])
    assert prepare.main(["--cache", str(cache), "--model", spec, "--compile", "--save-image"]) == 0
    original = ModelImage.open(Path(capsys.readouterr().out.strip()))
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(cache / "tti_cache", elsewhere / "tti_cache")
    (elsewhere / ARTEFACTS_FOLDER).mkdir()
    for file in (cache / ARTEFACTS_FOLDER).glob("*.so"):
        shutil.copy(file, elsewhere / ARTEFACTS_FOLDER)
    assert prepare.main(["--cache", str(elsewhere), "--model", spec, "--compile", "--load-image"]) == 0
    image = ModelImage.open(Path(capsys.readouterr().out.strip()))
    assert image.digest == original.digest
    assert [file.name for file in image.path.glob("packed-*")] == [packed_files(original, cache)[0].name]
    verify(image.path)
    assert same_bits(logits_of(original, cache), logits_of(image, elsewhere))
    assert len(packs) == 1
