"""Own the folders that are being filled or emptied: their names, and the marker that tells them from a user's.

`prepare`, the mock's image, the container's first start and scripts/clean make and sweep them. A name alone proves
nothing: only a folder that carries the marker is ever removed, and none that something is mounted in. Needs the
standard library only; knows no model.
"""

from __future__ import annotations

import contextlib
import errno
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

MARKER_FILE = ".inference_api-half-finished"
"""An empty file, so that a full disk takes it too. First into a folder, last out of it."""

MOUNTS = Path("/proc/self/mountinfo")
"""What is mounted where, a line each (proc_pid_mountinfo(5))."""

_OCTAL = re.compile(r"\\([0-7]{3})")  # how MOUNTS writes a blank, a tab, a line feed and a backslash

_NAME = re.compile(r".+\.partial-[a-z0-9_]{8}")  # 8 characters: tempfile's


def make(target: Path) -> Path:
    """Return a new marked folder beside `target`, for its owner alone (0700). Raises OSError."""
    folder = Path(tempfile.mkdtemp(prefix=f"{target.name}.partial-", dir=target.parent))
    mark(folder)
    return folder


@contextlib.contextmanager
def beside(target: Path) -> Iterator[Path]:
    """Yield a new marked folder beside `target`; at the end nothing is left of it, unless it was renamed."""
    folder = make(target)
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):
            remove(folder)


def mark(folder: Path) -> None:
    """Mark a folder as half-finished. Raises OSError."""
    (folder / MARKER_FILE).touch()


def unmark(folder: Path) -> None:
    """Take the marker away, after the folder has its final name: a kill in between leaves an image that is whole."""
    (folder / MARKER_FILE).unlink(missing_ok=True)


def is_half_finished(path: Path) -> bool:
    """Tell whether this is a folder of ours, by name and marker; a symbolic link to one is not."""
    if _NAME.fullmatch(path.name) is None or path.is_symlink() or not path.is_dir():
        return False
    marker = path / MARKER_FILE
    return marker.is_file() and not marker.is_symlink()


def sweep(target: Path) -> None:
    """Remove what killed writers of `target` have left beside it; the caller holds the lock of the cache root."""
    for path in target.parent.iterdir() if target.parent.is_dir() else ():
        if path.name.startswith(f"{target.name}.partial-") and is_half_finished(path):
            with contextlib.suppress(OSError):
                remove(path)


def refuse_mounts(path: Path) -> None:
    """Raise OSError if `path` is a mount point or has one below it, or if nobody can tell.

    A bind mount of the same disk has the same device number as what is around it: only the kernel's list knows it.
    """
    place = path.parent.resolve() / path.name
    for line in MOUNTS.read_text(errors="surrogateescape").splitlines():
        mount = Path(_OCTAL.sub(lambda match: chr(int(match[1], 8)), line.split(" ")[4]))
        if mount.is_relative_to(place):
            raise OSError(errno.EBUSY, "something is mounted there; unmount it first", str(mount))


def remove(folder: Path) -> None:
    """Remove a marked folder with what is in it, its marker last: whoever is killed meanwhile leaves it marked.

    Follows no symbolic link and enters no mount. Raises OSError.
    """
    refuse_mounts(folder)
    for path in sorted(folder.iterdir()):
        if path.name == MARKER_FILE:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    unmark(folder)
    folder.rmdir()
