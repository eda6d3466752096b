"""Own the run folder of a service: its lock, the internal key, the link to the model image, the restart count.

Made and removed by the supervisor, read by every other process. The folder may be one that holds other things: only
this module's own names are ever removed from it. Knows no process and no socket.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import secrets
from pathlib import Path
from typing import IO

from inference_api.config import Settings
from inference_api.errors import SettingError
from inference_api.queues import make_private_dir

logger = logging.getLogger(__name__)


class RunDir:
    """The run folder of one service, from `take` to `give_back`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock: IO[str] | None = None
        self._path = settings.run_path

    def take(self) -> None:
        """Make the folder, lock it against a second service, make the internal key if the settings name none.

        Raises SettingError if the folder, the lock or a key file that the settings name cannot be had.
        """
        try:
            make_private_dir(self._path)
            self._lock = (self._path / "lock").open("w")
        except OSError as error:
            raise SettingError(f"INFERENCE_API_RUN_DIR cannot be used: {error}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            self._lock = None
            raise SettingError(f"another service runs in {self._path}; stop it, or set INFERENCE_API_RUN_DIR") from None
        settings = self._settings
        if settings.internal_auth_key_file and not settings.internal_auth_key and not settings.key_path.is_file():
            raise SettingError(f"INTERNAL_AUTH_KEY_FILE={settings.key_path} is not there")
        if not settings.internal_auth_key and not settings.internal_auth_key_file:
            try:
                settings.key_path.unlink(missing_ok=True)
                settings.key_path.touch(mode=0o600)
                settings.key_path.write_text(secrets.token_hex(32))
            except OSError as error:
                raise SettingError(f"INFERENCE_API_RUN_DIR cannot be written: {error}") from None
        self.write_failed_restarts(0)

    def link_image(self, image_path: Path) -> None:
        """Link the model image where every process looks for it."""
        self._settings.image_link.unlink(missing_ok=True)
        self._settings.image_link.symlink_to(image_path)

    def write_failed_restarts(self, count: int) -> None:
        """Tell the workers' health routes how often in a row the backend could not be started.

        On a full disk they keep what they were told before, and the service goes on.
        """
        partial = self._settings.state_path.with_suffix(".partial")
        try:
            partial.write_text(str(count))
            partial.replace(self._settings.state_path)
        except OSError as error:
            logger.warning("the count of failed restarts cannot be written: %s", error.strerror)
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)

    def give_back(self) -> None:
        """Remove this service's own names, and the folder if nothing else is in it; release the lock."""
        if self._lock is None:
            return
        own = [self._settings.socket_path, self._settings.image_link, self._settings.state_path, self._path / "lock"]
        if not self._settings.internal_auth_key_file:
            own.append(self._settings.key_path)
        for path in own:
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._path.rmdir()
        self._lock.close()
        self._lock = None
