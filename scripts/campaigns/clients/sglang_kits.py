"""Run tests out of SGLang's kits against the service: `sglang_kits.py FOLDER MODULE CLASS TEST ...`.

FOLDER holds the files of the kits, unpacked; each test gets `base_url`, `model`, `api_key` and an OpenAI `client`, as
its kit wants it. A CLASS of `-` means functions `_test_<TEST>(client, model)`. The kits send no bearer with requests of
their own, and import parts of SGLang that these tests do not use: the bearer is added, the parts are empty modules.
Knows no kit.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import sys
import types
import unittest
from pathlib import Path
from typing import Any

import openai
import requests
from checks import BASE_URL, MODEL, TOKEN  # type: ignore[import-not-found]

PARTS_OF_SGLANG = (
    "sglang",
    "sglang.srt",
    "sglang.srt.entrypoints",
    "sglang.srt.entrypoints.anthropic",
    "sglang.srt.entrypoints.anthropic.protocol",
    "sglang.srt.entrypoints.anthropic.serving",
    "sglang.srt.utils",
    "sglang.test",
    "sglang.test.test_utils",
)


class _EmptyModule(types.ModuleType):
    """Have every name, and nothing behind it."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def load(folder: Path, module: str) -> types.ModuleType:
    """Import a file of the kits."""
    for name in PARTS_OF_SGLANG:
        sys.modules.setdefault(name, _EmptyModule(name))
    spec = importlib.util.spec_from_file_location(module, folder / f"{module}.py")
    if spec is None or spec.loader is None:
        raise ImportError(f"{module} is no file of {folder}")
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[module] = loaded
    spec.loader.exec_module(loaded)
    if hasattr(loaded, "openai"):
        setattr(loaded, "openai", types.SimpleNamespace(Client=_client))  # noqa: B010 - no type knows its names
    return loaded


def _client(**options: Any) -> openai.OpenAI:
    """Return a client as a kit makes it, with the bearer in place of the kit's own key."""
    return openai.OpenAI(**{**options, "api_key": TOKEN})


def add_bearer() -> None:
    """Send the bearer with every request of the library `requests` that has none."""
    plain = requests.Session.request

    def request(self: requests.Session, method: str, url: str, **options: Any) -> requests.Response:
        options["headers"] = {"Authorization": f"Bearer {TOKEN}", **(options.get("headers") or {})}
        return plain(self, method, url, **options)

    requests.Session.request = request  # type: ignore[assignment,method-assign]


def run_method(kit: type, test: str) -> str | None:
    """Run one test method of a mixin; return its fault."""
    base_url = BASE_URL
    members = {
        "base_url": base_url,
        "api_key": TOKEN,
        "model": MODEL,
        "served_model_name": MODEL,
        "client": openai.OpenAI(base_url=f"{base_url}/v1", api_key=TOKEN),
    }
    case = type(kit.__name__, (kit, unittest.TestCase), members)(test)
    result = unittest.TestResult()
    case.run(result)
    faults = [*result.failures, *result.errors]
    return faults[0][1].strip().splitlines()[-1] if faults else None if result.testsRun else "it did not run"


def run_function(module: types.ModuleType, test: str) -> str | None:
    """Run one function of a module; return its fault."""
    try:
        getattr(module, f"_test_{test}")(openai.OpenAI(base_url=f"{BASE_URL}/v1", api_key=TOKEN), MODEL)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def main() -> None:
    """Run the tests that the command line names; print a JSON line for each."""
    folder, module_name, kit_name, *tests = sys.argv[1:]
    add_bearer()
    for test in tests:
        with contextlib.redirect_stdout(io.StringIO()):  # the kits print what they get
            module = load(Path(folder), module_name)
            fault = run_function(module, test) if kit_name == "-" else run_method(getattr(module, kit_name), test)
        print(json.dumps({"check": f"{module_name}.{test}", "fault": fault}), flush=True)


if __name__ == "__main__":
    main()
