"""Write the generated tables of the documents: settings, parameters, errors and metrics, from the code that owns them.

A program for developers: `python scripts/generate_docs.py` rewrites, `--check` fails if a table is stale. One page is
generated whole; in the others a table stands between `<!-- generated: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from inference_api import errors  # noqa: E402
from inference_api.config import SWITCHES, Settings  # noqa: E402
from inference_api.server.body_fields import Field  # noqa: E402
from inference_api.server.embeddings import EmbeddingsBody  # noqa: E402
from inference_api.server.metrics import FAMILIES, VLLM_PREFIX  # noqa: E402
from inference_api.server.openai.bodies import ChatBody, CompletionBody, SamplingBody  # noqa: E402
from inference_api.server.validation import MAX_SEED, MAX_SESSION_ID_CHARS, NATIVE_FIELDS, SESSION_ID  # noqa: E402

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
    names_of = {field.name: field.metadata["names"][0] for field in dataclasses.fields(Settings)}
    for name, field_name, value in SWITCHES:
        lines.append(f"| `{name}` | `0` | 1 sets `{names_of[field_name]}` to `{value}` where that is not set. |\n")
    lines.append("| `JWT_SECRET` | | The proxy's secret; the supervisor hands it to the proxy alone. |\n")
    lines.append("| `PROXY_PORT` | `1223` | The proxy's port under `scripts/serve` and in the containers. |\n")
    return _INTRODUCTION + "".join(lines)


def parameters_table() -> str:
    """Return the members of a native body: type, default, bounds, meaning."""
    lines = ["| parameter | type | default | bounds | meaning |\n|---|---|---|---|---|\n"]
    for member in NATIVE_FIELDS:
        default = "" if member.default is None else f"`{str(member.default).lower()}`"
        lines.append(
            f"| `{member.name}` | {member.kind.__name__} | {default} | {_bounds(member)} | {member.summary} |\n"
        )
    return "".join(lines)


def _bounds(member: Field) -> str:
    if member is SESSION_ID:
        return f"{MAX_SESSION_ID_CHARS} characters"
    entries = f"{member.max_entries} {'ids' if member.entry is int else 'texts'}" if member.max_entries else ""
    if member.bounds is None:
        return entries
    low, high = member.bounds
    if member.entry is str:
        return f"{entries} of {low:g} to {high:g} characters"
    return f"{entries}{', ' if entries else ''}{low:g} to {'2^63 - 1' if high == MAX_SEED else f'{high:g}'}"


def errors_table() -> str:
    """Return the errors that a caller can see: status, stable code, meaning; the class's own words."""
    lines = ["| status | `X-Error-Code` | what the server does |\n|---|---|---|\n"]
    shown = set(_subclasses(errors.RequestError, errors.UnavailableError)) - {errors.ClientLeftError}  # nobody reads it
    for error in sorted(shown, key=lambda error: (error.status, error.code)):
        lines.append(f"| {error.status} | `{error.code}` | {(error.__doc__ or '').splitlines()[0]} |\n")
    return "".join(lines)


def openai_members_table() -> str:
    """Return the members of OpenAI's two bodies that can change an answer: where, what values, meaning."""
    rows: dict[tuple[str, str], list[str]] = {}
    for place, model in (("chat", ChatBody), ("text", CompletionBody)):
        schema = model.model_json_schema()
        for name, member in schema["properties"].items():
            if name not in SamplingBody.NO_EFFECT:
                values = _told(member, schema.get("$defs", {}))
                rows.setdefault((name, f"{values} | {member.get('description', '')}"), []).append(place)
    lines = ["| member | in | values | meaning |\n|---|---|---|---|\n"]
    lines += [f"| `{name}` | {', '.join(places)} | {told} |\n" for (name, told), places in rows.items()]
    return "".join(lines)


def embeddings_members_table() -> str:
    """Return the members of a body of embeddings: what values, meaning."""
    schema = EmbeddingsBody.model_json_schema()
    lines = ["| member | values | meaning |\n|---|---|---|\n"]
    for name, member in schema["properties"].items():
        if name not in EmbeddingsBody.NO_EFFECT:
            lines.append(f"| `{name}` | {_told(member, {})} | {member.get('description', '')} |\n")
    return "".join(lines)


