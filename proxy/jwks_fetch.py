"""Own one fetch of an issuer's key set: `jwks_fetch.py URL [CA_FILE]` writes the document to standard output.

Runs as a child process of the proxy, a new one each time. TLS, name look-ups and slow answers can hold up a process in
ways that no time-out of a library ends; here an alarm ends the process instead, and nothing of a hostile answer stays
in the one that serves. It knows the URL and nothing else: no key, no policy, no environment. It imports no other module
of ours.
"""

from __future__ import annotations

import signal
import sys

import requests

TOTAL_SECONDS = 2.0
MAX_BYTES = 64 * 1024
NUM_ARGUMENTS = (2, 3)


class FetchFault(Exception):
    """Give the fetch up; the message is one line that says why."""


def fetch(url: str, ca_file: str | None) -> bytes:
    """Return the body of a 200 of at most 64 KiB; raise FetchFault. Blocks for as long as the alarm lets it."""
    with requests.Session() as session:
        # No .netrc, no proxy of the environment, no CA list of it: what is asked for is what the policy says.
        session.trust_env = False
        session.verify = ca_file or True
        headers = {"Accept": "application/jwk-set+json, application/json", "Accept-Encoding": "identity"}
        try:
            answer = session.get(url, headers=headers, timeout=TOTAL_SECONDS, allow_redirects=False, stream=True)
            body: bytes = answer.raw.read(MAX_BYTES + 1, decode_content=False)
        except requests.exceptions.SSLError:
            raise FetchFault("its certificate is not valid") from None
        except requests.Timeout:
            raise FetchFault("it did not answer in time") from None
        except Exception as fault:
            raise FetchFault(f"it gave no answer ({type(fault).__name__})") from None
        if answer.status_code != requests.codes.ok:
            raise FetchFault(f"it answered with status {answer.status_code}")
        if answer.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise FetchFault("it sent a compressed answer")
        if len(body) > MAX_BYTES:
            raise FetchFault(f"its answer is larger than {MAX_BYTES} bytes")
        return body


def main(arguments: list[str]) -> int:
    """Fetch once; return 0, or 1 after one line on standard error. Ends by SIGALRM when the time is over."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    signal.setitimer(signal.ITIMER_REAL, TOTAL_SECONDS)
    if len(arguments) not in NUM_ARGUMENTS:
        print("a URL is needed", file=sys.stderr)
        return 1
    try:
        body = fetch(arguments[1], arguments[2] if len(arguments) > NUM_ARGUMENTS[0] else None)
    except FetchFault as fault:
        print(fault, file=sys.stderr)
        return 1
    sys.stdout.buffer.write(body)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
