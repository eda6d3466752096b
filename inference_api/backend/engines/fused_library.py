"""Build and open the C++ library of the `fused` engine; decode thread of PROCESS 2, while the engine loads.

The sources lie beside this file in fused_native/. The library is compiled once into the cache folder; its name carries
the digest of sources and flags and its own SHA-256, so that a stale or broken file is never opened, but built again.
Mirrors the structs of fused_native/interface.h. Knows no model.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import hashlib
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from inference_api import half_finished
from inference_api.backend.engines.code_digest import digest_of_code, digest_of_files
from inference_api.cache_folder import locked
from inference_api.errors import ModelError
from inference_api.model_image import file_sha256

SOURCES = Path(__file__).with_name("fused_native")

NUMERIC_PATH = "4-bit and int8 weights, int8 and int16 activations, int8 KV, AVX2"
"""What the library computes in, for people; it names the layout of packed weights too."""

INSTRUCTION_SETS = ("avx2", "f16c", "fma")
"""What the kernels need of the processor, in the words of /proc/cpuinfo."""

COMPILER = "g++"
# Without contraction a product and a sum round twice wherever they stand, in a vector or behind its end.
FLAGS = (
    *("-std=c++20", "-O3", "-ffp-contract=off", "-fPIC", "-shared", "-pthread"),
    *(f"-m{name}" for name in INSTRUCTION_SETS),
)
_OTHER_ENGINE = "or set INFERENCE_API_ENGINE=transformers"
_DIGITS = 16


class Linear(ctypes.Structure):
    """FusedLinear."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weights", "bias")),
        *((name, ctypes.c_int32) for name in ("outputs", "inputs", "bits", "unused")),
    )


class Layer(ctypes.Structure):
    """FusedLayer."""

    _fields_ = (
        *((name, Linear) for name in ("qkv", "output", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("attention_norm", "mlp_norm", "query_norm", "key_norm")),
        *((name, ctypes.c_int32) for name in ("window", "unused")),
    )


class Model(ctypes.Structure):
    """FusedModel."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocab")),
        *((name, ctypes.c_int32) for name in ("num_layers", "num_rows", "context_tokens", "num_threads")),
        ("epsilon", ctypes.c_float),
        ("unused", ctypes.c_int32),
        ("layers", ctypes.c_void_p),
        ("head", Linear),
        *((name, ctypes.c_void_p) for name in ("embedding", "final_norm", "cosines", "sines", "cache")),
    )


class Copy(ctypes.Structure):
    """FusedCopy."""

    _fields_ = tuple((name, ctypes.c_int32) for name in ("from_row", "to_row", "count", "unused"))


class Step(ctypes.Structure):
    """FusedStep."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("num_tokens", "num_outputs", "num_copies", "unused")),
        *((name, ctypes.c_void_p) for name in ("copies", "token_ids", "rows")),
        *((name, ctypes.c_void_p) for name in ("positions", "outputs", "logits", "states", "finite")),
    )


