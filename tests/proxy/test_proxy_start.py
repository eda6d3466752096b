"""Check what the proxy looks at before it starts, and before it renews its worker."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from proxy import proxy
from proxy.config import Settings, read_settings
from proxy.located_json import FileFault

ROOT = Path(__file__).parents[2]
CLOSED = """
import os, socket
for descriptor in range(3):
    os.close(descriptor)
from proxy.proxy import hold_standard_descriptors
hold_standard_descriptors()
sock = socket.socket()
same = all(os.path.samestat(os.fstat(number), os.stat(os.devnull)) for number in range(3))
os._exit(0 if same and sock.fileno() > 2 else 1)
"""


@pytest.fixture
def settings() -> Settings:
    return read_settings({"JWT_SECRET": "0123456789abcdef0123456789abcdef"}, port=0, upstream_url="http://127.0.0.1:1")


def test_an_issuer_that_is_silent_stops_a_renewal_and_no_start(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy, "Access", lambda *_: SimpleNamespace(published_fault=None, has_keys=False))
    proxy.check_start(settings)
    with pytest.raises(FileFault, match="cannot be fetched"):
        proxy.check_start(settings, is_renewal=True)
    monkeypatch.setattr(proxy, "Access", lambda *_: SimpleNamespace(published_fault=None, has_keys=True))
    proxy.check_start(settings, is_renewal=True)


def test_closed_standard_descriptors_are_no_clients_sockets() -> None:
    assert subprocess.run([sys.executable, "-c", CLOSED], cwd=ROOT, check=False).returncode == 0
