"""`python -m examples.quickstart`: prepare, measure, train with `trl-dataeff grpo`, measure, summarise."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any


RECIPES = "SmolLM2-135M-Instruct/short_answers"
DEFAULT = "dots"
FOLDER = Path("quickstart")
MODEL = FOLDER / "SmolLM2-135M-Instruct"
TRAIN = FOLDER / "data" / "train.jsonl"
HELD_OUT = FOLDER / "data" / "held_out.jsonl"

#: glibc returns large blocks to the system at once, and then requests them again; keeping them took a sixth off the
#: CPU time of a step. Threads of OpenMP that wait in a loop take the other process's turn on a busy machine: a step
#: took four times as long. Other systems ignore these.
ENVIRONMENT = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**36),
    "MALLOC_TOP_PAD_": str(2**28),
    "OMP_WAIT_POLICY": "PASSIVE",
}


def main(argv: list[str] | None = None) -> int:
    """Run the quickstart and return its exit code."""
    args, overrides = _parser().parse_known_args(argv)
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    # A newcomer cannot act on the libraries' future warnings; the command inherits this setting
    os.environ.setdefault("PYTHONWARNINGS", "ignore::FutureWarning")
    warnings.simplefilter("ignore", FutureWarning)
    try:
        prepare()
        if args.prepare_only:
            print(f"Ready: the model is in {MODEL}, the data in {TRAIN.parent}.")
            return 0
        return train_and_sum_up(args.recipe, overrides, measured=not args.no_measuring)
    except (FileNotFoundError, ImportError) as error:
        print(f"quickstart: error: {error}", file=sys.stderr)
        return 1


def prepare() -> None:
    """Convert the weights and write the questions, unless they exist already."""
    from examples.quickstart.tasks import make_questions, write_jsonl

    if not (MODEL / "config.json").is_file():
        from examples.quickstart.weights import convert, find_gguf

        _say(f"Converting the weights of SmolLM2-135M-Instruct, once, into {MODEL}")
        convert(find_gguf(), MODEL)
    if not (TRAIN.is_file() and HELD_OUT.is_file()):
        _say(f"Making questions, in {TRAIN.parent}")
        train, held_out = make_questions()
        write_jsonl(TRAIN, train)
        write_jsonl(HELD_OUT, held_out)


def train_and_sum_up(recipe: str, overrides: list[str], measured: bool) -> int:
    """Train with a recipe of the quickstart, and print a summary."""
    from examples.quickstart.summary import by_pass, render_success, render_training
    from trl_dataeff.cli.grpo import parse
    from trl_dataeff.tracking.files import GROUPS_FILE, METRICS_FILE, read_groups, read_metrics
    from trl_dataeff.utils import UserError

    command = ["grpo", "--config", f"{RECIPES}/{recipe}", *overrides]
    try:
        config = parse(command[1:]).training
    except UserError as error:
        for message in error.messages:
            print(f"quickstart: error: {message}", file=sys.stderr)
        return error.exit_code
    output_dir = Path(config.output_dir)
    if config.resume_from_checkpoint is None:
        remove_checkpoints(output_dir)
    sampling = {"max_completion_length": config.max_completion_length, "temperature": config.temperature}

    before = _success(None, sampling) if measured else None
    _say(f"Training: {_shown(command)}")
    start = time.monotonic()
    code = run_to_its_end([sys.executable, "-m", "trl_dataeff.cli.main", *command])
    if code != 0:
        return code
    seconds = time.monotonic() - start
    after = _success(output_dir, sampling) if measured else None

    logs = read_metrics(output_dir / METRICS_FILE)
    prompts = _lines(TRAIN)
    try:
        passes = by_pass(logs, read_groups(output_dir / GROUPS_FILE).to_pandas(), prompts)
    except ValueError as error:
        print(f"quickstart: error: {error}", file=sys.stderr)
        return 1
    print(render_training(passes, logs[-1]["step"], prompts, seconds))
    if measured:
        print(render_success(before, after, _lines(HELD_OUT)))
    print(f"\nModel      {output_dir}  (a LoRA adapter)")
    print(next_steps(recipe))
    return 0


def run_to_its_end(command: list[str]) -> int:
    """Run a command and return its exit code.

    On Ctrl-C, which the terminal sends to the command too, and on SIGTERM, which is passed on, the command saves a
    checkpoint, and this process waits for it.
    """
    with subprocess.Popen(command, env={**ENVIRONMENT, **os.environ}) as process:

        def pass_on(number: int, frame: Any) -> None:
            process.send_signal(number)

        previous = {
            signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN),
            signal.SIGTERM: signal.signal(signal.SIGTERM, pass_on),
        }
        try:
            return process.wait()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def remove_checkpoints(output_dir: Path) -> None:
    """Remove the checkpoints of an earlier run, which could not be told from those of this one."""
    for checkpoint in output_dir.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)


def next_steps(recipe: str) -> str:
    """Return what to try after a run with `recipe`."""
    methods = {
        "dots": "selection and replay",
        "uniform": "plain GRPO, faster update",
    }
    lines = ["", "Next"]
    for other, words in methods.items():
        if other != recipe:
            lines.append(f"  {words:34}{_python()} -m examples.quickstart --recipe {other}")
    copy = ["recipes", "copy", f"{RECIPES}/{recipe}", "recipe.yaml"]
    lines += [
        f"  a recipe of your own              {_shown(copy)}",
        f"                                    {_shown(['grpo', '--config', 'recipe.yaml'])}",
        f"  the recipes for larger models     {_shown(['recipes', 'list'])}",
    ]
    return "\n".join(lines)


def _success(adapter: Path | None, sampling: dict[str, Any]) -> dict[str, float]:
    """Success rates on the held-out questions; those of the untrained model are kept for the next run."""
    from examples.quickstart.evaluate import measure

    if adapter is not None:
        return measure(MODEL, adapter, HELD_OUT, "Success after training", **sampling)
    kept = FOLDER / "data" / "before.json"
    if kept.is_file():
        saved = json.loads(kept.read_text(encoding="utf-8"))
        if saved["sampling"] == sampling:
            return saved["success"]
    rates = measure(MODEL, None, HELD_OUT, "Success before training", **sampling)
    kept.write_text(json.dumps({"sampling": sampling, "success": rates}), encoding="utf-8")
    return rates


def _lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def _shown(command: list[str]) -> str:
    """The command as a user types it here."""
    name = "trl-dataeff"
    beside_python = Path(sys.executable).parent / name
    if shutil.which(name) is None and beside_python.exists():
        name = _relative(beside_python)
    return " ".join([name, *command])


def _python() -> str:
    if shutil.which("python") == sys.executable:
        return "python"
    return _relative(Path(sys.executable))


def _relative(path: Path) -> str:
    here = Path.cwd()
    if path.is_relative_to(here):
        return str(path.relative_to(here))
    return str(path)


def _say(text: str) -> None:
    print(f"\n==> {text}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.quickstart",
        description="Fine-tune SmolLM2-135M-Instruct on the CPU, in a few minutes. Everything is in ./quickstart.",
        epilog="Every other argument goes to `trl-dataeff grpo`, for instance --max_steps 5.",
        allow_abbrev=False,
    )
    parser.add_argument("--recipe", default=DEFAULT, help=f"method of {RECIPES}: {DEFAULT} or uniform")
    parser.add_argument("--prepare-only", action="store_true", help="make the model and the data, and stop")
    parser.add_argument(
        "--no-measuring", action="store_true", help="leave out the held-out questions before and after training"
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
