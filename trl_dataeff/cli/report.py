"""`trl-dataeff report`: what runs did, as one HTML page and a table in the terminal."""

from __future__ import annotations

import argparse
from pathlib import Path

from trl_dataeff.utils import UserError


EXAMPLES = """\
The page opens from disk and loads nothing. Figures need matplotlib: pip install matplotlib.
Runs of plain TRL are read from the `trainer_state.json` of their latest checkpoint.

examples:
  trl-dataeff report out
  trl-dataeff report out/default out/grpo --rollouts_per_step 64
"""


def run(argv: list[str]) -> int:
    """Run the sub-command with what follows its name, and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="trl-dataeff report",
        description="Write an HTML page that shows what one or several runs did, and print a summary.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="`output_dir` of a run")
    parser.add_argument(
        "--output", metavar="FILE", help="file of the page (default: dataeff/report.html of the first run)"
    )
    parser.add_argument(
        "--rollouts_per_step", type=int, metavar="N", help="completions of an optimizer step, for runs of plain TRL"
    )
    args = parser.parse_args(argv)
    if args.rollouts_per_step is not None and args.rollouts_per_step < 1:
        raise UserError(f"`--rollouts_per_step` is {args.rollouts_per_step}; it takes an integer >= 1.")

    from trl_dataeff.analysis.recorded import read_run
    from trl_dataeff.analysis.report import make_page, summary

    runs = [read_run(path, args.rollouts_per_step) for path in args.runs]
    output = Path(args.output or runs[0].path / "dataeff" / "report.html")
    page = make_page(runs)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(page, encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"{output} cannot be written ({error}). Give another file: `--output FILE`.") from error
    print(summary(runs))
    print(f"Report: {output}")
    return 0
