"""Have made, while a model image is prepared, what the `fused` engine would else make at its start; inside `prepare`.

Its library is compiled and the image's weights are packed into a folder of the cache, so that no start after it waits.
Nothing here is needed: what cannot be made, the backend does without, and says why. Knows no rows and no settings.
"""

from __future__ import annotations

from pathlib import Path

from inference_api.backend.engines.fused_library import find_obstacle, is_built, open_library
from inference_api.backend.engines.fused_shape import read_shape
from inference_api.backend.engines.packed_weights import PackedKey, find_packed
from inference_api.cache_folder import Report
from inference_api.checkpoint import read_json
from inference_api.errors import ModelError
from inference_api.model_image import ModelImage

ARTEFACTS_FOLDER = "tvm_cache"
"""The original service's folder of compiled models, below the cache root."""


def make_artefacts(image: ModelImage, cache: Path, report: Report) -> None:
    """Compile the library and pack the weights of `image`, unless both are there or the engine does not compute it.

    Blocks: some ten seconds to compile, seconds to pack, and for as long as another start does the same.
    """
    folder = cache / ARTEFACTS_FOLDER
    try:
        read_shape(read_json(image.config_path))
        if find_obstacle(folder):
            return
        if not is_built(folder):
            report("compiling the engine")
        library = open_library(folder)
        key = PackedKey(image.digest, library.packing)
        if not any(find_packed(place, key.prefix) for place in (image.path, folder)):
            report("packing the weights")
            from inference_api.backend.engines.fused_packed import packed_weights  # it needs torch, which takes seconds

            packed_weights(library, image, folder)
    except ModelError:
        pass  # the backend meets the same fault, takes another path and says why


def packed_files(image: ModelImage, cache: Path) -> list[Path]:
    """Return the files of the cache that hold packed weights of `image`."""
    return find_packed(cache / ARTEFACTS_FOLDER, PackedKey(image.digest, "").image_prefix)
