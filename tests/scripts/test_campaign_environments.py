"""Check the campaign's environments: made once, made again if not whole, known to scripts/clean. Installs nothing."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.scripts.cleaning import living_process
from tests.scripts.cleaning import run as clean

ROOT = Path(__file__).parents[2]
FOREIGN = "clients-notes"


@pytest.fixture
def environments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return the module with pins of its own, as scripts/campaign imports it."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    environments = importlib.import_module("campaigns.environments")
    (tmp_path / "pins").mkdir()
    (tmp_path / "pins" / "some.txt").write_text("# A list.\n@a/b==1.2\nc==3\n")
    monkeypatch.setattr(environments, "PINS", tmp_path / "pins")
    return environments


@pytest.fixture
def commands(environments: Any, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return the list of what is run instead of being run."""
    commands: list[list[str]] = []
    monkeypatch.setattr(environments, "_run", commands.append)
    return commands


def test_an_environment_is_installed_once_with_its_pins_alone(environments, commands, tmp_path: Path) -> None:
    python = environments.make_python_environment("some", tmp_path)
    venv, pip = commands
    assert venv == [sys.executable, "-m", "venv", "--clear", str(python.parents[1])]
    assert pip[0] == str(python) and "--no-deps" in pip
    assert pip[-2:] == ["--requirement", str(tmp_path / "pins" / "some.txt")]
    assert environments.make_python_environment("some", tmp_path) == python
    assert len(commands) == 2


def test_a_changed_pin_makes_another_environment(environments, commands, tmp_path: Path) -> None:
    first = environments.make_python_environment("some", tmp_path)
    (tmp_path / "pins" / "some.txt").write_text("c==4\n")
    assert environments.make_python_environment("some", tmp_path) != first
    assert len(commands) == 4


def test_an_environment_whose_installation_broke_is_made_again(
    environments, commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_off(command: list[str]) -> None:
        raise environments.CampaignError("pip ended with status 1: no such version")

    with monkeypatch.context() as patch:
        patch.setattr(environments, "_run", break_off)
        with pytest.raises(environments.CampaignError, match="no such version"):
            environments.make_python_environment("some", tmp_path)
    environments.make_python_environment("some", tmp_path)
    assert len(commands) == 2


def test_npm_is_told_every_package_and_runs_none_of_their_scripts(environments, commands, tmp_path: Path) -> None:
    folder = environments.make_node_environment("some", tmp_path)
    (npm,) = commands
    assert npm[-2:] == ["@a/b@1.2", "c@3"] and "--ignore-scripts" in npm and str(folder) in npm
    assert environments.make_node_environment("some", tmp_path) == folder and len(commands) == 1


@pytest.mark.parametrize(("version", "found"), [("v20.1.0", True), ("v24.0.0", True), ("v18.19.0", False), ("", False)])
def test_a_node_that_is_too_old_is_none(environments, monkeypatch, tmp_path: Path, version: str, found: bool) -> None:
    for name in ("node", "npm"):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {version}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin" if version else str(tmp_path / "empty"))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert (environments.find_node() == str(tmp_path / "node")) == found


@pytest.mark.parametrize(("user", "status", "found"), [(0, 0, True), (0, 1, False), (1000, 0, False)])
def test_node_is_installed_by_root_on_debian_and_its_lack_is_no_error(
    environments, monkeypatch, tmp_path: Path, user: int, status: int, found: bool
) -> None:
    made = "\n".join(f"printf '#!/bin/sh\\necho v20.1.0' >{tmp_path}/{name}" for name in ("node", "npm"))
    install = f"case $* in *install*nodejs*npm) {made}\n/bin/chmod +x {tmp_path}/node {tmp_path}/npm ;; esac"
    (tmp_path / "apt-get").write_text(f"#!/bin/sh\n[ {status} = 0 ] || exit {status}\n{install}\n")
    (tmp_path / "apt-get").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert (environments.find_node() == str(tmp_path / "node")) == found


def test_a_program_that_fails_is_told_by_its_last_error(environments: Any) -> None:
    text = "import sys; print('ERROR: no such package\\nfor details see the log', file=sys.stderr); sys.exit(2)"
    with pytest.raises(environments.CampaignError, match=r"status 2: ERROR: no such package$"):
        environments._run([sys.executable, "-c", text])


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Return a cache root with what the campaign installs, and a user's folder beside it."""
    pins = sorted(path.stem for path in (ROOT / "scripts" / "campaigns" / "pins").glob("*.txt"))
    cache = tmp_path / "cache"
    for name in (*(f"{stem}-0123456789ab" for stem in (*pins, "sglang-kits")), FOREIGN):
        (cache / "campaign" / name / "lib").mkdir(parents=True)
        (cache / "campaign" / name / "lib" / "file").write_text("x" * 1024)
    return cache


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Return the script of a checkout that has no .venv to lose."""
    copy = tmp_path / "checkout"
    for folder in ("scripts", "inference_api"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return copy / "scripts" / "clean"


def test_clean_takes_every_environment_of_the_campaign_and_nothing_beside_them(cache: Path, script: Path) -> None:
    assert clean(cache, script=script).stdout == "nothing to remove\n"
    ended = clean(cache, "--all", script=script)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert [path.name for path in (cache / "campaign").iterdir()] == [FOREIGN]
    assert f"kept, not ours  {cache}/campaign/{FOREIGN}\n" in ended.stdout


def test_clean_keeps_a_linked_folder_of_environments(cache: Path, script: Path) -> None:
    (cache / "campaign").rename(cache.parent / "elsewhere")
    (cache / "campaign").symlink_to(cache.parent / "elsewhere")
    assert f"kept, not ours  {cache}/campaign\n" in clean(cache, "--all", script=script).stdout
    assert len(list((cache.parent / "elsewhere").iterdir())) > 1


def test_clean_waits_until_no_campaign_runs(cache: Path, script: Path) -> None:
    campaign = ("campaigns", "clients")
    with living_process(Path(sys.executable), looks_like=campaign, INFERENCE_API_CACHE_DIR=str(cache)) as process:
        ended = clean(cache, "--all", script=script)
    assert ended.returncode == 1 and f"(process {process.pid}); stop it first" in ended.stderr
    assert (cache / "campaign" / FOREIGN).is_dir() and len(list((cache / "campaign").iterdir())) > 1
