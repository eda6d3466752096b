"""Check the shape of the code by reading it: who imports whom, what is nowhere, sizes, docstrings and the layout.

Every module is parsed with `ast`; nothing is imported but in the two tests that start a fresh interpreter.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture import IMPURE_MODULES, LAYERS, PURE, REQUEST_PATHS, TOP_LEVEL

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("inference_api", "proxy")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 40
MAX_PARAMETERS = 6

SIZE_EXCEPTIONS: dict[str, str] = {}
"""Files over the limit, with the reason."""

FUNCTION_EXCEPTIONS: dict[str, str] = {}
"""`file:function` over the limit of lines, with the reason."""

PARAMETER_EXCEPTIONS: dict[str, str] = {
    "inference_api/backend/engines/attention_hooks.py:attend_rows": "transformers calls it: the signature is theirs",
}
"""`file:function` over the limit of parameters, with the reason."""

NAME_EXCEPTIONS: dict[str, str] = {
    "proxy/config.py:process_environment": "the environment of the process, a noun, not a verb for anything",
}
"""`file:function` with a banned name, with the reason."""

BANNED_NAMES = re.compile(r"^(process_|do_(?!GET|POST|HEAD)|.*([Mm]anager|[Hh]elpers?|[Uu]tils?|[Cc]ommon)$)")

# The plan's row ids (a letter of its tables and two digits), which mean nothing to a reader of the code.
PLAN_WORDS = re.compile(r"\b[SPLFTRDEGMC][0-9]{2}\b|\b(work session|this session of work|the brief|the integrator)\b")


def _sources(*tops: str) -> list[Path]:
    return sorted(path for top in tops for path in (ROOT / top).rglob("*.py"))


def _native_sources() -> list[Path]:
    return sorted(path for path in (ROOT / "inference_api").rglob("*") if path.suffix in (".cpp", ".h"))


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _tree(path: Path) -> ast.Module:
    return _parse(path.read_text("utf-8"), _name(path))


@functools.cache
def _parse(text: str, name: str) -> ast.Module:
    """Return a text's tree, made once for all tests: they only read it."""
    return ast.parse(text, name)


def _imports(path: Path) -> Iterator[str]:
    """Yield every module that a file imports, `from a import b` as `a` and as `a.b`."""
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                package = path.relative_to(ROOT).with_suffix("").parts[: -node.level]
                module = ".".join([*package, *filter(None, [module])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def _is_under(name: str, top: str) -> bool:
    return name == top or name.startswith(f"{top}/")


def _is_module(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def _functions(path: Path) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{_name(path)}:{node.name}", node


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def _num_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    arguments = node.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def _exceeding(measured: dict[str, int], limit: int, exceptions: dict[str, str]) -> None:
    over = {name: size for name, size in measured.items() if size > limit}
    assert over.keys() == exceptions.keys(), f"over {limit}: {over}; excepted: {sorted(exceptions)}"
    assert all(exceptions.values()), "an exception needs a reason"


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: f"{layer[0]} without {layer[1][0]}")
def test_nobody_imports_across_a_boundary(layer: tuple[str, tuple[str, ...], tuple[str, ...]]) -> None:
    top, banned, allowed = layer
    found = [
        f"{_name(path)} imports {name}"
        for path in _sources(*PACKAGES)
        if _is_under(_name(path), top) and not any(_is_under(_name(path), place) for place in allowed)
        for name in _imports(path)
        if any(_is_module(name, module) for module in banned)
    ]
    assert not found


def test_the_server_imports_nothing_of_the_proxy_but_its_pure_authentication() -> None:
    found = {
        name
        for path in _sources("inference_api/server")
        for name in _imports(path)
        if _is_module(name, "proxy") and not _is_module(name, "proxy.auth")
    }
    assert not found


@pytest.mark.parametrize("file", PURE)
def test_pure_modules_do_no_input_or_output_and_have_no_clock(file: str) -> None:
    found = {name for name in _imports(ROOT / file) if any(_is_module(name, module) for module in IMPURE_MODULES)}
    assert not found


def test_the_import_check_finds_a_violation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    package = tmp_path / "inference_api" / "server"
    package.mkdir(parents=True)
    for text in ("import torch.nn", "def f():\n    from inference_api import backend", "from ..backend import x"):
        (package / "wrong.py").write_text(text)
        with pytest.raises(AssertionError, match="wrong"):
            test_nobody_imports_across_a_boundary(LAYERS[0])


def test_the_environment_is_read_by_the_two_configurations_only() -> None:
    found = {
        _name(path)
        for path in [*_sources(*PACKAGES), ROOT / "gunicorn.conf.py"]
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Attribute | ast.Name)
        and re.fullmatch(r"os\.(environb?|getenvb?|putenv)|environ|getenv", _dotted(node))
        and not (isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load))
        and not (isinstance(node, ast.Name) and f"os.{node.id}" not in set(_imports(path)))
    }
    assert found <= {"inference_api/config.py", "proxy/config.py"}


def test_nothing_is_loaded_that_could_run_code() -> None:
    found = [
        f"{_name(path)}:{node.lineno}"
        for path in _sources(*PACKAGES, "scripts")
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Call) and _dotted(node.func) in ("torch.load", "eval", "exec", "pickle.loads")
    ]
    assert not found


def test_nothing_sleeps_on_the_path_of_a_request() -> None:
    found = [
        f"{_name(path)}:{node.lineno}"
        for path in _sources(*PACKAGES)
        if any(_is_under(_name(path), top) for top in REQUEST_PATHS)
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Call)
        and _dotted(node.func) in ("time.sleep", "sleep", "gevent.sleep")
        # The shortest time there is, not none: it lets those greenlets run whose sockets are ready.
        and ast.unparse(node) != "gevent.sleep(_SOON_SECONDS)"
    ]
    assert not found


