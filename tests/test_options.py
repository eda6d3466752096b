"""Check that a wrong command line is one line, whoever asks for it."""

from __future__ import annotations

import pytest

from inference_api.options import OneLineParser


def test_an_error_is_one_line_and_an_abbreviation_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    parser = OneLineParser(prog="tool")
    parser.add_argument("--number", type=int)
    assert parser.parse_args(["--number", "3"]).number == 3
    for arguments in (["--numb", "3"], ["--number", "x"], ["more"]):
        with pytest.raises(SystemExit, match="2"):
            parser.parse_args(arguments)
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("ERROR: ") and line.endswith("; see tool --help")
        assert arguments[-1] in line
