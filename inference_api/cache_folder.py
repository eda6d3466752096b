"""Own the rules of the cache folder for those who write into it: one at a time, room first, faults in one line.

Runs inside `prepare` and the container's first start; scripts/clean and scripts/doctor ask it for locks. Needs the
standard library only. Knows folders, locks and disks, not models.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from inference_api.errors import ModelError

Report = Callable[[str], None]
"""Takes the name of a stage of long work as it begins."""


def free_disk_bytes(folder: Path) -> int:
    """Return the free bytes of the disk that holds `folder`."""
    return shutil.disk_usage(folder).free


@contextmanager
def one_line_faults(cache: Path) -> Iterator[None]:
    """Turn what the disk refuses into a ModelError that names the place and what to do."""
    try:
        yield
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            advice = "free some space (scripts/clean), or set INFERENCE_API_CACHE_DIR to a folder with room"
        else:
            advice = "make it writable, or set INFERENCE_API_CACHE_DIR to a folder that is"
        raise ModelError(
            f"no model image can be made in {cache}: {error.strerror or error}{where}; {advice}"
        ) from error


@contextmanager
def locked(cache: Path, report: Report) -> Iterator[None]:
    """Hold the lock on the cache folder itself; the kernel drops it when the process ends in any way."""
    cache.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(cache, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("waiting for another start that prepares a model")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def is_locked(file: Path) -> bool:
    """Tell whether a living process holds the lock on a file that is there; the kernel drops it when that ends."""
    try:
        with file.open("r") as opened:
            fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
