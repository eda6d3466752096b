"""Check that each option is its setting and wins over the environment, and that a wrong one is one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inference_api.command_line import prepare_command, read_command_line, refuse_model_settings_with_the_mock
from inference_api.config import Settings
from inference_api.errors import SettingError
from inference_api.prepare_options import parse_options
from inference_api.saved_image import SAVED_FOLDER


@pytest.mark.parametrize(
    ("environ", "arguments", "field", "value"),
    [
        ("INFERENCE_API_BIND=0.0.0.0", ["--host", "127.0.0.2"], "bind", "127.0.0.2"),
        ("SERVICE_PORT=7001", ["--port", "7002"], "port", 7002),
        ("INFERENCE_API_WORKERS=2", ["--workers", "3"], "workers", 3),
        ("INFERENCE_API_MODEL=a", ["--model", "b"], "model", "b"),
        ("INFERENCE_API_ENGINE=transformers", ["--mock"], "engine", "mock"),
        ("INFERENCE_API_DTYPE=auto", ["--dtype", "fp32"], "dtype", "fp32"),
        ("FALCON_40B_2LAYER=1", ["--layers", "3"], "layers", 3),
        ("FALCON_40B_2LAYER=1", ["--layers", "0"], "layers", 0),
        ("FALCON_40B_PYTORCH_NO_WEIGHTS=0", ["--no-weights"], "no_weights", True),
        ("FALCON_40B_SAVE=0", ["--save-image"], "save_image", True),
        ("FALCON_40B_LOAD=0", ["--load-image"], "load_image", True),
        ("FALCON_40B_TTI_SUFFIX=v1", ["--image-suffix", "v2"], "image_suffix", "v2"),
        ("INSECURE_DEV=0", ["--insecure-dev"], "insecure_dev", True),
    ],
)
def test_an_option_wins_over_the_environment(
    monkeypatch: pytest.MonkeyPatch, environ: str, arguments: list[str], field: str, value: object
) -> None:
    name, _, text = environ.partition("=")
    monkeypatch.setenv(name, text)
    assert getattr(read_command_line([]).settings, field) != value
    assert getattr(read_command_line(arguments).settings, field) == value


def test_the_proxy_is_wanted_by_its_port_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PROXY_BIND", raising=False)
    assert read_command_line([]).proxy is None
    assert read_command_line(["--proxy-port", "1223"]).proxy == ("127.0.0.1", 1223)
    monkeypatch.setenv("PROXY_BIND", "0.0.0.0")
    assert read_command_line(["--proxy-port", "1223"]).proxy == ("0.0.0.0", 1223)
    assert read_command_line(["--proxy-port", "1223", "--proxy-bind", "::1"]).proxy == ("::1", 1223)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--wrokers", "2"], "unrecognized arguments: --wrokers 2"),
        (["--work", "2"], "unrecognized arguments: --work 2"),
        (["--model"], "argument --model: expected one argument"),
        (["--proxy-port", "70000"], "argument --proxy-port: 70000 is not a port, 1 to 65535"),
    ],
)
def test_a_command_line_that_cannot_be_read_is_one_line_that_says_where_to_look(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        read_command_line(arguments)
    assert capsys.readouterr().err == f"ERROR: {text}; see scripts/serve --help\n"


def test_the_help_says_what_is_bound_and_by_which_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        read_command_line(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "--host HOST address the server binds (default: SERVICE_BIND or 127.0.0.1)" in text
    assert "address the proxy binds (default: PROXY_BIND or 127.0.0.1)" in text


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"layers": 2}, r"INFERENCE_API_LAYERS \(FALCON_40B_2LAYER, --layers\)"),
        ({"no_weights": True}, r"INFERENCE_API_NO_WEIGHTS \(FALCON_40B_PYTORCH_NO_WEIGHTS, --no-weights\)"),
        ({"save_image": True}, r"INFERENCE_API_SAVE_IMAGE \(FALCON_40B_SAVE, --save-image\)"),
        ({"load_image": True}, r"INFERENCE_API_LOAD_IMAGE \(FALCON_40B_LOAD, --load-image\)"),
        ({"dtype": "fp32"}, r"INFERENCE_API_DTYPE \(--dtype\)"),
    ],
)
def test_what_says_something_of_weights_is_refused_with_the_mock(settings: dict[str, Any], names: str) -> None:
    refuse_model_settings_with_the_mock(Settings(**settings))
    with pytest.raises(SettingError, match=rf"{names} is for a model, and the engine is the mock .*--mock"):
        refuse_model_settings_with_the_mock(Settings(engine="mock", **settings))


def test_prepare_is_told_everything_that_the_settings_want(tmp_path: Path) -> None:
    settings = Settings(cache_dir=str(tmp_path), model="m", layers=2, load_image=True, image_suffix="v7")
    options = parse_options(prepare_command(settings)[2:])
    assert (options.cache, options.hf_cache) == (tmp_path, tmp_path / "hf_cache")
    assert (options.model, options.layers, options.image_suffix) == ("m", 2, "v7")
    assert (options.no_weights, options.save_image, options.load_image) == (False, False, True)
    assert parse_options(prepare_command(Settings(no_weights=True))[2:]).no_weights
    assert options.compile
    for exact in (Settings(engine="transformers"), Settings(dtype="fp32")):
        assert not parse_options(prepare_command(exact)[2:]).compile
    assert parse_options(prepare_command(Settings(save_image=True, hf_cache="h"))[2:]).save_image
    assert settings.saved_images_path == tmp_path / SAVED_FOLDER


def test_a_model_beside_the_mock_on_one_command_line_is_refused_and_a_setting_of_the_environment_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(SettingError, match="--model is for a model, and --mock runs none"):
        read_command_line(["--mock", "--model", "m"])
    monkeypatch.setenv("INFERENCE_API_MODEL", "m")
    assert read_command_line(["--mock"]).settings.engine == "mock"
    monkeypatch.setenv("MOCK_MODEL", "1")
    assert read_command_line(["--model", "n"]).settings.engine == "mock"
