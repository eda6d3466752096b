"""Check how the C++ library is built, found again and refused."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys

import pytest

from inference_api.backend.engines import fused_library
from inference_api.backend.engines.fused_library import open_library
from inference_api.errors import ModelError
from tests.integration.service import command_line, wait_for

pytestmark = pytest.mark.torch

ALL_FLAGS = frozenset(fused_library.INSTRUCTION_SETS)


def test_a_processor_without_the_instructions_is_refused_by_their_names(tmp_path):
    with pytest.raises(ModelError, match=r"this processor lacks f16c; set INFERENCE_API_ENGINE=transformers"):
        open_library(tmp_path, ALL_FLAGS - {"f16c"})
    assert not list(tmp_path.iterdir())


def test_a_missing_compiler_is_refused_with_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(fused_library.shutil, "which", lambda name: None)
    with pytest.raises(ModelError, match=r"g\+\+ is not installed: install it .* apt-get install g\+\+") as caught:
        open_library(tmp_path, ALL_FLAGS)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_sources_that_do_not_compile_are_one_line_and_leave_nothing(tmp_path, monkeypatch):
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "broken.cpp").write_text("int main() { return nothing; }\n")
    monkeypatch.setattr(fused_library, "SOURCES", sources)
    with pytest.raises(ModelError, match=r"g\+\+ cannot compile the engine fused: .*nothing") as caught:
        open_library(tmp_path / "cache", ALL_FLAGS)
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").iterdir())


@pytest.mark.parametrize("num_comments", [0, 20])
def test_whichever_compiler_fails_its_reason_is_told_and_nothing_is_left(tmp_path, monkeypatch, num_comments):
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "broken.cpp").write_text("int f() { return nothing; }\n")
    (sources / "sound.cpp").write_text("int g() { return 1; }\n" + "// the larger\n" * num_comments)
    monkeypatch.setattr(fused_library, "SOURCES", sources)
    monkeypatch.setattr(fused_library.os, "sched_getaffinity", lambda pid: {0, 1})
    with pytest.raises(ModelError, match=r"broken.cpp:1.* error: .*nothing"):
        open_library(tmp_path / "cache", ALL_FLAGS)
    assert not list((tmp_path / "cache").iterdir())


def test_the_library_has_the_same_bytes_however_many_compilers_share_its_sources(tmp_path, monkeypatch):
    sources = tmp_path / "sources"
    sources.mkdir()
    for number, name in enumerate(("one", "two", "three")):
        body = f'extern "C" int {name}() {{ return {number}; }}\n'
        (sources / f"{name}.cpp").write_text(body + "// the largest first, not the first by name\n" * number)
    monkeypatch.setattr(fused_library, "SOURCES", sources)
    monkeypatch.setattr(fused_library, "_bind", lambda functions: functions)
    built = []
    for num_processors in (1, 2, 8):
        monkeypatch.setattr(
            fused_library.os, "sched_getaffinity", lambda pid, number=num_processors: set(range(number))
        )
        built.append(open_library(tmp_path / str(num_processors), ALL_FLAGS))
    assert len({library.sha256 for library in built}) == 1
    assert [getattr(built[0].functions, name)() for name in ("one", "two", "three")] == [0, 1, 2]


HANGING_COMPILER = """#!/bin/sh
sleep 60 &
echo $$ $! >> {log}
wait
"""


def test_what_ends_the_wait_for_the_compilers_ends_them_all_with_their_children(tmp_path, monkeypatch):
    log, compiler = tmp_path / "log", tmp_path / "compiler"
    compiler.write_text(HANGING_COMPILER.format(log=log))
    compiler.chmod(0o755)

    def interrupt(compiler, *_arguments):
        while not log.exists() or len(log.read_text().split()) < 4:
            assert compiler.poll() is None
        raise KeyboardInterrupt

    monkeypatch.setattr(fused_library.subprocess.Popen, "communicate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fused_library._run([[str(compiler)], [str(compiler)]], tmp_path)
    wait_for(lambda: not any(map(command_line, map(int, log.read_text().split()))), 5.0, "the end of the compilers")


def test_a_folder_that_cannot_be_made_is_one_line_that_names_it(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match=r"cannot be made in .*file: .*; make it writable, or set"):
        open_library(tmp_path / "file", ALL_FLAGS)


def test_a_library_is_built_once_and_again_if_it_is_broken(tmp_path, monkeypatch):
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "one.cpp").write_text('extern "C" int one() { return 1; }\n')
    monkeypatch.setattr(fused_library, "SOURCES", sources)
    monkeypatch.setattr(fused_library, "_bind", lambda functions: functions)
    cache = tmp_path / "cache"
    library = open_library(cache, ALL_FLAGS)
    (built,) = cache.iterdir()
    changed_at = built.stat().st_mtime_ns
    assert open_library(cache, ALL_FLAGS).sha256 == library.sha256
    assert built.stat().st_mtime_ns == changed_at
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / built.name).write_bytes(b"no library")
    assert open_library(broken, ALL_FLAGS).functions.one() == 1
    (sources / "one.cpp").write_text('extern "C" int one() { return 2; }\n')
    assert open_library(cache, ALL_FLAGS).functions.one() == 2


def test_a_new_library_takes_the_place_of_older_ones_which_those_who_opened_them_keep(tmp_path, monkeypatch):
    sources = tmp_path / "sources"
    sources.mkdir()
    monkeypatch.setattr(fused_library, "SOURCES", sources)
    monkeypatch.setattr(fused_library, "_bind", lambda functions: functions)
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "another.so").touch()
    opened = []
    for number in (1, 2):
        (sources / "number.cpp").write_text(f'extern "C" int number() {{ return {number}; }}\n')
        opened.append(open_library(cache, ALL_FLAGS))
    assert [library.functions.number() for library in opened] == [1, 2]
    (left,) = cache.glob("fused-*.so")
    assert left.stem.endswith(opened[1].sha256[:16])
    assert (cache / "another.so").exists()


BUILDER = """
import sys
from pathlib import Path
from inference_api.backend.engines import fused_library

