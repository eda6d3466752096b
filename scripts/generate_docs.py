"""Write the generated tables of the documents: the settings, from the dataclass that reads them.

A program for developers: `python scripts/generate_docs.py` rewrites, `--check` fails if a table is stale.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from inference_api.config import Settings  # noqa: E402

SETTINGS_PATH = ROOT / "docs" / "settings.md"
_INTRODUCTION = """# Settings

Environment variables of the server, the backend and the supervisor; the proxy's own are in [proxy.md](proxy.md). Where
a setting has several names, the first one that is set wins. A wrong value stops the start and says its name. Written by
`scripts/generate_docs.py` from `inference_api/config.py`.

| names | default | meaning |
|---|---|---|
"""


def settings_page() -> str:
    """Return docs/settings.md."""
    lines = []
    for field in dataclasses.fields(Settings):
        names = ", ".join(f"`{name}`" for name in field.metadata["names"])
        doc = field.metadata["doc"]
        if field.metadata["choices"]:
            doc += f" One of: {', '.join(field.metadata['choices'])}."
        default = field.default
        shown = "" if default in ("", ()) else f"`{int(default) if isinstance(default, bool) else default}`"
        lines.append(f"| {names} | {shown} | {doc.replace('|', chr(92) + '|')} |\n")
    lines.append("| `MOCK_MODEL` | `0` | 1 picks the mock engine where `INFERENCE_API_ENGINE` is not set. |\n")
    lines.append("| `JWT_SECRET` | | The proxy's secret; the supervisor hands it to the proxy alone. |\n")
    return _INTRODUCTION + "".join(lines)


def main() -> int:
    """Write or check the pages; return the exit status."""
    page = settings_page()
    if "--check" in sys.argv[1:]:
        if SETTINGS_PATH.read_text("utf-8") != page:
            sys.stderr.write("docs/settings.md is stale: run python scripts/generate_docs.py\n")
            return 1
        return 0
    SETTINGS_PATH.write_text(page, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
