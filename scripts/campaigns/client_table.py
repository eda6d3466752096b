"""List the real clients: the environment that each runs in, its program, and its snippets in docs/clients.md.

The versions stand in `pins/`, one file an environment. Imports nothing that runs.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Client:
    """A client: `program` is a module of campaigns.clients, or a file `.mjs` there for Node."""

    name: str
    environment: str
    program: str
    snippets: tuple[str, ...]
    """The marks `<!-- run: ... -->` of docs/clients.md."""
    on_mock_only: tuple[str, ...] = ()
    """Checks that tell nothing more on the real model, and take their time."""

    @property
    def is_javascript(self) -> bool:
        """Tell whether Node runs it."""
        return self.program.endswith(".mjs")


_ERRORS = ("wrong_jwt", "unknown_model", "context_overflow", "bad_parameter")

CLIENTS = (
    Client("openai", "clients", "openai_client", ("openai", "responses")),
    Client("anthropic", "clients", "anthropic_client", ("anthropic",)),
    Client("huggingface_hub", "clients", "hub_client", ("tgi",)),
    Client("langchain-openai", "clients", "langchain_client", ("langchain",)),
    # Each of its checks is a start of the program, which takes longer than the answer.
    Client("llm", "clients", "llm_client", ("llm",), (*_ERRORS, "tools_offered")),
    Client("pydantic-ai", "clients", "pydantic_ai_client", ("pydantic_ai",)),
    Client("openai-agents", "clients", "agents_client", ("agents",)),
    Client("litellm", "litellm", "litellm_client", ("litellm",)),
    Client("instructor", "instructor", "instructor_client", ("instructor",)),
    Client("openai for JavaScript", "javascript", "openai_client.mjs", ("openai_js",)),
    Client("AI SDK", "javascript", "ai_sdk_client.mjs", ("ai_sdk",)),
)
