"""Run the real proxy with a clock that stands still: `proxy_at.py [options of proxy.py] UNIX_SECONDS`.

Vectors are signed for one moment. Nothing but the clock that bearers are judged by is another than in proxy/proxy.py.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

# Started as a script, Python puts this folder first, where some modules have the names of libraries.
sys.path[0] = str(Path(__file__).resolve().parents[2])

import proxy.proxy  # noqa: E402


class StandingProxy(proxy.proxy.ProxyApplication):
    """Build the app with the clock of the command line."""

    def load(self) -> Any:
        """Build the app, in the worker."""
        from proxy.app import create_app

        moment = float(sys.argv[-1])
        return create_app(self.settings, lambda: moment)


if __name__ == "__main__":
    proxy.proxy.ProxyApplication = StandingProxy  # type: ignore[misc]
    sys.exit(proxy.proxy.main(sys.argv[1:-1]))