def test_nothing_is_global_and_changes() -> None:
    found = [
        f"{_name(path)}:{node.lineno}"
        for path in _sources(*PACKAGES)
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Global)
    ]
    assert not found


def test_users_input_is_never_checked_by_assert() -> None:
    found = [
        f"{_name(path)}:{node.lineno}"
        for path in _sources(*PACKAGES, "scripts")
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Assert)
    ]
    assert not found


def test_every_module_says_what_it_owns_and_every_test_file_too() -> None:
    found = [_name(path) for path in _sources(*PACKAGES, "scripts", "tests") if not ast.get_docstring(_tree(path))]
    assert not found


def test_every_native_file_says_what_it_owns() -> None:
    sources = _native_sources()
    assert sources
    assert not [_name(path) for path in sources if not path.read_text("utf-8").startswith("// ")]


def test_every_public_function_and_class_has_a_docstring() -> None:
    found = [
        f"{_name(path)}:{node.name}"
        for path in _sources(*PACKAGES)
        for owner in ast.walk(_tree(path))
        if isinstance(owner, ast.Module | ast.ClassDef) and not getattr(owner, "name", "").startswith("_")
        for node in owner.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]
    assert not found


def test_files_are_short() -> None:
    paths = [*_sources(*PACKAGES, "scripts"), *_native_sources(), ROOT / "gunicorn.conf.py"]
    _exceeding({_name(path): len(path.read_text().splitlines()) for path in paths}, MAX_FILE_LINES, SIZE_EXCEPTIONS)


def test_functions_are_short() -> None:
    measured = {
        name: (node.end_lineno or 0) - node.lineno + 1
        for path in _sources(*PACKAGES, "scripts")
        for name, node in _functions(path)
    }
    _exceeding(measured, MAX_FUNCTION_LINES, FUNCTION_EXCEPTIONS)


def test_functions_take_few_parameters() -> None:
    measured = {
        name: _num_parameters(node) for path in _sources(*PACKAGES, "scripts") for name, node in _functions(path)
    }
    _exceeding(measured, MAX_PARAMETERS, PARAMETER_EXCEPTIONS)


def test_names_say_what_they_are() -> None:
    found = [
        f"{_name(path)}:{node.name}"
        for path in _sources(*PACKAGES)
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and BANNED_NAMES.match(node.name)
    ]
    found += [_name(path) for path in _sources(*PACKAGES) if BANNED_NAMES.match(path.stem)]
    assert set(found) == NAME_EXCEPTIONS.keys()


def test_no_word_of_the_plan_is_left_in_code_tests_or_documents() -> None:
    kinds = {".py", ".cpp", ".h", ".md", ".toml", ".yml", ".txt", ""}
    paths = [path for top in (*PACKAGES, "scripts", "docs", "tests") for path in (ROOT / top).rglob("*")]
    paths += [path for path in ROOT.iterdir() if path.is_file()]
    found = [
        f"{_name(path)}: {match.group()}"
        for path in paths
        if path.is_file() and path.suffix in kinds and "data" not in path.parts and path != Path(__file__)
        for match in PLAN_WORDS.finditer(path.read_text("utf-8", errors="ignore"))
    ]
    assert not found


def test_no_path_of_one_machine_is_left() -> None:
    pattern = re.compile(r"(?<![\w.{}$-])/(work|home|root|mnt)/\w+")
    found = [
        f"{_name(path)}: {match.group()}"
        for path in [*_sources(*PACKAGES, "scripts", "tests"), *_native_sources()]
        if path != Path(__file__)
        for match in pattern.finditer(path.read_text())
    ]
    assert not found


def test_the_top_level_is_the_one_that_was_drawn() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    entries = {line.split("/", 1)[0] for line in listed.stdout.splitlines()}
    assert {entry for entry in entries if not entry.startswith(".")} <= TOP_LEVEL
    assert {"pyproject.toml", "README.md", "gunicorn.conf.py", *PACKAGES, "tests"} <= entries


def test_tests_stand_where_their_modules_do() -> None:
    others = {
        "test_architecture",
        "test_conftest",
        "test_container_files",
        "test_containers",
        "test_faults_table",
        "test_readme",
        "test_security_page",
        "test_wycheproof",
    }
    stray = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        parts = path.relative_to(ROOT / "tests").parts
        if parts[0] in ("integration", "live", "scripts") or path.stem in others:
            continue
        folder = ROOT / "proxy" if parts[0] == "proxy" else ROOT / "inference_api" / Path(*parts[:-1])
        names = {file.stem for file in folder.glob("*.py")} if folder.is_dir() else set()
        tested = path.stem.removeprefix("test_")
        if not any(tested == name or tested.startswith(f"{name}_") for name in names):
            stray.append(_name(path))
    assert not stray


def _modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint('\\n'.join(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(result.stdout.split())


def test_the_server_starts_without_torch_transformers_or_the_backend() -> None:
    modules = _modules_after("import inference_api.server.app")
    assert "inference_api.server.app" in modules
    assert not {"torch", "transformers", "inference_api.backend"} & modules


def test_the_mocks_backend_starts_without_torch_or_a_web_framework() -> None:
    modules = _modules_after("import inference_api.backend.main, inference_api.backend.engines.mock")
    assert "inference_api.backend.engines.mock" in modules
    assert not {"torch", "transformers", "flask", "tokenizers", "inference_api.server"} & modules


def test_the_proxy_starts_without_the_inference_api() -> None:
    modules = _modules_after("import proxy.app")
    assert not {"torch", "transformers", "inference_api"} & modules
