"""Give a cache root of one's own the models and the library that a container image holds: `… FOLDER [OPTION …]`.

A process of its own, which scripts/container runs before the supervisor, with the supervisor's options. Models are
copied where the default one will be served, the library for any, because the container has no compiler. Of two starts
at once one copies and the other waits; a copy that was cut short is swept by the next. Knows settings and folders.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from inference_api import half_finished, model_image
from inference_api.cache_folder import Report, free_disk_bytes, locked, one_line_faults
from inference_api.command_line import read_command_line
from inference_api.config import Settings
from inference_api.engine_artefacts import ARTEFACTS_FOLDER
from inference_api.errors import ModelError, SettingError


def wants_default_model(settings: Settings) -> bool:
    """Tell whether a start with these settings will look for the default model's image in the cache root."""
    return settings.engine != "mock" and not settings.model and not settings.load_image


def copy_artefacts(built_in: Path, cache: Path, *, packed: bool) -> None:
    """Copy the engine's library, and with `packed` the packed weights, that the cache root lacks, whole or not at all.

    Raises ModelError, whose one line says what the disk refused.
    """
    target = cache / ARTEFACTS_FOLDER
    files = sorted((built_in / ARTEFACTS_FOLDER).glob("fused-*.so"))
    files += sorted((built_in / ARTEFACTS_FOLDER).glob(f"{model_image.PACKED_PREFIX}*.bin")) if packed else []
    missing = [file for file in files if not (target / file.name).exists()]
    if not missing:
        return
    with one_line_faults(cache), locked(target, lambda _stage: None):
        half_finished.sweep(target / "copy")
        for file in missing:
            with half_finished.beside(target / "copy") as folder:
                shutil.copy(file, folder / file.name)
                (folder / file.name).rename(target / file.name)


def copy_images(built_in: Path, cache: Path, report: Report) -> None:
    """Copy each image of `built_in` that the cache root lacks, whole or not at all; blocks for the copy.

    Raises ModelError, whose one line says what the disk refused.
    """
    images = [path for path in sorted(built_in.iterdir()) if (path / model_image.MANIFEST_FILE).is_file()]
    with one_line_faults(cache), locked(cache, report):
        for image in images:
            target = cache / image.name
            half_finished.sweep(target)
            if not target.exists():
                _copy(image, target, report)


def _copy(image: Path, target: Path, report: Report) -> None:
    files = [file for file in sorted(image.iterdir()) if file.is_file()]
    needed, free = sum(file.stat().st_size for file in files), free_disk_bytes(target.parent)
    if free < needed:
        raise ModelError(
            f"no disk space: the model image {image.name} needs {needed} bytes in {target.parent}, {free} are free; "
            "free some, or set INFERENCE_API_CACHE_DIR to a folder with room"
        )
    report(f"copying the model image {image.name} into {target.parent}")
    with model_image.replacing(target) as folder:
        for file in files:
            shutil.copyfile(file, folder / file.name)


def main(arguments: list[str] | None = None) -> int:
    """Copy if the settings want it; return 0, or 1 after one line on stderr. A wrong option is status 2."""
    built_in, *options = sys.argv[1:] if arguments is None else arguments
    try:
        settings = read_command_line(options).settings
        cache, is_default = settings.cache_path, wants_default_model(settings)
        if is_default and cache != Path(built_in):
            copy_images(Path(built_in), cache, lambda stage: print(stage, file=sys.stderr))
        if settings.engine != "mock" and cache != Path(built_in):
            copy_artefacts(Path(built_in), cache, packed=is_default)
    except (SettingError, ModelError) as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
