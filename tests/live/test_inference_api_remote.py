"""Watch 32 streams of a running service at once, one line each: redrawn in place on a terminal, reprinted elsewhere.

Runs under pytest, and as a program against any server: `test_inference_api_remote.py --url URL`. A thread a stream
reads; the main thread alone draws. A line shows the end of its text, since that is what moves.
"""

from __future__ import annotations

import http.client
import shutil
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Sequence
from typing import TextIO

from tests.live.client import Client, Stream, TargetError, spread, start_threads, text_of
from tests.live.program import FAILED_STATUS, connected_client, make_parser, positive, print_result, run_program
from tests.live.test_inference_api_load import PROMPTS_FILE, read_prompts

NUM_LINES = 32
DRAW_SECONDS, REPRINT_SECONDS = 0.1, 1.0
DEFAULT_SIZE = (120, 40)
_UP, _ERASE_LINE = "\x1b[{}A", "\x1b[2K"
"""ECMA-48 sections 8.3.22 and 8.3.41: move the cursor up, erase the line."""


class LiveLine:
    """One stream as its line shows it; written by the stream's thread, read by the one that draws."""

    def __init__(self, route: str) -> None:
        self._route = route
        self.state = "waiting"
        self.stream: Stream | None = None
        self.num_tokens = 0

    def follow(self, client: Client, prompt: str, max_tokens: int) -> None:
        """Send the prompt and read its answer to the end; blocks, and raises nothing."""
        try:
            with client.generate(prompt, max_tokens=max_tokens) as stream:
                self.stream, self.state = stream, "waiting" if stream.status == 200 else str(stream.status)
                while stream.read_chunk() is not None:
                    self.state = "running" if stream.status == 200 else str(stream.status)
            self.state = self._end_of(client, stream)
        except (OSError, http.client.HTTPException, ValueError, KeyError, TargetError) as error:
            self.state = f"failed: {type(error).__name__}"

    def _end_of(self, client: Client, stream: Stream) -> str:
        if stream.is_overloaded:
            return "refused"
        if stream.status != 200 or not stream.whole:
            return f"failed: {stream.status}{'' if stream.whole else ', cut'}"
        self.num_tokens = client.num_tokens(stream)
        return "done"

    @property
    def text(self) -> str:
        """The text so far."""
        return text_of(self._route, self.stream.body) if self.stream and self.stream.status == 200 else ""


def last_columns(text: str, num_columns: int) -> str:
    """Return the end of a text that fits into so many columns, without a character that would move the cursor."""
    shown: list[str] = []
    left = num_columns
    for character in reversed(text):
        visible = character if character.isprintable() else " "
        left -= 2 if unicodedata.east_asian_width(visible) in "WF" else int(not unicodedata.combining(visible))
        if left < 0:
            break
        shown.append(visible)
    return "".join(reversed(shown))


def frame(lines: Sequence[LiveLine], num_columns: int) -> list[str]:
    """Return one row of text a stream, each at most `num_columns` wide."""
    rows = []
    for index, line in enumerate(lines):
        head = f"{index:3d} {line.state:<8.24s} "
        # One column stays free: a terminal would wrap after the last one.
        rows.append((head + last_columns(line.text, max(0, num_columns - len(head) - 1)))[: num_columns - 1])
    return rows


class Display:
    """Draw frames over one another on a terminal, below one another elsewhere."""

    def __init__(self, out: TextIO, *, in_place: bool, size: Callable[[], tuple[int, int]]) -> None:
        """Write to `out`; `size` tells (columns, rows), which may change while it runs."""
        self._out, self._in_place, self._size = out, in_place, size
        self._num_drawn = 0

    def draw(self, lines: Sequence[LiveLine]) -> None:
        """Show the state of every stream; on a terminal of too few rows the last streams share one."""
        num_columns, num_rows = self._size()
        rows = frame(lines, num_columns)
        if not self._in_place:
            self._out.write("\n".join(rows) + "\n\n")
        else:
            room = max(1, num_rows - 3)
            if len(rows) > room:
                rows = [*rows[: room - 1], f"... and {len(rows) - room + 1} more"]
            up = _UP.format(self._num_drawn) if self._num_drawn else ""
            self._out.write(up + "".join(f"\r{_ERASE_LINE}{row}\n" for row in rows))
            self._num_drawn = len(rows)
        self._out.flush()


