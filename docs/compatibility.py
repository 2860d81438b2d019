"""
The table on docs/compatibility.md, from the list that the tests check.

    python docs/compatibility.py            # prints the page
    python docs/compatibility.py --write    # writes it
"""

from __future__ import annotations

import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.factories.compatibility import FEATURES, STATES


PAGE = Path(__file__).with_name("compatibility.md")


def page() -> str:
    """The whole page, as Markdown."""
    states = "\n".join(f"- **{state}**: {meaning}" for state, meaning in STATES.items())
    parts = [
        "# Compatibility",
        "What of TRL's `GRPOTrainer` was run with this package, in which way, and by which test. TRL 1.16, on the CPU, with models made in code. "
        "This page is written by `docs/compatibility.py` from the tests' own list, and a test checks that every named test exists.",
        states,
    ]
    for title, rows in FEATURES.items():
        head = [f"## {title}\n", "| | everything off | replay, dynamic sampling | tests |", "|---|---|---|---|"]
        parts.append("\n".join([*head, *(_row(*row) for row in rows)]))
    return "\n\n".join(parts) + "\n"


def _row(name: str, off: str, on: str, tests: tuple[str, ...]) -> str:
    return f"| {name} | {off} | {on} | {', '.join(f'`{test}`' for test in tests) or '-'} |"


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")
