"""Check that an engine's digest names the code that makes its ids: equal digests are to mean equal ids."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from inference_api.backend.engines import code_digest, fused
from inference_api.backend.engines.code_digest import digest_of_code

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("one_torch_thread")]


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a copy of the code, which digests are made of from now on."""
    folder = tmp_path / "code"
    folder.mkdir()
    for file in code_digest._FOLDER.glob("*.py"):
        shutil.copy(file, folder)
    monkeypatch.setattr(code_digest, "_FOLDER", folder)
    return folder


DRAWING = (
    *("sampler.py", "sampling_rules.py", "logit_rules.py", "selection.py", "philox.py"),
    *("repetition.py", "mirostat.py"),
)


@pytest.mark.parametrize(
    ("native", "modules"),
    [(True, (*DRAWING, "fused_weights.py")), (False, (*DRAWING, "fused_torch_linear.py", "fused_levels.py"))],
)
def test_an_engine_whose_code_changed_has_another_digest(
    native: bool, modules: tuple[str, ...], code: Path, tiny_image, fused_library_of_tests, fused_build_folder: Path
) -> None:
    def digest() -> str:
        options = {"num_rows": 1, "context_tokens": 8, "build_folder": fused_build_folder, "num_threads": 1}
        return fused.load(tiny_image("llama"), native=native, **options).info.digest

    seen = {digest()}
    assert seen == {digest()}
    for module in modules:
        with (code / module).open("a") as file:
            file.write("# changed\n")
        found = digest()
        assert found not in seen, module
        seen.add(found)
    (code / "mock.py").write_text("# changed\n")
    assert digest() in seen


def test_a_name_that_no_file_has_is_refused(code: Path) -> None:
    with pytest.raises(ValueError, match="no file here is named fused_gone"):
        digest_of_code("fused_gone*.py")
