"""Check that gunicorn's errors are lines of ours, and that a place of its own which somebody gives it is kept."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PROGRAM = """
import sys
from gunicorn.config import Config
from inference_api.server.gunicorn_log import GunicornLog
config = Config()
config.set("errorlog", sys.argv[1])
config.set("loglevel", "warning")
log = GunicornLog(config)
log.setup(config)
try:
    raise ValueError("quoted request")
except ValueError:
    log.exception("it broke")
"""


def said(errorlog: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, errorlog], cwd=ROOT, capture_output=True, check=True, text=True
    )
    return run.stderr


def test_an_error_of_gunicorn_is_one_line_of_ours_without_the_exceptions_text() -> None:
    text = said("-")
    assert text.count("it broke") == 1 and " ERROR server[" in text
    assert "ValueError" in text and "quoted request" not in text


def test_gunicorns_own_error_file_is_honoured(tmp_path: Path) -> None:
    assert said(str(tmp_path / "errors")) == ""
    assert "it broke" in (tmp_path / "errors").read_text()
