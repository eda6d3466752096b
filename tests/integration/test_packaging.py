"""Install the project as a stranger does, into clean environments from the package index, and use what was installed.

Nothing of the environment that runs the tests is seen by the installed one, and nothing is run from the checkout's
folder: what is missing in the wheel is missing here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import requests

from tests.integration.service import ROOT, running_command, wait_for

EXTRAS_TOOLS = {"dev": ("mypy", "ruff"), "test": ("pytest",)}


def install(folder: Path, *arguments: str, lent: Path | None = None) -> Path:
    """Make an environment in `folder`, install there with the project's constraints; return its Python.

    The packages of `lent`, another environment, are seen too. The pip of the tests works for the new environment, and
    nothing is compiled: all three only save time.
    """
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    if lent is not None:
        site = "import sysconfig; print(sysconfig.get_path('purelib'))"
        Path(outside([python, "-c", site], folder).strip(), "lent.pth").write_text(outside([lent, "-c", site], folder))
    pip(python, "install", "--quiet", "--no-compile", "--constraint", ROOT / "scripts" / "constraints.txt", *arguments)
    return python


def pip(python: Path, command: str, *arguments: str | Path) -> str:
    """Run a pip command in the checkout for the environment of `python`; return its output."""
    words = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", command]
    done = subprocess.run([*words, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def outside(command: list[str | Path], cwd: Path) -> str:
    """Run a program outside the checkout, without the settings of this run of the tests; return its output."""
    environ = {name: text for name, text in os.environ.items() if not name.startswith(("PYTHON", "INFERENCE_API_"))}
    done = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the wheel that pip makes of the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    pip(Path(sys.executable), "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ".")
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """Return the Python of an environment after what `pip install .` does: the wheel is made, and installed."""
    return install(tmp_path_factory.mktemp("plain") / "venv", str(wheel))


def test_the_wheel_holds_both_packages_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {
        path.relative_to(ROOT).as_posix() for top in ("inference_api", "proxy") for path in (ROOT / top).rglob("*")
    }
    packed = {name for name in names if ".dist-info/" not in name}
    assert packed == {name for name in modules if name.endswith((".py", ".cpp", ".h"))}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_a_plain_install_brings_neither_torch_nor_transformers(installed: Path) -> None:
    listed = json.loads(pip(installed, "list", "--format", "json"))
    names = {package["name"].lower() for package in listed}
    assert {"inference-api", "flask", "gunicorn", "tokenizers"} <= names
    assert not {"torch", "transformers", "numpy", "pytest", "mypy"} & names


def test_the_installed_mock_starts_and_streams_in_another_folder(tmp_path: Path, installed: Path) -> None:
    where = outside([installed, "-c", "import inference_api, proxy; print(inference_api.__file__)"], tmp_path).strip()
    assert Path(where).is_relative_to(installed.parents[1])
    # env -C: the service runs in a folder where neither package lies.
    command = ["env", "-C", str(tmp_path), "-u", "PYTHONPATH", str(installed)]
    command += ["-m", "inference_api.supervisor", "--mock"]
    with running_command(command, {}) as service:
        log = service.log
        wait_for(lambda: "Ready http" in log.read_text() or service.process.poll() is not None, 20.0, "ready card")
        answer = requests.post(f"{service.url}/inference/mock", json={"text": "hi", "max_tokens": 5}, timeout=20)
        assert (answer.status_code, answer.text) == (200, "23456")


def test_the_editable_install_has_the_tools_of_its_extras_in_their_pinned_versions(
    tmp_path: Path, installed: Path
) -> None:
    # What `.` needs was installed from the index by the fixture; here the extras are.
    python = install(tmp_path / "venv", "--editable", ".[dev,test]", lent=installed)
    where = outside([python, "-c", "import inference_api; print(inference_api.__file__)"], tmp_path).strip()
    assert Path(where).is_relative_to(ROOT)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, tools in EXTRAS_TOOLS.items():
        pins = dict(pin.split("==") for pin in extras[extra])
        for tool in tools:
            assert pins[tool] in outside([python, "-m", tool, "--version"], tmp_path)
    collect = ["-m", "pytest", "--collect-only", "-q", "-c", ROOT / "pyproject.toml", ROOT / "tests/test_errors.py"]
    assert "test_codes_and_statuses_are_stable" in outside([python, *collect], ROOT)