def _told(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """Say which values a member takes by its JSON schema, as pydantic makes them of the bodies; null is absent."""
    if "$ref" in schema:
        return _told(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    if "anyOf" in schema:
        kinds = [_told(one, definitions) for one in schema["anyOf"] if one.get("type") != "null"]
        return " or ".join(kinds)
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type")
    if kind == "array":
        return f"list{_sized(schema, 'Items')} of {_told(schema['items'], definitions)}"
    if kind == "object":
        return _told_object(schema, definitions)
    if kind == "string":
        return f"string{_sized(schema, 'Length', ' characters')}"
    return f"{kind}{_bounded(schema)}"


def _told_object(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    if "properties" in schema:
        return "object of " + ", ".join(f"`{name}`" for name in schema["properties"])
    values = schema.get("additionalProperties")
    of_what = f" of {_told(values, definitions)}" if isinstance(values, Mapping) else ""
    return f"object{_sized(schema, 'Properties')}{of_what}"


def _sized(schema: Mapping[str, Any], what: str, unit: str = "") -> str:
    low, high = schema.get(f"min{what}"), schema.get(f"max{what}")
    if low is None and high is None:
        return ""
    if high is None:
        return " (not empty)" if low == 1 else f" (at least {low}{unit})"
    return f" ({low or 0} to {high}{unit})"


def _bounded(schema: Mapping[str, Any]) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    if "exclusiveMinimum" in schema:
        return f" above {schema['exclusiveMinimum']:g}, at most {high:g}"
    if "exclusiveMaximum" in schema:
        return f" {_number(low or 0)} to {_number(schema['exclusiveMaximum'])} - 1"
    if high is not None:
        return f" {_number(low or 0)} to {_number(high)}"
    return "" if low is None else f" {low:g} or more"


def _number(value: float) -> str:
    for power in (2**63, -(2**63)):
        if value == power:
            return "-2^63" if power < 0 else "2^63"
    return f"{value:g}"


def openai_no_effect_table() -> str:
    """Return the members of OpenAI's bodies that are accepted and change nothing."""
    return ", ".join(f"`{name}`" for name in SamplingBody.NO_EFFECT) + ".\n"


def metrics_table() -> str:
    """Return the families of `/metrics`: name, kind, labels, meaning."""
    lines = ["| name | kind | labels | meaning |\n|---|---|---|---|\n"]
    for family in FAMILIES:
        kind = type(family).__name__.lower()
        name = f"{family.name}_total" if kind == "counter" else family.name
        labels = ["`model_name`"] * family.name.startswith(VLLM_PREFIX) + [f"`{family.label}`"] * bool(family.label)
        lines.append(f"| `{name}` | {kind} | {', '.join(labels)} | {family.summary} |\n")
    return "".join(lines)


def _subclasses(*bases: type[errors.InferenceApiError]) -> Iterator[type[errors.InferenceApiError]]:
    """Yield every class below `bases`, at any depth."""
    for base in bases:
        for child in base.__subclasses__():
            yield child
            yield from _subclasses(child)


TABLES: dict[str, Callable[[], str]] = {
    "parameters": parameters_table,
    "errors": errors_table,
    "metrics": metrics_table,
    "openai_members": openai_members_table,
    "embeddings_members": embeddings_members_table,
    "openai_no_effect": openai_no_effect_table,
}
PAGES = ("README.md", "docs/frontend.md", "docs/clients.md", "docs/metrics.md")
_BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def fresh_page(text: str) -> str:
    """Return a page with each of its tables written anew; raises KeyError for a name that no table has."""
    return _BLOCK.sub(lambda block: block[1] + TABLES[block[2]]() + block[3], text)


def main() -> int:
    """Write or check the pages; return the exit status."""
    pages = {SETTINGS_PATH: settings_page()}
    pages |= {ROOT / name: fresh_page((ROOT / name).read_text("utf-8")) for name in PAGES}
    stale = [path for path, text in pages.items() if path.read_text("utf-8") != text]
    if "--check" in sys.argv[1:]:
        for path in stale:
            sys.stderr.write(f"{path.relative_to(ROOT)} is stale: run python scripts/generate_docs.py\n")
        return 1 if stale else 0
    for path in stale:
        path.write_text(pages[path], "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
