"""Own the model image: a sealed folder with everything that the server and the backend need of one model.

PROCESS 1 and PROCESS 2 read it (`ModelImage.open`); `prepare`, and `--mock` through `build_mock_image`, write it. The
manifest is written last and the folder is renamed into place, so that a folder that carries the final name is whole.
Does not know torch, transformers or numpy, opens no weights and never downloads anything.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from inference_api import half_finished
from inference_api.errors import ModelError

FORMAT_VERSION = 1
"""Raised with every incompatible change of the folder; an image of another version is built again."""

MANIFEST_FILE = "manifest.json"
TOKENIZER_FILE = "tokenizer.json"
TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "config.json"
TOKEN_BYTES_FILE = "token_bytes.msgpack"  # noqa: S105 - a file name
WEIGHTS_FILE = "model.safetensors"

PACKED_PREFIX = "packed-"
"""Begin of the names of files that an engine has made of the weights: they may lie in an image, and are not of it."""

FP32_BITS = 32

MOCK_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MOCK_CONTEXT_TOKENS = 2048
MOCK_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_READ_BYTES = 1 << 20


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Pin one file of an image."""

    size_bytes: int
    sha256: str


class ImageFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a writer knows of its model; everything in the manifest but the version and the files.

    `variant` says what differs from the whole model, in words; it is left out where nothing does.
    """

    name: str
    source: str
    architecture: str
    context_tokens: int
    vocab_size: int
    stop_ids: list[int]
    bos_text: str
    eos_text: str
    weight_bytes: int
    kv_bytes_per_token: int
    variant: str = ""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of manifest.json."""

    format_version: int
    facts: ImageFacts
    files: dict[str, FileRecord]


class TokenTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of token_bytes.msgpack: the bytes of every id, and which ids are specials."""

    token_bytes: list[bytes]
    special_ids: list[int]


@dataclasses.dataclass(frozen=True)
class ModelImage:
    """One model, ready to be served: paths and facts, no weights.

    Invariant: `token_bytes` has `vocab_size` entries; specials carry their text's bytes and are in `special_ids`; an id
    that the tokenizer does not know is empty. With a metaspace tokenizer a word's first token starts with a space.
    """

    path: Path
    name: str
    architecture: str
    context_tokens: int
    vocab_size: int
    token_bytes: list[bytes] = dataclasses.field(repr=False)
    stop_ids: frozenset[int]
    special_ids: frozenset[int] = dataclasses.field(repr=False)
    chat_template: str | None = dataclasses.field(repr=False)
    bos_text: str
    eos_text: str
    digest: str
    """SHA-256 over the facts and the SHA-256 of every file but those that are made of the weights."""
    weight_bytes: int
    """The weights in memory, as the CPU engine holds them (fp32)."""
    kv_bytes_per_token: int
    """One slot of the KV cache over all layers, as the CPU engine holds it (fp32)."""
    variant: str = ""
    """A development variant in words, such as `layers 2, random weights`; empty for the whole model."""

    @property
    def tokenizer_path(self) -> Path:
        """Name the file for `tokenizers.Tokenizer.from_file`."""
        return self.path / TOKENIZER_FILE

    @property
    def config_path(self) -> Path:
        """Name the model's configuration in the Hugging Face format."""
        return self.path / CONFIG_FILE

    @classmethod
    def open(cls, path: Path) -> ModelImage:
        """Read an image after the cheap checks: version, presence and size of every file.

        Blocks for some 20 ms of disk reads. Raises ModelError, which names what is wrong with the folder.
        """
        manifest = _read_manifest(path)
        for name, record in manifest.files.items():
            file = path / name
            if not file.is_file():
                raise ModelError(
                    f"model image {path} is broken: {name} is missing; delete the folder to build it again"
                )
            size_bytes = file.stat().st_size
            if size_bytes != record.size_bytes:
                raise ModelError(
                    f"model image {path} is broken: {name} has {size_bytes} bytes instead of {record.size_bytes}; "
                    "delete the folder to build it again"
                )
        table = _read_token_table(path, manifest)
        template = path / TEMPLATE_FILE
        return cls(
            path=path,
            name=manifest.facts.name,
            architecture=manifest.facts.architecture,
            context_tokens=manifest.facts.context_tokens,
            vocab_size=manifest.facts.vocab_size,
            token_bytes=table.token_bytes,
            stop_ids=frozenset(manifest.facts.stop_ids),
            special_ids=frozenset(table.special_ids),
            chat_template=template.read_text("utf-8") if TEMPLATE_FILE in manifest.files else None,
            bos_text=manifest.facts.bos_text,
            eos_text=manifest.facts.eos_text,
            digest=digest_of(manifest),
            weight_bytes=manifest.facts.weight_bytes,
            kv_bytes_per_token=manifest.facts.kv_bytes_per_token,
            variant=manifest.facts.variant,
        )


