"""How the command prints errors of the user, and help for typing mistakes."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterable

from trl_dataeff.utils import UserError


__all__ = ["UserError", "closest", "listed", "show"]


def show(error: UserError) -> None:
    """Print a user's mistake on stderr, one line per problem; of several processes, only the first one prints it."""
    if os.environ.get("RANK", "0") != "0":
        return
    for message in error.messages:
        print(f"trl-dataeff: error: {message}", file=sys.stderr)


def closest(name: str, known: Iterable[str]) -> str:
    """Return `" Did you mean `x`?"` for the known names nearest to `name`, or an empty string if none is near."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    matches = [by_lower[match] for match in difflib.get_close_matches(name.lower(), list(by_lower), n=2, cutoff=0.6)]
    return f" Did you mean {' or '.join(f'`{match}`' for match in matches)}?" if matches else ""


def listed(names: Iterable[str]) -> str:
    """Return the names in backquotes, separated by commas."""
    return ", ".join(f"`{name}`" for name in names)
