"""Say of every endpoint what the OpenAPI document shows beyond its path: what it parses and what it answers with.

Runs in PROCESS 1, when the application is made. One table, so that a route without an entry is found at the start.
"""

from __future__ import annotations

from collections.abc import Mapping

from inference_api.server.anthropic.bodies import ConversationBody, MessagesBody
from inference_api.server.api_docs.document import EVENTS, JSON, TEXT_PLAIN, Described
from inference_api.server.embeddings import EmbeddingsBody
from inference_api.server.openai.bodies import ChatBody, CompletionBody
from inference_api.server.openai_responses.bodies import ResponsesBody
from inference_api.server.tgi.bodies import GenerateBody
from inference_api.server.tokenization import ContentBody, DetokenizeBody, InputsBody, PromptBody, TemplateBody
from inference_api.server.tokenization import MessagesBody as ConversationToTokenize

_BOTH = (JSON, EVENTS)
_TGI_FAULTS = ("422", "424", "429")
_HEALTH = Described("health", (TEXT_PLAIN,), is_open=True)

DESCRIBED: Mapping[str, Described] = {
    "health.root": _HEALTH,
    "health.health": _HEALTH,
    "health.live": _HEALTH,
    "health.ready": _HEALTH,
    "native.inference": Described("native", (EVENTS,), native=True),
    "native.predictions": Described("native", (EVENTS,), native=True, native_rag=True),
    "native.chat": Described("native", (EVENTS,), native=True, native_rag=True),
    "openai.chat": Described("OpenAI", _BOTH, (ChatBody,)),
    "openai.completions": Described("OpenAI", _BOTH, (CompletionBody,)),
    "embeddings.embed": Described("OpenAI", bodies=(EmbeddingsBody,)),
    "openai.models": Described("OpenAI"),
    "openai.model": Described("OpenAI"),
    "openai_responses.create": Described("OpenAI", _BOTH, (ResponsesBody,)),
    "openai_responses.retrieve": Described("OpenAI"),
    "openai_responses.cancel": Described("OpenAI"),
    "anthropic.messages": Described("Anthropic", _BOTH, (MessagesBody,), faults=("529",)),
    "anthropic.count_tokens": Described("Anthropic", bodies=(ConversationBody,)),
    "tgi.generate": Described("TGI", bodies=(GenerateBody,), faults=_TGI_FAULTS),
    "tgi.generate_stream": Described("TGI", (EVENTS,), (GenerateBody,), faults=_TGI_FAULTS),
    "root.answer": Described("TGI", _BOTH, (GenerateBody,), faults=_TGI_FAULTS, takes_text=True),
    "tokenization.tokenize": Described("tokens", bodies=(PromptBody, ConversationToTokenize, ContentBody, InputsBody)),
    "tokenization.detokenize": Described("tokens", bodies=(DetokenizeBody,)),
    "tokenization.apply_template": Described("tokens", bodies=(TemplateBody,)),
    "llama_cpp.slots": Described("service"),
    "llama_cpp.props": Described("service"),
    "inspection.rows": Described("service"),
    "inspection.info": Described("service"),
    "inspection.get_request": Described("service"),
    "inspection.delete_request": Described("service", status="202"),
    "inspection.metrics": Described("service", (TEXT_PLAIN,)),
    "api_docs.document": Described("service", is_open=True),
    "api_docs.page": Described("service", ("text/html",), is_open=True),
    "api_docs.asset": Described("service", ("text/css", "text/javascript"), is_open=True),
}
