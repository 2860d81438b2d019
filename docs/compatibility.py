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
        "This page lists which features of TRL's `GRPOTrainer` were run with this package, and which tests run them. All tests use TRL 1.16, the CPU, "
        "and tiny models that are made in code. Nothing here was run on a GPU. [vLLM, several GPUs and scale](scaling.md) has advice for such runs.",
        states,
        'The column *everything off* is for `selection="uniform"` and `replay_fraction=0`. The other one is for replay and `dynamic_sampling`; a dash means '
        "that the row does not apply.",
    ]
    for title, rows in FEATURES.items():
        head = [f"## {title}\n", "| | everything off | replay, dynamic sampling | tests |", "|---|---|---|---|"]
        parts.append("\n".join([*head, *(_row(*row) for row in rows)]))
    parts.append(
        "`docs/compatibility.py` writes this page from the list that the tests use. A test checks that every named test exists."
    )
    return "\n\n".join(parts) + "\n"


def _row(name: str, off: str, on: str, tests: tuple[str, ...]) -> str:
    return f"| {name} | {off} | {on} | {', '.join(f'`{test}`' for test in tests) or '-'} |"


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")
