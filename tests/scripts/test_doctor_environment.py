"""Check what scripts/doctor says of Python and the packages: before the first start, and where they do not fit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.doctor_machine import check_packages, check_python
from tests.scripts.doctoring import ROOT, report

SYSTEM_PYTHON = Path(sys.base_prefix) / "bin" / "python3"


def test_memory_that_nobody_has_is_told_before_the_first_start_too(environ: dict[str, str], checkout: Path) -> None:
    given = {**environ, "INFERENCE_API_ROWS": "1024", "INFERENCE_API_CONTEXT_TOKENS": "1048576"}
    assert "INFERENCE_API_ROWS (1024)" in report(given)[1]["memory"]["text"]
    status, found = report({**given, "SERVE_PYTHON": f"{SYSTEM_PYTHON}"}, root=checkout)
    assert (status, found["memory"]["level"]) == (1, "fault")
    assert "INFERENCE_API_CONTEXT_TOKENS (8192)" in found["memory"]["text"]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a copy of what the doctor reads, without .venv."""
    copy = tmp_path / "checkout"
    for folder in ("scripts", "inference_api", "proxy"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    return copy


def test_before_the_first_start_it_works_with_the_systems_python_alone(environ: dict[str, str], checkout: Path) -> None:
    status, found = report({**environ, "SERVE_PYTHON": f"{SYSTEM_PYTHON}"}, "--mock", root=checkout)
    assert status == 0
    assert (found["venv"]["level"], found["venv"]["text"]) == ("note", "no .venv yet")
    assert "2048 MiB needed" in found["disk"]["text"]


def test_a_python_that_can_make_no_environment_names_the_package_to_install(
    environ: dict[str, str], checkout: Path, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['ensurepip'] = None\n")
    given = {**environ, "SERVE_PYTHON": f"{SYSTEM_PYTHON}", "PYTHONPATH": str(tmp_path)}
    status, found = report(given, "--mock", root=checkout)
    assert status == 1
    assert "apt-get install python3-venv" in found["venv"]["advice"]


def test_an_old_or_missing_python_is_told_before_anything_is_run_with_it(
    environ: dict[str, str], checkout: Path, tmp_path: Path
) -> None:
    old = tmp_path / "old-python"
    old.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.9.2" && exit 0\n[ "$2" = "" ] && exit 0\nexit 1\n'
    )
    old.chmod(0o755)
    status, found = report({**environ, "SERVE_PYTHON": str(old)}, root=checkout)
    assert (status, found["python"]["text"]) == (1, "Python 3.9.2 is too old")
    status, found = report({**environ, "SERVE_PYTHON": "no-such-python"}, root=checkout)
    assert (status, found["python"]["text"]) == (1, "no-such-python is not installed")


def test_a_package_that_is_not_the_pinned_one_is_named_with_both_versions(
    environ: dict[str, str], checkout: Path
) -> None:
    (checkout / ".venv" / "bin").mkdir(parents=True)
    (checkout / ".venv" / "bin" / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (checkout / ".venv" / "bin" / "python").chmod(0o755)
    project = (checkout / "pyproject.toml").read_text().replace('"flask==', '"no-such-package==1.0", "flask==9.')
    (checkout / "pyproject.toml").write_text(project)
    status, found = report(environ, "--mock", root=checkout)
    assert status == 0 and found["packages"]["level"] == "note"
    digest = subprocess.run(
        "cat pyproject.toml scripts/constraints.txt | sha256sum | cut -d' ' -f1",
        shell=True,
        cwd=checkout,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    (checkout / ".venv" / ".installed").write_text(f"{digest} \n")
    status, found = report(environ, "--mock", root=checkout)
    assert status == 1 and found["packages"]["level"] == "fault"
    assert found["packages"]["text"].startswith("no-such-package is not installed; flask is ")
    assert ".venv/.installed" in found["packages"]["advice"]


def test_an_environment_that_cannot_be_entered_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Rights stop a user, but not root, whom the checks may run as.
    def refuse(path: Path, **_options: bool) -> os.stat_result:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", refuse)
    findings = check_python(tmp_path)
    assert [finding.level for finding in findings] == ["ok", "fault"]
    assert findings[1].text == ".venv cannot be entered: Permission denied"
    assert check_packages(tmp_path, ()) == []
