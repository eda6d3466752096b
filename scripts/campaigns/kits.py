"""Run what SGLang tests its own server with against this one: the part `kits`.

The kits are files of the wheel `sglang`, which is fetched without what it depends on and never installed. A test of
them is run, or left out for a reason that stands here; a test that this list does not know is run too. On the mock and
on the real model.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

from campaigns.part import CampaignError, Context, ServiceUnderTest

VERSION = "0.5.23"
WHEEL = f"sglang-{VERSION}-cp311-cp311-manylinux_2_34_x86_64.whl"
WHEEL_SHA256 = "00b3cd5b265ac76c64185fbb6b95424f324ddd9f428d0306b77bc9db9d859937"
PROGRAM = Path(__file__).parent / "clients" / "sglang_kits.py"
TIMEOUT_SECONDS = 300.0

OWN_ROUTE = "asks SGLang's own routes"
OWN_CODE = "tests SGLang's code, no server"
OWN_MEMBER = "wants SGLang's own member `matched_stop`"
MOCK_ENDS_NOT = "wants an end that the mock's digits do not come to"
ABLE_MODEL = "wants a model that calls functions by itself"
REASONING = "wants a model that reasons"
DEFAULT_SYSTEM = "counts the system message; this model's template has a longer one by default"


@dataclasses.dataclass(frozen=True, slots=True)
class Kit:
    """A file of the kits, and what of it is run: every test but those that are left out, each for a reason."""

    file: str
    mixin: str | None
    """The class of its tests; None: functions `_test_<name>`."""
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)
    left_out_on_mock: Mapping[str, str] = dataclasses.field(default_factory=dict)
    left_out_on_model: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def module(self) -> str:
        """The file's name as a module."""
        return Path(self.file).stem


KITS = (
    Kit(
        "kits/anthropic_messages_kit.py",
        "AnthropicMessagesMixin",
        {"test_tool_result_image_content_conversion": OWN_CODE},
        left_out_on_model={"test_count_tokens_with_system": DEFAULT_SYSTEM},
    ),
    Kit(
        "kits/basic_api_contract_kit.py",
        "BasicAPIContractMixin",
        dict.fromkeys(("test_health_generate", "test_get_server_info", "test_get_model_info"), OWN_ROUTE),
    ),
    Kit("kits/json_mode_kit.py", "JSONModeMixin"),
    Kit(
        "kits/json_constrained_kit.py",
        "JSONConstrainedMixin",
        dict.fromkeys(("test_json_generate", "test_json_invalid", "test_mix_json_and_other"), OWN_ROUTE),
        left_out_on_mock={"test_json_openai": MOCK_ENDS_NOT},
    ),
    Kit(
        "kits/matched_stop_kit.py",
        "MatchedStopMixin",
        dict.fromkeys(
            ("test_finish_stop_str", "test_finish_stop_regex_str", "test_finish_stop_eos", "test_finish_length"),
            OWN_MEMBER,
        ),
    ),
    Kit(
        "tool_call_test_runner.py",
        None,
        {
            **dict.fromkeys(("auto", "parallel", "streaming_parallel"), ABLE_MODEL),
            **dict.fromkeys(("thinking", "reasoning_usage"), REASONING),
        },
        left_out_on_mock=dict.fromkeys(("basic_format", "streaming", "none", "strict", "multiturn"), MOCK_ENDS_NOT),
    ),
)
"""What asks for routes that are here. All other kits ask SGLang's own `/generate`, or look into its process."""


def run(context: Context) -> dict[str, int]:
    """Run the kits; return how many of their tests were left out."""
    folder = _unpack(context.folder)
    num_left_out = 0
    for engine, is_mock in (("mock", True), ("model", False)):
        with context.service(mock=is_mock) as service:
            for kit in KITS:
                tests = _tests_of(folder / kit.file, kit)
                more = kit.left_out_on_mock if is_mock else kit.left_out_on_model
                left_out = {**kit.left_out, **more}
                unknown = left_out.keys() - set(tests)
                context.count(f"{kit.module} has the tests that are left out", str(unknown) if unknown else None)
                chosen = [test for test in tests if test not in left_out]
                num_left_out += len(tests) - len(chosen)
                _run(context, service, folder, kit, engine, chosen)
    return {"left_out": num_left_out}


def _unpack(folder: Path) -> Path:
    """Return the folder with the files of KITS, fetched first if they are not there; raise CampaignError."""
    unpacked = folder / f"sglang-kits-{WHEEL_SHA256[:12]}"
    wheel = unpacked / WHEEL
    if not wheel.is_file():
        unpacked.mkdir(parents=True, exist_ok=True)
        # This very file on any machine: of another platform nothing would be run either.
        platform = ["--platform", "manylinux_2_34_x86_64", "--python-version", "3.11", "--abi", "cp311"]
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--quiet"]
        options = ["--no-deps", "--only-binary=:all:", *platform, "--dest", str(unpacked), f"sglang=={VERSION}"]
        done = subprocess.run([*pip, *options], capture_output=True, text=True, check=False)
        if done.returncode:
            raise CampaignError(f"the wheel of sglang {VERSION} cannot be fetched: {done.stderr.strip()[-300:]}")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        wheel.unlink()
        raise CampaignError(f"{WHEEL} has the SHA-256 {digest}, not {WHEEL_SHA256}")
    with zipfile.ZipFile(wheel) as archive:
        for kit in KITS:
            target = unpacked / kit.file
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(archive.read(f"sglang/test/{kit.file}"))
    return unpacked


def _tests_of(file: Path, kit: Kit) -> list[str]:
    """Return the names of a kit's tests, read without running anything of it."""
    tree = ast.parse(file.read_text("utf-8"))
    if kit.mixin is None:
        functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        return [name.removeprefix("_test_") for name in functions if name.startswith("_test_")]
    (mixin,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kit.mixin)
    return [node.name for node in mixin.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]


def _run(context: Context, service: ServiceUnderTest, folder: Path, kit: Kit, engine: str, tests: list[str]) -> None:
    """Run tests of a kit in a process of their own (blocking), and count each."""
    if not tests:
        return
    environ = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(PROGRAM.parent),
        "BASE_URL": service.url,
        "TOKEN": service.jwt,
        "MODEL": service.model,
    }
    command = [sys.executable, str(PROGRAM), str((folder / kit.file).parent), kit.module, kit.mixin or "-", *tests]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
    told = [json.loads(line) for line in done.stdout.splitlines()]
    for one in told:
        context.count(f"{one['check']} on the {engine}", one["fault"])
    if len(told) != len(tests):
        said = done.stderr.strip().splitlines()[-1:] or [f"status {done.returncode}"]
        context.count(f"{kit.module} on the {engine}", f"{len(told)} of {len(tests)} tests were run: {said[0]}")
