"""`trl-dataeff fit-predictor`: groups of finished runs -> a predictor for `dots_predictor`, and a report."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_dataeff.cli.arguments import DataEfficientGRPOScriptArguments
from trl_dataeff.cli.command_parser import CommandParser, out_of_range
from trl_dataeff.cli.errors import UserError
from trl_dataeff.cli.sources import unwritable
from trl_dataeff.fields import Range
from trl_dataeff.utils import write_atomically


if TYPE_CHECKING:
    from trl_dataeff.difficulty.offline import Quality, Slice


EPILOG = """\
The groups are predicted from others of the same run and of nearby steps. A fifth of the prompts is held out, and the
report compares the predictions of their groups with two baselines. Runs of several models may be given, if all were on
this dataset.

example:
  trl-dataeff fit-predictor --groups out/dataeff/groups.parquet --dataset openai/gsm8k --dataset_config main \\
      --prompt_column question --embedding Qwen/Qwen2.5-0.5B-Instruct --output predictor
  trl-dataeff grpo --config recipe.yaml --dots_predictor predictor --dots_embedding Qwen/Qwen2.5-0.5B-Instruct
"""

SHAPE = ("dataset_config", "prompt_column", "prompt_template", "prompt_as_chat", "system_prompt")


def run(argv: list[str]) -> int:
    """Run the sub-command with what follows its name, and return its exit code."""
    args = _parser().parse_args(argv)
    output = Path(args.output).expanduser()
    if output.exists() and (not output.is_dir() or (any(output.iterdir()) and not args.force)):
        raise UserError(f"{args.output!r} exists already. Name another folder, or write into it with --force.")
    if (reason := unwritable(output)) is not None:
        raise UserError(f"`--output` is {args.output!r}, and {reason}. The predictor is written there.")
    if wrong := out_of_range(args, {"seed": Range(0, integer=True)}):
        raise UserError(*wrong)
    if args.embedding == "policy":
        raise UserError("`--embedding` is 'policy'. There is no policy here: give the id or the path of its model.")

    from datasets import Dataset
    from trl import DatasetMixtureConfig

    from trl_dataeff.cli.data import load_splits
    from trl_dataeff.difficulty.embedding import embed_dataset
    from trl_dataeff.difficulty.offline import fit_offline, read_slices

    shape = {name: getattr(args, name) for name in SHAPE}
    script = DataEfficientGRPOScriptArguments(dataset_name=args.dataset, **shape)
    (dataset,) = load_splits(script, DatasetMixtureConfig(), [args.dataset_split], ["dataset_split"])
    assert isinstance(dataset, Dataset)  # nothing is streamed here
    slices = read_slices(args.groups, len(dataset))
    predictor, quality = fit_offline(args.kind, embed_dataset(dataset, args.embedding), slices, args.seed)
    predictor.embedding = args.embedding
    predictor.save(output)
    text = report(args, slices, quality)
    write_atomically(output / "report.md", lambda path: path.write_text(text, encoding="utf-8"))
    print(text)
    print(f"Written to {output}. Train with it: --dots_predictor {output} --dots_embedding {args.embedding}")
    return 0


def report(args: argparse.Namespace, slices: Sequence[Slice], quality: Sequence[Quality]) -> str:
    """Return the report, in Markdown: the groups, and a row for each predictor."""
    table = "\n".join(
        f"| {row.name} | {row.pearson:.3f} | {row.mean_absolute_error:.3f} | {row.calibration_error:.3f} |"
        for row in quality
    )
    prompts = len({int(i) for piece in slices for i in piece.prompt_ids})
    return f"""\
# Predictor of success rates: {args.kind}

- groups: {", ".join(args.groups)} ({sum(len(piece.rates) for piece in slices)} groups of {prompts} prompts)
- dataset: {args.dataset}, embedded by {args.embedding}
- seed: {args.seed}

Groups of held-out prompts, a fifth of all, predicted from other groups of the same run and of nearby steps:

| predictor | Pearson | mean absolute error | calibration error |
|---|---|---|---|
{table}

Pearson is the mean over slices of a run. Calibration error is the expected one, in 10 bins of equal width.
"""


def _parser() -> CommandParser:
    parser = CommandParser(
        "trl-dataeff fit-predictor",
        description="Fit a success-rate predictor to the groups of finished runs.",
        epilog=EPILOG,
    )
    needed = parser.add_argument_group("required arguments")
    needed.add_argument(
        "--groups", nargs="+", required=True, metavar="FILE", help="the file dataeff/groups.parquet of each run"
    )
    needed.add_argument("--dataset", required=True, metavar="NAME", help="the runs' dataset: Hub id, folder or file")
    needed.add_argument(
        "--embedding",
        required=True,
        metavar="MODEL",
        help="id or path of the model that embeds the prompts (needs the extra `embeddings`)",
    )
    needed.add_argument(
        "--output", required=True, metavar="DIR", help="folder to write the predictor and report.md to"
    )
    parser.add_argument(
        "--kind", choices=("attention", "logistic"), default="attention", help="kind of predictor (default: attention)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="random seed of the held-out split and the fit (default: 0)"
    )
    parser.add_argument("--force", action="store_true", help="write to a folder that is not empty")
    shape = parser.add_argument_group("dataset fields, as in the runs' recipe")
    shape.add_argument("--dataset_split", metavar="NAME", default="train", help="dataset split (default: train)")
    for field in fields(DataEfficientGRPOScriptArguments):
        if field.name in SHAPE:
            kind: dict[str, Any] = {"action": "store_true"} if field.default is False else {"metavar": "VALUE"}
            shape.add_argument(f"--{field.name}", help=field.metadata["help"], **kind)
    return parser
