"""`trl-dataeff report`: what a run did, as one HTML page and a summary in the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trl_dataeff.cli.command_parser import CommandParser
from trl_dataeff.cli.errors import UserError, closest, listed


if TYPE_CHECKING:
    from collections.abc import Sequence

    from trl_dataeff.analysis.page import Page
    from trl_dataeff.tracking.recorded import RecordedRun

EPILOG = """\
The page opens from disk and loads nothing. Figures need matplotlib: pip install matplotlib.
Runs of plain TRL are read from the `trainer_state.json` of their last checkpoint; what they did not record is left out.

examples:
  trl-dataeff report out
  trl-dataeff report out --by level --by source --output report.html --png figures
"""


def run(argv: list[str]) -> int:
    """Run the sub-command with what follows its name, and return its exit code."""
    args = _parser().parse_args(argv)
    from trl_dataeff.analysis.report import make_page, summary
    from trl_dataeff.tracking.drawing import check_library

    recorded = read(args.run, args.rollouts_per_step)
    _check_columns(recorded, args.by)
    check_library()
    page = make_page(recorded, args.by)
    output = write_page(page, args.output or default_output(recorded.path))
    save_figures(page, args.png)
    print("\n".join(summary(recorded)))
    print(f"Report: {output}")
    return 0


def read(path: str, rollouts_per_step: int | None) -> RecordedRun:
    """A run; what is wrong with it is a [`UserError`]."""
    from trl_dataeff.tracking.recorded import read_run

    if rollouts_per_step is not None and rollouts_per_step < 1:
        raise UserError(f"`--rollouts_per_step` is {rollouts_per_step}; it takes an integer >= 1.")
    return read_run(path, rollouts_per_step)


def default_output(folder: Path) -> Path:
    """In the run's folder. A checkpoint stays as it is: its report is beside it, named after it."""
    folder = folder.absolute()
    if folder.name.startswith("checkpoint-") and (folder / "trainer_state.json").is_file():
        return folder.parent / "dataeff" / f"report-{folder.name}.html"
    return folder / "dataeff" / "report.html"


def write_page(page: Page, output: str | Path) -> Path:
    """Write the page; a file that cannot be written is a [`UserError`]."""
    path = Path(output)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page.html(), encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error}). Give another file: `--output FILE`.") from error
    return path


def save_figures(page: Page, folder: str | None) -> None:
    """Each figure as PNG, if a folder is given."""
    from trl_dataeff.tracking.drawing import save_png

    if folder is None:
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for plot in page.plots:
            save_png(plot, Path(folder, f"{plot.name}.png"))
    except OSError as error:
        raise UserError(f"Figures cannot be written to {folder} ({error}).") from error


def _check_columns(recorded: RecordedRun, by: Sequence[str] | None) -> None:
    if not by:
        return
    if recorded.prompts is None or recorded.groups is None or not len(recorded.groups):
        raise UserError(
            "`--by` needs `dataeff/prompts.parquet` and `dataeff/groups.parquet`, which runs of `DataEfficientGRPOTrainer` write."
        )
    known = [name for name in recorded.prompts.column_names if name not in ("prompt", "prompt_id")]
    for column in by:
        if column not in known:
            raise UserError(
                f"`--by {column}`: the dataset has no such column.{closest(column, known)} It has {listed(known) or 'none'}."
            )


def _parser() -> CommandParser:
    parser = CommandParser(
        "trl-dataeff report",
        description="Write an HTML page that shows what a run did, and print a summary.",
        epilog=EPILOG,
    )
    parser.add_argument("run", metavar="RUN", help="`output_dir` of a run")
    parser.add_argument(
        "--output", metavar="FILE", help="file to write the page to (default: RUN/dataeff/report.html)"
    )
    parser.add_argument("--png", metavar="DIR", help="folder to write each figure to as PNG")
    parser.add_argument(
        "--by",
        action="append",
        metavar="COLUMN",
        help="column of the dataset for a map of success rates; may be repeated (default: the first columns with few values)",
    )
    add_rollouts_per_step(parser)
    return parser


def add_rollouts_per_step(parser: CommandParser) -> None:
    """Add the option of every command that reads runs."""
    parser.add_argument(
        "--rollouts_per_step",
        type=int,
        metavar="N",
        help="completions of an optimizer step on all processes, which plain TRL does not log",
    )
