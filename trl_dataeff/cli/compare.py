"""`trl-dataeff compare`: what several runs needed to reach the same accuracy."""

from __future__ import annotations

from trl_dataeff.cli.command_parser import CommandParser
from trl_dataeff.cli.errors import UserError
from trl_dataeff.cli.report import add_rollouts_per_step, read, save_figures, write_page


EPILOG = """\
Runs whose settings differ in the seed alone are taken together, with intervals over them. The first run's method is the
baseline of the ratios. Compare by held-out accuracy (`eval_strategy: steps`): the reward in training is that of the prompts
that were selected.

examples:
  trl-dataeff compare out/uniform-0 out/uniform-1 out/dots-0 out/dots-1 --output compare.html
  trl-dataeff compare plain ours --target 0.6 --markdown --rollouts_per_step 512
"""


def run(argv: list[str]) -> int:
    """Run the sub-command with what follows its name, and return its exit code."""
    args = _parser().parse_args(argv)
    from trl_dataeff.analysis.compare import compare, make_page, markdown, plain
    from trl_dataeff.tracking.drawing import check_library

    if args.target is not None and args.target != args.target:
        raise UserError("`--target` is nan; it takes a number.")
    result = compare([read(path, args.rollouts_per_step) for path in args.runs], args.metric, args.target)
    if args.output is not None or args.png is not None:
        check_library()
        page = make_page(result)
        save_figures(page, args.png)
        if args.output is not None:
            write_page(page, args.output)
    print(markdown(result) if args.markdown else plain(result))
    return 0


def _parser() -> CommandParser:
    parser = CommandParser(
        "trl-dataeff compare",
        description="Compare what several runs needed to reach the same accuracy.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", help="`output_dir` of a run, of this package or of plain TRL"
    )
    parser.add_argument(
        "--target", type=float, metavar="X", help="value to reach (default: the highest that all runs reach)"
    )
    parser.add_argument(
        "--metric",
        metavar="NAME",
        help="logged metric to compare (default: held-out reward, else the reward in training)",
    )
    parser.add_argument("--markdown", action="store_true", help="print a table for a pull request")
    parser.add_argument("--output", metavar="FILE", help="file to write a page with the curves to")
    parser.add_argument("--png", metavar="DIR", help="folder to write the figures to as PNG")
    add_rollouts_per_step(parser)
    return parser