fused_library.SOURCES = Path(sys.argv[1])
fused_library._bind = lambda functions: functions
print("ready", flush=True)
sys.stdin.readline()
print(fused_library.open_library(Path(sys.argv[2]), frozenset(fused_library.INSTRUCTION_SETS)).functions.one())
"""

COUNTING_COMPILER = """#!/bin/sh
case " $* " in *" -c "*) echo compiled ;; *) echo linked ;; esac >> {log}
exec {compiler} "$@"
"""


def test_of_two_processes_that_build_into_one_folder_at_once_one_compiles(tmp_path):
    sources, tools, log = tmp_path / "sources", tmp_path / "tools", tmp_path / "log"
    sources.mkdir()
    tools.mkdir()
    (sources / "one.cpp").write_text('#include <regex>\nextern "C" int one() { return 1; }\n')
    compiler = shutil.which(fused_library.COMPILER)
    (tools / fused_library.COMPILER).write_text(COUNTING_COMPILER.format(log=log, compiler=compiler))
    (tools / fused_library.COMPILER).chmod(0o755)
    command = [sys.executable, "-c", BUILDER, str(sources), str(tmp_path / "cache")]
    environ = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
    with contextlib.ExitStack() as stack:
        builders = [
            stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)
            )
            for _ in range(2)
        ]
        assert [builder.stdout.readline() for builder in builders] == ["ready\n"] * 2
        for builder in builders:
            builder.stdin.write("\n")
            builder.stdin.flush()
        assert [builder.communicate(timeout=120)[0] for builder in builders] == ["1\n"] * 2
    assert sorted(log.read_text().splitlines()) == ["compiled", "linked"]
    assert len(list((tmp_path / "cache").iterdir())) == 1