def follow_all(client: Client, lines: Sequence[LiveLine], prompts: Sequence[str], max_tokens: int) -> threading.Event:
    """Start a stream a line; return the event that is set when all have ended."""
    ended = threading.Event()
    lock = threading.Lock()
    num_open = len(lines)

    def follow(index: int) -> None:
        nonlocal num_open
        lines[index].follow(client, prompts[index % len(prompts)], max_tokens)
        with lock:
            num_open -= 1
            if num_open == 0:
                ended.set()

    start_threads(len(lines), follow)
    return ended


def totals(lines: Sequence[LiveLine], seconds: float) -> dict[str, object]:
    """Return how many streams ended how, and the figures of those that were answered."""
    done = [line for line in lines if line.state == "done"]
    num_tokens = sum(line.num_tokens for line in done)
    return {
        "streams": len(lines),
        "done": len(done),
        "overloaded": sum(line.state == "refused" for line in lines),
        "failed": sum(line.state.startswith("failed") for line in lines),
        "tokens": num_tokens,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(num_tokens / seconds, 1),
        "ttft_ms": spread([line.stream.ttft_seconds for line in done if line.stream and line.stream.chunks]),
    }


def run_display(client: Client, display: Display, num_lines: int, max_tokens: int, seconds: float) -> dict[str, object]:
    """Follow `num_lines` streams, drawing every so many seconds and once at the end; return the totals."""
    lines = [LiveLine(client.target.route) for _ in range(num_lines)]
    began = time.monotonic()
    ended = follow_all(client, lines, read_prompts(PROMPTS_FILE), max_tokens)
    while not ended.wait(seconds):
        display.draw(lines)
    display.draw(lines)
    return totals(lines, time.monotonic() - began)


def main(arguments: Sequence[str] | None = None) -> int:
    """Show the streams that the options describe; return the exit status."""
    parser = make_parser(__doc__)
    parser.add_argument("--lines", type=positive, default=NUM_LINES, help="streams at once (default: 32)")
    parser.add_argument("--max-tokens", type=positive, default=128, help="tokens an answer (default: 128)")
    parser.add_argument("--reprint", action="store_true", help="print frame under frame on a terminal too")
    options = parser.parse_args(arguments)
    in_place = sys.stdout.isatty() and not options.reprint
    seconds = DRAW_SECONDS if in_place else REPRINT_SECONDS
    display = Display(sys.stdout, in_place=in_place, size=lambda: shutil.get_terminal_size(DEFAULT_SIZE))
    with connected_client(options) as client:
        result = run_display(client, display, options.lines, options.max_tokens, seconds)
        print(f"{result['done']} done, {result['overloaded']} overloaded, {result['failed']} failed,", end=" ")
        print(f"{result['tokens']} tokens in {result['seconds']} s")
        print_result("remote", client, **result)
    return FAILED_STATUS if result["failed"] else 0


class Recorder(Display):
    """Keep the frames instead of drawing them."""

    def __init__(self) -> None:
        self.frames: list[list[str]] = []

    def draw(self, lines: Sequence[LiveLine]) -> None:
        """Keep the frame."""
        self.frames.append(frame(lines, 100))


def test_32_streams_are_shown_from_their_first_text_to_their_end(client: Client) -> None:
    recorder = Recorder()
    result = run_display(client, recorder, NUM_LINES, 48, 0.02)
    assert {len(rows) for rows in recorder.frames} == {NUM_LINES}
    assert len(recorder.frames) > 1
    assert result["done"] == NUM_LINES
    assert all(" done " in row for row in recorder.frames[-1])
    if client.counts_digits:
        assert all(row[-48:].isdigit() for row in recorder.frames[-1])
        assert result["tokens"] == NUM_LINES * 48


def test_a_text_is_cut_to_its_last_columns_and_cannot_move_the_cursor() -> None:
    assert last_columns("abcdef", 4) == "cdef"
    assert last_columns("a\nb\x1b[2Jc", 20) == "a b [2Jc"
    assert last_columns("漢字ab", 4) == "字ab"
    assert last_columns("漢字ab", 3) == "ab"
    assert last_columns("abc", 0) == ""


if __name__ == "__main__":
    sys.exit(run_program(main))
