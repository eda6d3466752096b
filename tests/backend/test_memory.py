"""Check how much memory is found free, from files as the kernel writes them."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from inference_api.backend.memory import check_memory, free_bytes, one_line_shortage
from inference_api.errors import MemoryShortError

GIB = 1 << 30


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    folder = tmp_path / "proc"
    folder.mkdir()
    (folder / "meminfo").write_text(f"MemTotal: {16 * GIB // 1024} kB\nMemAvailable: {8 * GIB // 1024} kB\n")
    return folder


def _write_cgroup(tmp_path: Path, **files: str) -> Path:
    folder = tmp_path / "cgroup"
    folder.mkdir()
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    return folder


def test_without_a_cgroup_limit_the_machine_decides(proc: Path, tmp_path: Path) -> None:
    assert free_bytes(proc, _write_cgroup(tmp_path, memory_max="max\n", memory_current="5\n")) == 8 * GIB
    assert free_bytes(proc, tmp_path / "absent") == 8 * GIB


def test_a_cgroup_limit_below_the_machine_decides_and_its_file_cache_counts_as_free(proc: Path, tmp_path: Path) -> None:
    cgroup = _write_cgroup(tmp_path, memory_max=f"{4 * GIB}\n", memory_current=f"{3 * GIB}\n")
    assert free_bytes(proc, cgroup) == GIB
    (cgroup / "memory.stat").write_text(f"anon 1\ninactive_file {GIB // 2}\n")
    assert free_bytes(proc, cgroup) == GIB + GIB // 2


def test_the_older_cgroup_files_are_read_too(proc: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cgroup" / "memory"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(f"{2 * GIB}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{GIB}\n")
    (folder / "memory.stat").write_text(f"total_inactive_file {GIB // 4}\n")
    assert free_bytes(proc, tmp_path / "cgroup") == GIB + GIB // 4


def test_a_cgroup_over_its_limit_has_nothing_left(proc: Path, tmp_path: Path) -> None:
    assert free_bytes(proc, _write_cgroup(tmp_path, memory_max="100\n", memory_current="300\n")) == 0


def test_this_machine_has_memory() -> None:
    assert free_bytes() > 0


def test_what_does_not_fit_is_refused_with_both_numbers_and_the_settings_that_lower_the_need() -> None:
    check_memory(GIB, GIB, 32, 2048)
    with pytest.raises(MemoryShortError) as caught:
        check_memory(3 * GIB, GIB, 32, 2048)
    for part in ("3072 MiB", "1024 MiB", "INFERENCE_API_ROWS (32)", "INFERENCE_API_CONTEXT_TOKENS (2048)"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried to"),
    ],
)
def test_memory_that_runs_out_while_an_engine_loads_is_one_line_with_what_lowers_the_need(error: Exception) -> None:
    with pytest.raises(MemoryShortError) as caught, one_line_shortage(32, 2048):
        raise error
    text = "the memory ran out while the engine loaded: lower INFERENCE_API_ROWS (32) or INFERENCE_API_CONTEXT_TOKENS"
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize("error", [OSError(errno.EACCES, "Permission denied"), RuntimeError("shapes do not fit")])
def test_another_fault_of_a_load_stays_what_it_is(error: Exception) -> None:
    with pytest.raises(type(error), match=str(error.args[-1])), one_line_shortage(32, 2048):
        raise error
