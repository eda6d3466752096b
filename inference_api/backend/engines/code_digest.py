"""Digest source files of this folder, for what must change with them; PROCESS 2 and `prepare`, at load.

A digest that is to name a numeric path names the code that computes it too: whoever changes that code need not remember
a version number. Knows neither models nor engines.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

_FOLDER = Path(__file__).parent


def digest_of_code(*patterns: str) -> str:
    """Return the SHA-256, in hexadecimal, over names and bytes of this folder's files that match one of `patterns`.

    Raises ValueError for a pattern that matches none.
    """
    found: list[Path] = []
    for pattern in patterns:
        files = sorted(_FOLDER.glob(pattern))
        if not files:
            raise ValueError(f"no file here is named {pattern}")
        found += files
    return digest_of_files(found)


def digest_of_files(files: Iterable[Path], beginning: str = "") -> str:
    """Return the SHA-256, in hexadecimal, over `beginning` and the names and bytes of `files`, in their order."""
    digest = hashlib.sha256(beginning.encode())
    for file in files:
        content = file.read_bytes()
        digest.update(f"{file.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()
