"""Prove what `prepare` makes of a GGUF file: tensors, facts and tokenizer, whole or cut; and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, dequantize, quantize
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from inference_api.errors import ModelError
from inference_api.model_image import ModelImage, byte_level_alphabet, verify
from inference_api.model_variant import ModelVariant
from inference_api.prepare import prepare
from tests.preparing import TEMPLATE, assert_refused, quiet

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]

LAYERS, HIDDEN, HEADS, KV_HEADS, FFN = 2, 64, 4, 2, 96

ADDED = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def llama_shapes(vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a tiny Llama by their GGUF names."""
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {"token_embd.weight": (vocab_size, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        block = {
            "attn_norm": (HIDDEN,),
            "ffn_norm": (HIDDEN,),
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (kv, HIDDEN),
            "attn_v": (kv, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_gate": (FFN, HIDDEN),
            "ffn_up": (FFN, HIDDEN),
            "ffn_down": (HIDDEN, FFN),
        }
        shapes.update({f"blk.{layer}.{name}.weight": shape for name, shape in block.items()})
    return shapes


def write_gguf(path: Path, pre: str = "smollm") -> Path:
    """Write a tiny Llama with Q8_0 and fp32 tensors and a byte-level tokenizer."""
    tokens = [*ADDED, *byte_level_alphabet(), "th", "the", "ĠĠ"]
    writer = GGUFWriter(str(path), "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))  # 3: control, 1: normal
    writer.add_token_merges(["t h", "th e", "Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    generator = np.random.default_rng(4)
    for name, shape in llama_shapes(len(tokens)).items():
        values = generator.standard_normal(shape, dtype=np.float32)
        if len(shape) > 1:
            packed = quantize(values, GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, packed, raw_dtype=GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def gguf(tmp_path_factory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "Tiny_Llama.Q8.gguf")


@pytest.fixture(scope="module")
def gguf_image(gguf, tmp_path_factory) -> ModelImage:
    return prepare(str(gguf), tmp_path_factory.mktemp("cache"), quiet)


def test_gguf_tensors_come_out_as_the_gguf_package_dequantizes_them(gguf, gguf_image):
    packed = {tensor.name: dequantize(tensor.data, tensor.tensor_type) for tensor in GGUFReader(str(gguf)).tensors}
    found = load_file(gguf_image.path / "model.safetensors")
    assert len(found) == len(packed)
    assert {array.dtype for array in found.values()} == {np.dtype("float32")}
    same = {
        "model.embed_tokens.weight": packed["token_embd.weight"],
        "model.norm.weight": packed["output_norm.weight"],
        "model.layers.1.mlp.down_proj.weight": packed["blk.1.ffn_down.weight"],
        "model.layers.0.self_attn.v_proj.weight": packed["blk.0.attn_v.weight"],
    }
    for name, array in same.items():
        np.testing.assert_array_equal(found[name], array)
    # llama.cpp's convert_hf_to_gguf.py, LlamaModel.permute, stores rotary pairs next to each other; this undoes it.
    for name, heads in (("q", HEADS), ("k", KV_HEADS)):
        stored = packed[f"blk.1.attn_{name}.weight"]
        restored = stored.reshape(heads, -1, 2, HIDDEN).swapaxes(1, 2).reshape(stored.shape)
        np.testing.assert_array_equal(found[f"model.layers.1.self_attn.{name}_proj.weight"], restored)


def test_a_gguf_image_has_the_facts_of_its_metadata(gguf_image):
    assert gguf_image.name == "tiny-llama.q8"
    assert gguf_image.architecture == "LlamaForCausalLM"
    assert gguf_image.context_tokens == 128
    assert gguf_image.vocab_size == len(gguf_image.token_bytes) == 262
    assert gguf_image.stop_ids == {0, 2}
    assert (gguf_image.bos_text, gguf_image.eos_text) == ("<|im_start|>", "<|im_end|>")
    assert gguf_image.chat_template == TEMPLATE
    assert gguf_image.special_ids == {0, 1, 2}
    assert gguf_image.kv_bytes_per_token == LAYERS * 2 * KV_HEADS * (HIDDEN // HEADS) * 4
    assert gguf_image.weight_bytes == sum(4 * int(np.prod(shape)) for shape in llama_shapes(262).values())
    assert "quantization_config" not in json.loads(gguf_image.config_path.read_text())
    verify(gguf_image.path)


def test_a_gguf_tokenizer_splits_as_its_metadata_says(gguf, gguf_image, tmp_path):
    tokenizer = Tokenizer.from_file(str(gguf_image.tokenizer_path))
    # "smollm" cuts digits out first, so both blanks before one stay together; the plain GPT-2 rule splits them.
    assert tokenizer.encode("the  7").tokens == ["the", "ĠĠ", "7"]
    assert tokenizer.decode(tokenizer.encode("naïve\n 12").ids) == "naïve\n 12"
    plain = prepare(str(write_gguf(tmp_path / "plain.gguf", "gpt-2")), tmp_path / "cache", quiet)
    assert Tokenizer.from_file(str(plain.tokenizer_path)).encode("the  7").tokens == ["the", "Ġ", "Ġ", "7"]
    with pytest.raises(ModelError, match="pre-tokenizer 'poro'"):
        prepare(str(write_gguf(tmp_path / "other.gguf", "poro")), tmp_path / "cache", quiet)


def test_a_second_prepare_opens_the_image_without_importing_transformers(gguf, gguf_image):
    code = (
        "import sys; from inference_api.prepare import main; "
        f"status = main(['--model', {str(gguf)!r}, '--cache', {str(gguf_image.path.parent)!r}]); "
        "print(status, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(gguf_image.path), "0", "False"]
    assert done.stderr == ""


def test_a_broken_gguf_is_one_line_that_names_the_file(gguf, tmp_path):
    short = tmp_path / "short.gguf"
    short.write_bytes(gguf.read_bytes()[:5000])
    assert_refused(short, tmp_path, r"short\.gguf cannot be read")


@pytest.mark.parametrize("missing_bytes", [1, 1000])
def test_a_gguf_without_its_last_bytes_is_refused(gguf, tmp_path, missing_bytes):
    short = tmp_path / "short.gguf"
    short.write_bytes(gguf.read_bytes()[:-missing_bytes])
    assert_refused(short, tmp_path, r"short\.gguf cannot be read; if its download was broken off, fetch it again")


def test_a_cut_gguf_keeps_the_first_layers_as_they_are_and_everything_else(gguf, gguf_image):
    image = prepare(str(gguf), gguf_image.path.parent, quiet, variant=ModelVariant(layers=1))
    whole, cut = load_file(gguf_image.path / "model.safetensors"), load_file(image.path / "model.safetensors")
    assert set(cut) == {name for name in whole if ".layers.1." not in name}
    for name, array in cut.items():
        np.testing.assert_array_equal(array, whole[name])
    assert json.loads(image.config_path.read_text())["num_hidden_layers"] == 1
    assert (image.variant, image.name, image.path.name) != (gguf_image.variant, image.name, gguf_image.path.name)
    assert image.variant == "layers 1"
    assert image.kv_bytes_per_token * LAYERS == gguf_image.kv_bytes_per_token
    for fact in ("name", "token_bytes", "stop_ids", "chat_template", "bos_text", "eos_text", "context_tokens"):
        assert getattr(image, fact) == getattr(gguf_image, fact)


def test_more_layers_than_a_gguf_has_are_refused_with_the_bound(gguf, gguf_image):
    text = rf"--layers 3 \(INFERENCE_API_LAYERS\) is outside bounds, 1 <= layers <= {LAYERS}: "
    cache = gguf_image.path.parent
    with pytest.raises(ModelError, match=text) as caught:
        prepare(str(gguf), cache, quiet, variant=ModelVariant(layers=3))
    assert "\n" not in str(caught.value)
    assert not list(cache.glob("*layers-3*"))
