"""Check `llm`, a program of the command line, as its user does: a model added by a file, its key by `llm keys`.

Each check is a run of the program. It cannot force a call; that it offers tools, and goes on when none is called, is
checked.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from campaigns.clients import checks
from campaigns.clients.checks import MODEL, expect

LLM = [sys.executable, "-m", "llm"]
SECONDS = 120
GREEDY = ("-o", "max_tokens", "16", "-o", "temperature", "0")
MODELS = """
- {{model_id: service, model_name: {model}, api_base: "{url}/v1", api_key_name: service, supports_schema: true,
   supports_tools: true}}
- {{model_id: stranger, model_name: {stranger}, api_base: "{url}/v1", api_key_name: service}}
- {{model_id: text, model_name: {model}, api_base: "{url}/v1", api_key_name: service, completion: true}}
- {{model_id: responses, model_name: {model}, api_base: "{url}/v1", api_key_name: service, responses: true}}
"""
FUNCTION = """
def get_weather(city: str) -> str:
    "Tells it."
    return "sunny"
"""


def llm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the program to its end."""
    return subprocess.run(
        [*LLM, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS, check=False
    )


def ask(*arguments: str, model: str = "service", prompt: str = checks.QUESTION) -> str:
    """Return what the program writes; raise Fault unless it ends well."""
    done = llm("--model", model, *arguments, prompt)
    expect(done.returncode == 0, done.stderr)
    return done.stdout


def expect_error(text: str, *arguments: str, prompt: str = "x") -> None:
    """Raise Fault unless the program ends with status 1 and our text."""
    done = llm(*arguments, prompt)
    expect(done.returncode == 1 and text in done.stderr, (done.returncode, done.stderr))


def streamed_and_whole_answer() -> None:
    """Stream an answer, which is the default, and ask for the same one whole, with the usage of both."""
    texts = set()
    for how in ((), ("--no-stream",)):
        done = llm("--model", "service", "--usage", *how, *GREEDY, checks.QUESTION)
        told = re.search(r"Token usage: (\d+) input, (\d+) output", done.stderr)
        expect(told and int(told[1]) > 0 and 0 < int(told[2]) <= 16, done.stderr)
        texts.add(done.stdout)
    expect(len(texts) == 1 and texts.pop().strip(), texts)


def text_and_responses() -> None:
    """Ask over the routes of texts and of responses."""
    for model, prompt in (("text", "Once upon a time"), ("responses", checks.QUESTION)):
        expect(ask(*GREEDY, model=model, prompt=prompt).strip(), model)


def next_turn() -> None:
    """Go on with the conversation that was had last."""
    expect(ask("--continue", *GREEDY, model="responses").strip(), "no answer")


def form() -> None:
    """Ask for a form."""
    said = json.loads(ask("--schema", json.dumps(checks.SUNNY), "-o", "max_tokens", "60"))
    expect(isinstance(said["sunny"], bool), said)


def tools_offered() -> None:
    """Offer a function that the model may call."""
    ask("--functions", FUNCTION, "-o", "max_tokens", "8")


def wrong_jwt() -> None:
    """Show a wrong JWT."""
    expect_error(checks.WRONG_JWT_TEXT, "--model", "service", "--key", checks.WRONG_JWT)


def unknown_model() -> None:
    """Name a model that is not served."""
    expect_error(checks.UNKNOWN_MODEL_TEXT, "--model", "stranger")


def context_overflow() -> None:
    """Send a prompt that is too long."""
    expect_error(checks.OVERFLOW_TEXT, "--model", "service", prompt=checks.TOO_LONG)


def bad_parameter() -> None:
    """Send a value that is out of bounds, which the program lets through."""
    expect_error("max_tokens", "--model", "service", "-o", "max_tokens", "-1")


def cancel() -> None:
    """Interrupt the program in the middle of an answer, as Ctrl-C does."""
    # A shell's background job ignores SIGINT, and what it starts would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    arguments = ["--model", "text", "-o", "max_tokens", str(checks.LONG_ANSWER_TOKENS), "-o", "temperature", "1"]
    command = [*LLM, *arguments, "Once upon a time"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        expect(process.stdout is not None and process.stdout.read(1), "no answer")
        checks.expect_row_freed(lambda: process.send_signal(signal.SIGINT))


def main() -> None:
    """Make the program's folder, with its models and its key, and run the checks."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LLM_USER_PATH"] = folder
        models = MODELS.format(model=MODEL, stranger=checks.UNKNOWN_MODEL, url=checks.BASE_URL)
        (Path(folder) / "extra-openai-models.yaml").write_text(models)
        llm("keys", "set", "service", "--value", checks.TOKEN)
        checks.run_checks(
            [
                streamed_and_whole_answer,
                text_and_responses,
                next_turn,
                form,
                tools_offered,
                wrong_jwt,
                unknown_model,
                context_overflow,
                bad_parameter,
                cancel,
            ]
        )


if __name__ == "__main__":
    main()
