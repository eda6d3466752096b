"""Own what every test shares: the leak detector, the real model's image, and the compiled library."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

_LEAKY_KINDS = ("socket:", "pipe:", "anon_inode:[eventfd]", "anon_inode:[eventpoll]", "anon_inode:[pidfd]")


def _open_descriptors() -> set[str]:
    """Return the sockets, pipes and event descriptors of this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith(_LEAKY_KINDS):
            found.add(f"{name} -> {target}")
    return found


def _children() -> set[str]:
    found: set[str] = set()
    for task in os.listdir("/proc/self/task"):
        try:
            found.update(Path(f"/proc/self/task/{task}/children").read_text().split())
        except OSError:
            continue
    return found


def pytest_configure() -> None:
    """Take SIGINT as a program in the foreground does: a shell ignores it for what it starts behind itself."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _leak_detector(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a thread, a child process, a socket, a pipe or an event descriptor behind.

    Tests that import torch are left out: it starts threads of its own that live as long as the process.
    """
    if request.node.get_closest_marker("torch") or request.node.get_closest_marker("model"):
        yield
        return
    threads, children, descriptors = set(threading.enumerate()), _children(), _open_descriptors()
    yield
    leaked_threads = [thread for thread in threading.enumerate() if thread not in threads]
    for thread in leaked_threads:
        thread.join(2.0)
    leaked = [thread.name for thread in leaked_threads if thread.is_alive()]
    assert not leaked, f"threads left behind: {leaked}"
    left_children = _children() - children
    assert not left_children, f"child processes left behind: {left_children}"
    if _open_descriptors() - descriptors:
        gc.collect()
    left_descriptors = _open_descriptors() - descriptors
    assert not left_descriptors, f"descriptors left behind: {left_descriptors}"


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run of continuous integration in which a test was skipped or expected to fail: nothing is left out."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") == "true" and reporter is not None:
        not_run = [report for kind in ("skipped", "xfailed", "xpassed") for report in reporter.stats.get(kind, ())]
        if not_run:
            reporter.write_line(f"{len(not_run)} tests were not run, which CI=true does not allow", red=True)
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def model_cache() -> Path:
    """Return the cache root that the real model's image lives in: the same that scripts/serve uses."""
    from inference_api.config import Settings

    return Settings.from_environ().cache_path


@pytest.fixture(scope="session")
def model_image_path(model_cache: Path) -> Path:
    """Return the real model's image, prepared if it is not there yet."""
    command = [sys.executable, "-m", "inference_api.prepare", "--cache", str(model_cache)]
    return Path(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, cwd=ROOT).stdout.strip())


@pytest.fixture(scope="session")
def fused_build_folder(model_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that holds the library of the `fused` engine, and room for what a test packs.

    It is compiled in the cache that every start with the real model takes it from: once, not by each test.
    """
    from inference_api.backend.engines.fused_library import open_library
    from inference_api.engine_artefacts import ARTEFACTS_FOLDER

    library = open_library(model_cache / ARTEFACTS_FOLDER)
    folder = tmp_path_factory.mktemp("fused")
    shutil.copy(library.functions._name, folder)
    return folder
