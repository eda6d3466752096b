"""Let gunicorn log as the rest of the package does: same stream, same format, no exception's text.

Runs in PROCESS 1, in the arbiter before the fork: the workers inherit the set-up. gunicorn's own file, syslog and
dictionary options still work where somebody gives them.
"""

from __future__ import annotations

from typing import Any

from gunicorn.glogging import Logger

from inference_api.config import Settings
from inference_api.logs import set_up_logging


class GunicornLog(Logger):  # type: ignore[misc]  # gunicorn has no types
    """gunicorn's logger without a handler of its own for errors."""

    def setup(self, cfg: Any) -> None:
        """Set the process's logging up, and hand gunicorn's errors to it unless they have another place to go."""
        super().setup(cfg)
        set_up_logging(Settings.from_environ(), "server", quote_errors=False)
        if cfg.errorlog == "-":
            for handler in [handler for handler in self.error_log.handlers if getattr(handler, "_gunicorn", False)]:
                self.error_log.removeHandler(handler)
            self.error_log.propagate = True
