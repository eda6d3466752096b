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
from dataclasses import dataclass
from pathlib import Path

import pytest
import requests

from tests.integration.service import ROOT, in_parallel, running_command, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]  # the first test waits for every install

EXTRAS_TOOLS = {"dev": ("mypy", "ruff"), "test": ("pytest",)}


def install(folder: Path, *arguments: str) -> Path:
    """Make an environment in `folder`, install there with the project's constraints; return its Python.

    The pip of the tests works for the new environment, and nothing is compiled: both only save time.
    """
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
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


@dataclass(frozen=True)
class Installed:
    """The wheel that pip makes of the checkout, and the Pythons of two environments.

    `plain` is after what `pip install .` does: the wheel is made, and installed; `editable` is after an editable
    install with both extras.
    """

    wheel: Path
    plain: Path
    editable: Path


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Return what was installed; both at once, since pip reads the index with one core."""
    folder = tmp_path_factory.mktemp("installed")

    def install_plain() -> Path:
        pip(Path(sys.executable), "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ".")
        return install(folder / "plain", *map(str, folder.glob("*.whl")))

    plain, editable = in_parallel([install_plain, lambda: install(folder / "venv", "--editable", ".[dev,test]")])
    (wheel,) = folder.glob("*.whl")
    return Installed(wheel, plain, editable)


def test_the_wheel_holds_both_packages_and_nothing_else(installed: Installed) -> None:
    names = set(zipfile.ZipFile(installed.wheel).namelist())
    modules = {
        path.relative_to(ROOT).as_posix() for top in ("inference_api", "proxy") for path in (ROOT / top).rglob("*")
    }
    packed = {name for name in names if ".dist-info/" not in name}
    assert packed == {name for name in modules if name.endswith((".py", ".cpp", ".h"))}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_a_plain_install_brings_neither_torch_nor_transformers(installed: Installed) -> None:
    listed = json.loads(pip(installed.plain, "list", "--format", "json"))
    names = {package["name"].lower() for package in listed}
    assert {"inference-api", "flask", "gunicorn", "tokenizers"} <= names
    assert not {"torch", "transformers", "numpy", "pytest", "mypy"} & names


def test_the_installed_mock_starts_and_streams_in_another_folder(tmp_path: Path, installed: Installed) -> None:
    where = outside(
        [installed.plain, "-c", "import inference_api, proxy; print(inference_api.__file__)"], tmp_path
    ).strip()
    assert Path(where).is_relative_to(installed.plain.parents[1])
    # env -C: the service runs in a folder where neither package lies.
    command = ["env", "-C", str(tmp_path), "-u", "PYTHONPATH", str(installed.plain)]
    command += ["-m", "inference_api.supervisor", "--mock"]
    with running_command(command, {}) as service:
        log = service.log
        wait_for(lambda: "Ready http" in log.read_text() or service.process.poll() is not None, 20.0, "ready card")
        answer = requests.post(f"{service.url}/inference/mock", json={"text": "hi", "max_tokens": 5}, timeout=20)
        assert (answer.status_code, answer.text) == (200, "23456")


def test_the_editable_install_has_the_tools_of_its_extras_in_their_pinned_versions(
    tmp_path: Path, installed: Installed
) -> None:
    python = installed.editable
    where = outside([python, "-c", "import inference_api; print(inference_api.__file__)"], tmp_path).strip()
    assert Path(where).is_relative_to(ROOT)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, tools in EXTRAS_TOOLS.items():
        pins = dict(pin.split("==") for pin in extras[extra])
        for tool in tools:
            assert pins[tool] in outside([python, "-m", tool, "--version"], tmp_path)
    collect = ["-m", "pytest", "--collect-only", "-q", "-c", ROOT / "pyproject.toml", ROOT / "tests/test_errors.py"]
    assert "test_codes_and_statuses_are_stable" in outside([python, *collect], ROOT)