def required_bytes(
    image: ModelImage, num_rows: int, context_tokens: int, *, weight_bits: int = FP32_BITS, kv_bits: int = FP32_BITS
) -> int:
    """Say how much memory an engine takes for good: the weights and `num_rows` × `context_tokens` KV slots.

    The bits are those of one number in that engine. What is only mapped from the image's files does not count: the
    system may drop it.
    """
    kv_bytes = num_rows * context_tokens * image.kv_bytes_per_token
    return (image.weight_bytes * weight_bits + kv_bytes * kv_bits) // FP32_BITS


def verify(path: Path) -> None:
    """Compare every file of an image with its SHA-256. Blocks for a read of all weights. Raises ModelError."""
    for name, record in _read_manifest(path).files.items():
        try:
            matches = (path / name).is_file() and file_sha256(path / name) == record.sha256
        except OSError as error:
            raise ModelError(f"model image {path}: {name} cannot be read: {error.strerror or error}") from error
        if not matches:
            raise ModelError(f"model image {path} is broken: {name} does not have the SHA-256 of the manifest")


def add_packed(folder: Path, files: Sequence[Path]) -> None:
    """Name `files`, which the caller has put into the image in `folder`, in its manifest; its digest stays."""
    manifest = _read_manifest(folder)
    records = {file.name: FileRecord(file.stat().st_size, file_sha256(file)) for file in files}
    _write_manifest(folder, Manifest(manifest.format_version, manifest.facts, {**manifest.files, **records}))


