"""Read from a GGUF file what transformers' conversion of it does not know: how its tokenizer splits a text.

Runs inside `prepare`. Imports neither torch nor transformers; knows no weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from inference_api.errors import ModelError

# llama.cpp, src/llama-vocab.cpp, the regexes of LLAMA_VOCAB_PRE_TYPE_LLAMA3 and LLAMA_VOCAB_PRE_TYPE_QWEN2.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_SPLIT_OF_PRE = {"llama-bpe": _LLAMA3_SPLIT, "qwen2": _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")}


def pre_tokenizer_of(gguf: Path, converted: Any) -> Any:
    """Choose the pre-tokenizer that the file names; transformers' conversion knows only the plain byte-level one.

    Returns `converted` for a tokenizer that is not byte-level. Raises ModelError for a name that is not supported.
    The names and their rules: llama.cpp, src/llama-vocab.cpp, `llm_tokenizer_bpe`.
    """
    from gguf import GGUFReader
    from tokenizers import Regex, pre_tokenizers

    fields = GGUFReader(str(gguf)).fields
    model, pre = (
        fields[key].contents() if key in fields else "" for key in ("tokenizer.ggml.model", "tokenizer.ggml.pre")
    )
    if model != "gpt2":
        return converted
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in ("", "default", "gpt-2"):
        return byte_level
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if pre in _SPLIT_OF_PRE:
        split = pre_tokenizers.Split(Regex(_SPLIT_OF_PRE[pre]), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    raise ModelError(f"{gguf.name} names the pre-tokenizer {pre!r}, which is not supported")