_STRUCTS = (Linear, Layer, Model, Copy, Step)
_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float
_FUNCTIONS: dict[str, tuple[object, tuple[object, ...]]] = {
    # name: (result, arguments)
    "fused_open": (_POINTER, (_POINTER,)),
    "fused_step": (None, (_POINTER, _POINTER)),
    "fused_highest": (None, (_POINTER, _POINTER, _INT, _INT, _POINTER)),
    "fused_mask": (None, (_POINTER, _POINTER, _INT, _INT, *(_POINTER,) * 4)),
    "fused_select": (_INT, (_POINTER, _POINTER, _INT, _INT, _POINTER, _INT, *(_POINTER,) * 4)),
    "fused_close": (None, (_POINTER,)),
    "fused_struct_bytes": (_LONG, (_INT,)),
    "fused_weight_bits": (_INT, (_POINTER, _INT, _INT)),
    "fused_packed_bytes": (_LONG, (_INT, _INT, _INT)),
    "fused_cache_bytes": (_LONG, (_POINTER,)),
    "fused_pack": (None, (_INT, _POINTER, _INT, _INT, _POINTER)),
    "fused_quantize": (_FLOAT, (_POINTER, _INT, _INT, _POINTER)),
    "fused_quantize_groups": (None, (_POINTER, _INT, _POINTER, _POINTER, _POINTER)),
    "fused_linear": (_INT, (_POINTER, _POINTER, _INT, _POINTER)),
    "fused_store_kv": (None, (_POINTER, _INT, _INT, _INT, _POINTER, _POINTER)),
    "fused_attend": (None, (_POINTER, _INT, _INT, _INT, _POINTER, _POINTER)),
    "fused_peak_macs": (ctypes.c_double, (_INT, _LONG)),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Library:
    """The opened library: its functions, which release the GIL while they run, and the SHA-256 of its file."""

    functions: ctypes.CDLL
    sha256: str

    @property
    def packing(self) -> str:
        """Digest of all that decides what packed weights hold: the library, and the code that hands it the model."""
        code = digest_of_code("fused_packed.py", "fused_weights.py", "fused_shape.py")
        return hashlib.sha256(f"{self.sha256} {NUMERIC_PATH} {code}".encode()).hexdigest()


def open_library(folder: Path, cpu_flags: frozenset[str] | None = None) -> Library:
    """Open the library, compiled into `folder` (blocking, some ten seconds) if it is not there yet.

    `cpu_flags` are this processor's unless given. Raises ModelError for a processor without the instructions, a missing
    compiler, a failed compilation and a folder that cannot be written.
    """
    if obstacle := _processor_obstacle(cpu_flags):
        raise ModelError(f"the engine fused cannot run here: {obstacle}; set INFERENCE_API_ENGINE=transformers")
    try:
        path = _find_built(folder) or _build_once(folder)
        return Library(_bind(ctypes.CDLL(str(path))), file_sha256(path))
    except OSError as error:
        raise ModelError(
            f"the library of the engine fused cannot be made in {folder}: {error.strerror or error}; "
            "make it writable, or set INFERENCE_API_CACHE_DIR to a folder that is"
        ) from error


def find_obstacle(folder: Path, cpu_flags: frozenset[str] | None = None) -> str:
    """Say in a few words why `open_library` would fail, as far as that can be told without building; else return ''."""
    if obstacle := _processor_obstacle(cpu_flags):
        return obstacle
    if shutil.which(COMPILER) is None and not is_built(folder):
        return f"{COMPILER} is not installed"
    return ""


def is_built(folder: Path) -> bool:
    """Tell whether the library of these sources lies in `folder` and is sound."""
    return _find_built(folder) is not None


def read_cpu_flags() -> frozenset[str]:
    """Return the instruction sets of this processor; none where the system does not list them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), ()))


def _processor_obstacle(cpu_flags: frozenset[str] | None) -> str:
    """Name the instructions that the processor lacks, or return ''."""
    flags = read_cpu_flags() if cpu_flags is None else cpu_flags
    missing = [name for name in INSTRUCTION_SETS if name not in flags]
    return f"this processor lacks {', '.join(missing)}" if missing else ""


def _prefix() -> str:
    sources = digest_of_files(sorted(SOURCES.iterdir()), " ".join(FLAGS))
    return f"fused-{sources[:_DIGITS]}-"


def _find_built(folder: Path) -> Path | None:
    return next((file for file in sorted(folder.glob(f"{_prefix()}*.so")) if _is_sound(file)), None)


def _is_sound(file: Path) -> bool:
    return file_sha256(file)[:_DIGITS] == file.stem.rpartition("-")[2]


def _build_once(folder: Path) -> Path:
    """Compile the library, or wait for another process that does; what a killed one left is swept."""
    target = folder / "library"
    compiler = _find_compiler()
    with locked(folder, lambda _: None):
        half_finished.sweep(target)
        return _find_built(folder) or _build(compiler, folder, target)


def _find_compiler() -> str:
    compiler = shutil.which(COMPILER)
    if compiler is None:
        raise ModelError(
            f"the engine fused is compiled at its first start, and {COMPILER} is not installed: install it "
            f"(Debian and Ubuntu: apt-get install g++), {_OTHER_ENGINE}"
        )
    return compiler


def _build(compiler: str, folder: Path, target: Path) -> Path:
    """Compile all sources into one library, which takes its name when it is whole and is then the only one here."""
    with half_finished.beside(target) as partial:
        sources = sorted(SOURCES.absolute().glob("*.cpp"))
        lanes = _lanes(sources, len(os.sched_getaffinity(0)))
        _run([[compiler, *FLAGS, "-c", *map(str, lane)] for lane in lanes], partial)
        # In the order of the names, whichever lane an object comes from: the library is the same on every machine.
        _run([[compiler, *FLAGS, *(f"{source.stem}.o" for source in sources), "-o", "library"]], partial)
        built = partial / "library"
        built.chmod(0o755)
        path = built.rename(folder / f"{_prefix()}{file_sha256(built)[:_DIGITS]}.so")
    # Those of other sources, and broken ones. A process that has one open keeps it: the file lives as long as its map.
    for old in folder.glob("fused-*.so"):
        if old != path:
            old.unlink(missing_ok=True)
    return path


def _lanes(sources: Sequence[Path], most: int) -> list[Sequence[Path]]:
    """Share the sources out to at most `most` compilers, which work side by side, each through its share."""
    largest_first = sorted(sources, key=lambda source: (-source.stat().st_size, source.name))
    return [largest_first[lane::most] for lane in range(min(most, len(sources)))]


def _run(commands: Sequence[list[str]], folder: Path) -> None:
    """Run compilers side by side in `folder`; what ends the wait ends them and their children too.

    Raises ModelError with the reason of the first that fails.
    """
    with contextlib.ExitStack() as stack:
        compilers: list[subprocess.Popen[str]] = []
        try:
            for command in commands:
                compilers.append(stack.enter_context(_start(command, folder)))
            words = [compiler.communicate()[1] for compiler in compilers]
        except BaseException:
            for compiler in compilers:
                if compiler.returncode is None:
                    os.killpg(compiler.pid, signal.SIGKILL)
            raise
    for compiler, errors in zip(compilers, words, strict=True):
        if compiler.returncode:
            reason = next((line for line in errors.splitlines() if "error" in line), "it gave no reason")
            raise ModelError(f"{COMPILER} cannot compile the engine fused: {reason}; update it, {_OTHER_ENGINE}")


def _start(command: list[str], folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(  # noqa: S603 - no user's words in it
        command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, process_group=0
    )


def _bind(functions: ctypes.CDLL) -> ctypes.CDLL:
    """Declare every function's types, and compare the structs of both sides."""
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(functions, name)
        function.restype, function.argtypes = result, arguments
    for index, struct in enumerate(_STRUCTS):
        if functions.fused_struct_bytes(index) != ctypes.sizeof(struct):
            raise RuntimeError(f"{struct.__name__} differs between fused_library.py and interface.h")
    return functions
