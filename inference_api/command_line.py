"""Own the command line of the service: `scripts/serve`, the two server files and `python -m inference_api.supervisor`.

Runs in the supervisor, before anything starts. An option stands for a setting and wins over the environment. Says which
command has the model image prepared. Knows no process and no model.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence

from inference_api.config import SWITCHES, Settings, proxy_bind
from inference_api.errors import SettingError
from inference_api.options import OneLineParser

MODEL_ONLY = {
    "dtype": "--dtype",
    "layers": "--layers",
    "no_weights": "--no-weights",
    "save_image": "--save-image",
    "load_image": "--load-image",
}
"""Settings that say something of a model's weights, and their options: the mock has none."""

_PREPARED = ("no_weights", "save_image", "load_image")
"""Those of them that `prepare` knows as switches."""


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
    """What the command line and the environment want started. `proxy` is where the proxy listens, if it is wanted.

    `status_fd` is set for a backend alone, beside a gunicorn outside.
    """

    settings: Settings
    proxy: tuple[str, int] | None
    status_fd: int | None


def read_command_line(argv: Sequence[str] | None) -> Start:
    """Parse the options (None: the process's own) over the environment.

    Raises SettingError for a wrong value; an unknown option ends the process with one line and status 2.
    """
    arguments = _make_parser().parse_args(argv)
    options: dict[str, str] = {}
    for name, value in vars(arguments).items():
        if name.startswith("INFERENCE_API_") and value is not None:
            options[name] = value
    if arguments.INFERENCE_API_ENGINE == "mock" and arguments.INFERENCE_API_MODEL:
        raise SettingError("--model is for a model, and --mock runs none: take one of them away")
    settings = Settings.from_environ(None, **options)
    refuse_model_settings_with_the_mock(settings)
    proxy_host = arguments.proxy_bind or proxy_bind()
    proxy = (proxy_host, arguments.proxy_port) if arguments.proxy_port is not None else None
    return Start(settings, proxy, arguments.status_fd)


def refuse_model_settings_with_the_mock(settings: Settings) -> None:
    """Raise SettingError if the engine is the mock and a setting wants something of a model's weights."""
    if settings.engine != "mock":
        return
    for field in dataclasses.fields(settings):
        if field.name in MODEL_ONLY and getattr(settings, field.name) != field.default:
            switches = [name for name, field_name, _ in SWITCHES if field_name == field.name]
            names = ", ".join([*field.metadata["names"][1:], *switches, MODEL_ONLY[field.name]])
            raise SettingError(
                f"{field.metadata['names'][0]} ({names}) is for a model, and the engine is the mock "
                "(INFERENCE_API_ENGINE, MOCK_MODEL, --mock): take one of them away"
            )


def prepare_command(settings: Settings) -> list[str]:
    """Return what follows `python` to have the model image prepared that these settings want."""
    command = ["-m", "inference_api.prepare", "--cache", str(settings.cache_path)]
    command += ["--hf-cache", str(settings.hf_cache_path), "--image-suffix", settings.image_suffix]
    command += ["--model", settings.model] if settings.model else []
    command += ["--layers", str(settings.layers)] if settings.layers else []
    command += [MODEL_ONLY[name] for name in _PREPARED if getattr(settings, name)]
    return command + (["--compile"] if settings.engine != "transformers" and settings.dtype == "auto" else [])


def _make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="scripts/serve",
        description="Run the backend, gunicorn and, if asked, the proxy. docs/settings.md lists the rest.",
    )

    def add_setting(option: str, setting: str, text: str, constant: str | None = None) -> None:
        """Add an option that stands for a setting, with a value or, as a switch, with `constant`."""
        if constant is None:
            metavar = option.removeprefix("--").replace("-", "_").upper()
            parser.add_argument(option, dest=setting, metavar=metavar, help=text)
        else:
            parser.add_argument(option, dest=setting, action="store_const", const=constant, help=text)

    add_setting("--host", "INFERENCE_API_BIND", "address the server binds (default: SERVICE_BIND or 127.0.0.1)")
    add_setting("--port", "INFERENCE_API_PORT", "port the server binds (default: SERVICE_PORT or 7000)")
    parser.add_argument("--proxy-bind", help="address the proxy binds (default: PROXY_BIND or 127.0.0.1)")
    parser.add_argument("--proxy-port", type=_port, help="start the proxy too, on this port")
    add_setting("--mock", "INFERENCE_API_ENGINE", "run the mock engine instead of a model", "mock")
    add_setting("--model", "INFERENCE_API_MODEL", "folder, GGUF file or hub id of the model")
    add_setting(
        "--dtype", "INFERENCE_API_DTYPE", "fp32: exactly, on the engine transformers (default: auto, the fastest)"
    )
    add_setting("--workers", "INFERENCE_API_WORKERS", "number of gunicorn workers")
    add_setting("--layers", "INFERENCE_API_LAYERS", "for development: keep the model's first layers only")
    add_setting("--no-weights", "INFERENCE_API_NO_WEIGHTS", "for development: random weights, always the same", "1")
    add_setting("--save-image", "INFERENCE_API_SAVE_IMAGE", "keep the prepared model under tti_cache in the cache", "1")
    add_setting("--load-image", "INFERENCE_API_LOAD_IMAGE", "start from a saved image; needs no model", "1")
    add_setting("--image-suffix", "INFERENCE_API_IMAGE_SUFFIX", "end of a saved image's name (default: v0)")
    add_setting(
        "--insecure-dev", "INFERENCE_API_INSECURE_DEV", "serve callers without the proxy, on loopback only", "1"
    )
    parser.add_argument(
        "--status-fd",
        type=int,
        help="start the backend alone, for a gunicorn outside; a byte here tells it that the image is there",
    )
    return parser


def _port(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is not a port, 1 to 65535")
    return int(text)
