"""Keep the packed weights of the `fused` engine: in memory as its library reads them, and in a file of the cache.

Used by `prepare`, which makes the file, and by PROCESS 2, which reads it at load, or makes it where nobody else has. A
file is named by its image, by what packed it and by its own SHA-256: what is stale or broken is never used, but made
again. The content is opaque here; knows no model, no layout and no torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import hashlib
import logging
import mmap
from collections.abc import Iterable
from pathlib import Path

import msgspec

from inference_api import half_finished
from inference_api.cache_folder import locked
from inference_api.model_image import PACKED_PREFIX

logger = logging.getLogger(__name__)

ALIGNMENT = 64
"""Every part begins at a multiple of it: a cache line, and the widest vector."""

_MAGIC = b"fused-packed-1\n\0"
_START_BYTES = len(_MAGIC) + 8
"""What stands before the header: the magic, and the header's length."""

_DIGITS = 16


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where one part lies, in bytes from the begin of the content."""

    offset: int
    num_bytes: int


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What stands before the content, padded so that the content is aligned in the file too."""

    image: str
    packing: str
    parts: dict[str, _Part]
    content_bytes: int

    def holds(self, part: _Part) -> bool:
        """Tell whether `part` lies within the content, where vectors may begin."""
        end = part.offset + part.num_bytes
        return 0 <= part.offset <= end <= self.content_bytes and part.offset % ALIGNMENT == 0


@dataclasses.dataclass(frozen=True, slots=True)
class PackedKey:
    """Name what a file holds: the weights of which image, packed by what. Both are hexadecimal digests."""

    image: str
    packing: str

    @property
    def image_prefix(self) -> str:
        """Begin of the names of all files of this image, whatever packed them."""
        return f"{PACKED_PREFIX}{self.image[:_DIGITS]}-"

    @property
    def prefix(self) -> str:
        """Begin of the file's name; the SHA-256 of the file follows."""
        return f"{self.image_prefix}{self.packing[:_DIGITS]}-"


class PackedWeights:
    """Parts of memory by name, for as long as this object lives; in huge pages where the system has them."""

    def __init__(self, parts: dict[str, _Part], num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._parts = parts
        self._memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError, AttributeError):  # a system without them
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    @classmethod
    def reserve(cls, sizes: Iterable[tuple[str, int]]) -> PackedWeights:
        """Return memory, all zeros, for parts of these names and bytes."""
        parts: dict[str, _Part] = {}
        end = 0
        for name, num_bytes in sizes:
            parts[name] = _Part(end, num_bytes)
            end += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return cls(parts, end)

    def address(self, name: str) -> int:
        """Return where a part begins. Raises KeyError if there is none of that name."""
        return self._start + self._parts[name].offset

    def find(self, name: str) -> int | None:
        """Return where a part begins, or None if there is none of that name."""
        return self.address(name) if name in self._parts else None

    def num_bytes_of(self, name: str) -> int | None:
        """Return the size of a part, or None if there is none of that name."""
        return self._parts[name].num_bytes if name in self._parts else None

    def save(self, folder: Path, key: PackedKey) -> None:
        """Write a file of this content into `folder`, whole or not at all, in place of the image's older ones.

        Blocks for a write of everything, and for another process that writes there. What the disk refuses is a warning:
        the next start packs again.
        """
        header = self._header(key)
        digest = hashlib.sha256(header)
        digest.update(self._content())
        path = folder / f"{key.prefix}{digest.hexdigest()[:_DIGITS]}.bin"
        try:
            with locked(folder, lambda _: None):
                half_finished.sweep(folder / "packed")
                self._write(header, path)
                for old in find_packed(folder, key.image_prefix):
                    if old != path:
                        old.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("the packed weights cannot be kept in %s: %s", folder, error.strerror or error)

    @classmethod
    def open(cls, folders: Iterable[Path], key: PackedKey) -> PackedWeights | None:
        """Read the file of this key from the first of `folders` that has a sound one; None if none has.

        Blocks for a read and a SHA-256 of everything. Raises OSError if the memory is lacking.
        """
        for folder in folders:
            for path in find_packed(folder, key.prefix):
                found = cls._read(path, key)
                if found is not None:
                    return found
                logger.warning("%s is broken, and is made again", path)
        return None

    @classmethod
    def _read(cls, path: Path, key: PackedKey) -> PackedWeights | None:
        try:
            with path.open("rb") as file:
                start = file.read(_START_BYTES)
                size = int.from_bytes(start[len(_MAGIC) :], "little")
                if not start.startswith(_MAGIC) or size > path.stat().st_size:
                    return None
                header = start + file.read(size)
                facts = msgspec.json.decode(header[_START_BYTES:].rstrip(b"\0"), type=_Header)
                is_wanted = (facts.image, facts.packing) == (key.image, key.packing)
                is_complete = path.stat().st_size == len(header) + facts.content_bytes
                if not is_wanted or not is_complete or not all(facts.holds(part) for part in facts.parts.values()):
                    return None
                found = cls(facts.parts, facts.content_bytes)
                file.readinto(found._content())
        except (FileNotFoundError, PermissionError, msgspec.MsgspecError):
            return None
        digest = hashlib.sha256(header)
        digest.update(found._content())
        return found if path.stem.endswith(f"-{digest.hexdigest()[:_DIGITS]}") else None

    def _write(self, header: bytes, path: Path) -> None:
        with half_finished.beside(path.parent / "packed") as partial:
            file = partial / path.name
            with file.open("wb") as out:
                out.write(header)
                out.write(self._content())
            file.rename(path)

    def _header(self, key: PackedKey) -> bytes:
        text = msgspec.json.encode(_Header(key.image, key.packing, self._parts, self.num_bytes))
        padding = -(_START_BYTES + len(text)) % ALIGNMENT
        return _MAGIC + (len(text) + padding).to_bytes(8, "little") + text + b"\0" * padding

    def _content(self) -> memoryview:
        return memoryview(self._memory)[: self.num_bytes]


def find_packed(folder: Path, prefix: str) -> list[Path]:
    """Return the files of packed weights in `folder` whose names begin so; none if there is no such folder."""
    return sorted(folder.glob(f"{prefix}*.bin"))
