"""Records a case with the package of any source tree, and compares two recordings."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path


ROOT = Path(__file__).resolve().parents[2]
TRAINING = Path(__file__).with_name("training.py")


def record_case(name: str, tree: Path) -> dict[str, list]:
    """Train a case with the package in `tree`, in a process of its own.

    Args:
        name (`str`): A case of `training.CASES`.
        tree (`Path`): The folder that contains `trl_dataeff`.

    Returns:
        What the training did: see `training.train_case`.

    Raises:
        SystemExit: If the training fails.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        # Sums of floats depend on the number of threads
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    with tempfile.TemporaryDirectory() as output:
        # -P keeps the folder of the script out of the import path
        command = [sys.executable, "-P", str(TRAINING), name, output]
        run = subprocess.run(command, env=environment, capture_output=True, text=True)
        if run.returncode != 0:
            sys.exit(f"'{name}' failed with the package in {tree}:\n{run.stderr[-2000:]}")
        return json.loads((Path(output) / "recorded.json").read_text(encoding="utf-8"))


def first_difference(before: dict[str, list], now: dict[str, list]) -> str | None:
    """Describe where two recordings of a case differ for the first time.

    Args:
        before (`dict[str, list]`): What the earlier package did.
        now (`dict[str, list]`): What the present one did.

    Returns:
        A sentence, or `None` if they are equal.
    """
    for part, earlier_values in before.items():
        present_values = now[part]
        if len(earlier_values) != len(present_values):
            return f"DIFFERENT: {len(earlier_values)} of '{part}' before, {len(present_values)} now"
        for i, (earlier, present) in enumerate(zip(earlier_values, present_values, strict=True)):
            if earlier != present:
                return f"DIFFERENT: '{part}' {i}: {earlier} before, {present} now"
    return None