def seal(folder: Path, facts: ImageFacts) -> None:
    """Write the manifest over all files of `folder`, which the caller has filled; the last write of an image."""
    files = {
        file.relative_to(folder).as_posix(): FileRecord(file.stat().st_size, file_sha256(file))
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.name != half_finished.MARKER_FILE
    }
    _write_manifest(folder, Manifest(FORMAT_VERSION, facts, files))


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    (folder / MANIFEST_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")


def write_token_table(folder: Path, token_bytes: Sequence[bytes], special_ids: Sequence[int]) -> None:
    """Write the bytes of every id, in id order."""
    table = TokenTable(list(token_bytes), sorted(special_ids))
    (folder / TOKEN_BYTES_FILE).write_bytes(msgspec.msgpack.encode(table))


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a folder beside `target` that takes its name at the end; after an exception nothing is left of it.

    It is empty but for the marker of a half-finished folder. The rename is atomic. A whole image that another start has
    put there meanwhile stays.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with half_finished.beside(target) as folder:
        folder.chmod(0o755)
        yield folder
        if _is_whole(target):
            return
        if target.is_dir():
            _set_aside(target)
        folder.rename(target)
        half_finished.unmark(target)


def _set_aside(target: Path) -> None:
    """Take a broken image out of the way, under a marked name that the next start sweeps if this one is killed."""
    aside = half_finished.make(target)
    broken = aside / target.name
    target.rename(broken)
    with suppress(OSError):
        half_finished.remove(aside)


def _is_whole(path: Path) -> bool:
    try:
        ModelImage.open(path)
    except ModelError:
        return False
    return True


def file_sha256(path: Path) -> str:
    """Hash a file in constant memory; hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def digest_of(manifest: Manifest) -> str:
    """Derive the image's digest: any change of a file or a fact changes it, the order of the files does not.

    What an engine has made of the weights changes nothing.
    """
    own = {name: record for name, record in manifest.files.items() if not name.startswith(PACKED_PREFIX)}
    plain = Manifest(manifest.format_version, manifest.facts, own)
    return hashlib.sha256(msgspec.json.encode(plain, order="sorted")).hexdigest()


@functools.cache
def byte_level_alphabet() -> tuple[str, ...]:
    """Map every byte to the character that stands for it in a byte-level BPE vocabulary; index = byte.

    Source: `bytes_to_unicode` of openai/gpt-2, src/encoder.py: printable Latin-1 stays, the rest moves to U+0100 on.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    moved = iter(range(256, 512))
    return tuple(chr(byte) if byte in printable else chr(next(moved)) for byte in range(256))


def build_mock_image(cache: Path) -> ModelImage:
    """Build the byte-level image of the mock engine under `cache`, or open the one that is there.

    Ids 0 to 255 are the bytes, then come MOCK_SPECIALS. There are no weights and no config. Safe against two starts.
    """
    target = cache / f"mock-v{FORMAT_VERSION}"
    if not _is_whole(target):
        try:
            with replacing(target) as folder:
                _write_mock_files(folder)
        except OSError:
            if not target.is_dir():
                raise
            # Another process renamed its own folder first; the two are alike.
    return ModelImage.open(target)


def _write_mock_files(folder: Path) -> None:
    # Imported here, because the backend reads images too and must not load a tokenizer.
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {char: byte for byte, char in enumerate(byte_level_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in MOCK_SPECIALS])
    tokenizer.save(str(folder / TOKENIZER_FILE))
    token_bytes = [bytes([byte]) for byte in range(256)] + [text.encode() for text in MOCK_SPECIALS]
    write_token_table(folder, token_bytes, range(256, len(token_bytes)))
    (folder / TEMPLATE_FILE).write_text(MOCK_CHAT_TEMPLATE, "utf-8")
    facts = ImageFacts(
        name="mock",
        source="built in code",
        architecture="mock",
        context_tokens=MOCK_CONTEXT_TOKENS,
        vocab_size=len(token_bytes),
        stop_ids=[token_bytes.index(b"<|endoftext|>"), token_bytes.index(b"<|im_end|>")],
        bos_text="",
        eos_text="<|im_end|>",
        weight_bytes=0,
        kv_bytes_per_token=0,
    )
    seal(folder, facts)


def _read_manifest(path: Path) -> Manifest:
    try:
        manifest = msgspec.json.decode((path / MANIFEST_FILE).read_bytes(), type=Manifest)
    except FileNotFoundError:
        raise ModelError(
            f"no model image at {path}: there is no {MANIFEST_FILE}; run `python -m inference_api.prepare`"
        ) from None
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelError(f"model image {path} is broken: {MANIFEST_FILE}: {error}") from None
    if manifest.format_version != FORMAT_VERSION:
        raise ModelError(
            f"model image {path} has format {manifest.format_version}, this version reads {FORMAT_VERSION}; "
            "delete the folder to build it again"
        )
    return manifest


def _read_token_table(path: Path, manifest: Manifest) -> TokenTable:
    try:
        table = msgspec.msgpack.decode((path / TOKEN_BYTES_FILE).read_bytes(), type=TokenTable)
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelError(f"model image {path} is broken: {TOKEN_BYTES_FILE}: {error}") from None
    if len(table.token_bytes) != manifest.facts.vocab_size:
        raise ModelError(
            f"model image {path} is broken: {TOKEN_BYTES_FILE} has {len(table.token_bytes)} ids, "
            f"the model {manifest.facts.vocab_size}"
        )
    return table
