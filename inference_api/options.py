"""Parse a command line so that a wrong one is answered by one line that names it and says where to look.

Used by the commands of this package: the supervisor's and `prepare`'s. Knows no option and no setting.
"""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

USAGE_STATUS = 2
"""Exit status of a command line that cannot be parsed, as argparse and the shell have it."""


class OneLineParser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line, and that takes no abbreviated option for the one meant."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        """Print `ERROR: …; see PROG --help` on stderr and exit with status 2."""
        self.exit(USAGE_STATUS, f"ERROR: {message}; see {self.prog} --help\n")
