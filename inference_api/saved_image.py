"""Keep prepared model images under names of their own, and start from them: `--save-image`, `--load-image`.

Runs inside `prepare`. A saved image is a whole copy, independent of the cache and of the model's own files, so that
loading it needs neither the model nor transformers. Knows folders and digests, not models.
"""

from __future__ import annotations

import dataclasses
import errno
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from inference_api import half_finished, model_image
from inference_api.cache_folder import Report, free_disk_bytes, locked, one_line_faults
from inference_api.errors import ModelError
from inference_api.model_image import ModelImage

SAVED_FOLDER = "tti_cache"
DEFAULT_SUFFIX = "v0"
_SUFFIX = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclasses.dataclass(frozen=True, slots=True)
class SavedImage:
    """Name the place of one saved image: `FOLDER/NAME-SUFFIX`."""

    folder: Path
    name: str
    suffix: str

    @classmethod
    def named(cls, folder: Path, name: str, suffix: str) -> SavedImage:
        """Return the place. Raises ModelError for a suffix that cannot end a folder's name."""
        if _SUFFIX.fullmatch(suffix) is None:
            raise ModelError(
                f"--image-suffix {suffix!r} (INFERENCE_API_IMAGE_SUFFIX) cannot end a folder's name; "
                "use at most 64 of A-Z a-z 0-9 . _ -, a letter or digit first"
            )
        return cls(folder, name, suffix)

    @property
    def path(self) -> Path:
        """The saved image's folder."""
        return self.folder / f"{self.name}-{self.suffix}"

    def refuse_existing(self) -> None:
        """Raise ModelError if something is there already: a saved image is never written over."""
        if self.path.is_symlink() or self.path.exists():
            raise ModelError(
                f"provided tti path exists: {self.path}, cannot save over existing tti; "
                f"delete the {'link' if self.path.is_symlink() else 'folder'} or choose another --image-suffix"
            )

    def save(self, image: ModelImage, report: Report, packed: Sequence[Path] = ()) -> None:
        """Copy `image` here, whole or not at all; blocks for the copy and a read of it, and for another start.

        The files `packed`, which an engine has made of its weights, come along.

        Raises ModelError if the place is taken, the disk refuses or has no room, or the copy is not what it should be.
        """
        cache = self.folder.parent
        with one_line_faults(cache), locked(cache, report):
            self.refuse_existing()
            half_finished.sweep(self.path)
            self.folder.mkdir(exist_ok=True)
            files = [file for file in sorted(image.path.iterdir()) if file.is_file()] + list(packed)
            needed, free = sum(file.stat().st_size for file in files), free_disk_bytes(self.folder)
            if free < needed:
                raise ModelError(
                    f"no disk space: the saved image needs {needed} bytes in {self.folder}, {free} are free"
                )
            report(f"saving the image as {self.path.name}")
            with model_image.replacing(self.path) as partial:
                for file in files:
                    _copy(file, partial / file.name)
                model_image.add_packed(partial, [partial / file.name for file in packed])
                model_image.verify(partial)

    def load(self, report: Report) -> ModelImage:
        """Open the image after a comparison of every file's SHA-256; blocks for a read of all weights.

        Raises ModelError if it is not there, or names the file that has changed.
        """
        if not self.path.is_dir():
            if self.path.is_symlink():
                raise ModelError(
                    f"{self.path} is a link that leads to no folder; repair it, or delete it and save again"
                )
            raise ModelError(
                f"provided tti path does not exist: {self.path}, cannot load tti; "
                "save one first with --save-image, and the same --model, --layers and --image-suffix"
            )
        report("comparing the saved image's digests")
        image = ModelImage.open(self.path)
        model_image.verify(self.path)
        return image


def _copy(source: Path, target: Path) -> None:
    """Copy a file; a disk without room is told by the place that is full, where shutil names the file it reads."""
    try:
        shutil.copyfile(source, target)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OSError(error.errno, error.strerror, str(target)) from None
        raise
