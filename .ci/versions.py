"""
Runs the tests that depend on TRL and Transformers with several versions of them, each in a fresh environment in
`build/versions`, and writes the table `docs/versions.md`.

    python .ci/versions.py                  # all rows
    python .ci/versions.py lowest newest    # these rows, by name; the others keep their last result
    python .ci/versions.py 1.17.0           # a version of TRL, with the newest of everything else

Needs Python 3.11 or newer. `TORCH` names the torch to install (see the Makefile), except in the row `lowest` if it is
`lowest`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import xml.etree.ElementTree as ElementTree
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "versions"
TABLE = ROOT / "docs" / "versions.md"
NOT_STARTED = "did not start"
TORCH = os.environ.get("TORCH", "torch==2.13.0")
#: What is installed beside the package, by row. TRL 1.15.0 is not among them: it trains on GPUs alone
ROWS = {
    "lowest": [],  # see `lower_bounds`
    "TRL 1.14.2": ["trl==1.14.2"],
    "Transformers 5.17": ["trl==1.16.0", "transformers==5.17.0", "datasets<5"],  # the newest for vLLM 0.31 and Unsloth
    "newest": [],
}
TESTS = [
    "tests/test_compat.py",
    "tests/test_identity.py",
    "tests/compact",
    "tests/replay/test_replay_in_training.py",
    "tests/checkpoint/test_exact_resume.py",
    "tests/distributed/test_processes.py",
    "tests/selection/test_plug_in.py",
]
#: jmespath: TRL needs it for tools with Transformers below 5.13
TOOLS = ["pytest>=8.3", "pytest-xdist>=3.6", "hypothesis>=6.120", "grimp>=3.5", "jmespath"]
INTRODUCTION = """\
# Versions

<!-- Written by `make test-versions`. -->

The tests that depend on TRL ran on a CPU with each row's versions. *lowest* has the lowest ones that the package \
allows, except for torch. Tests that a version cannot run are left out, such as sharding with Transformers 5.3. With \
Transformers below 5.13, tools need the package `jmespath`. The loss of TRL 1.15.0 needs Triton, and so a GPU. CI \
tests other versions of Python. From Transformers 5.23 on, `gradient_checkpointing` is called \
`activation_checkpointing`, and both names work.
"""
SHOWN = ["trl", "transformers", "datasets", "accelerate", "peft", "torch", "pyarrow", "safetensors", "numpy"]


def lower_bounds() -> list[str]:
    """The lowest versions that `pyproject.toml` allows; of torch only if `TORCH` is `lowest`."""
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    bounds = []
    for dependency in dependencies:
        if TORCH == "lowest" or not dependency.startswith("torch"):
            bounds.append(dependency.replace(">=", "=="))
    return bounds


def run(row: str) -> dict[str, str]:
    """The versions that a row installs, and the result of its tests."""
    folder = FOLDER / re.sub(r"\W+", "-", row.lower())
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    pins = lower_bounds() if row == "lowest" else ROWS.get(row, [f"trl=={row}"])
    install = [python, "-m", "pip", "install", "--quiet"]
    # torch first: as a dependency it would come as the newest build for CUDA
    if TORCH != "lowest":
        subprocess.run([*install, TORCH], check=True)
    subprocess.run([*install, *TOOLS, *pins, "--editable", str(ROOT)], check=True)
    listed = subprocess.run([python, "-m", "pip", "list", "--format", "json"], capture_output=True, check=True)
    installed = {package["name"].lower(): package["version"] for package in json.loads(listed.stdout)}
    report = folder / "report.xml"
    pytest = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "auto", "--dist", "worksteal"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([*pytest, f"--junit-xml={report}", *TESTS], cwd=ROOT, env=environment, check=False)
    result = {"python": f"{sys.version_info.major}.{sys.version_info.minor}"}
    for name in SHOWN:
        result[name] = installed.get(name, "")
    result["passed"] = summary(report)
    return result


def summary(report: Path) -> str:
    """`"115 of 115"`, from the file that pytest writes; skipped tests are left out."""
    if not report.exists():
        return NOT_STARTED
    suite = next(ElementTree.parse(report).iter("testsuite"))
    run_tests = int(suite.get("tests", 0)) - int(suite.get("skipped", 0))
    failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    return f"{run_tests - failed} of {run_tests}"


def rows_of_table() -> dict[str, str]:
    """The lines of the table as it is, by the name of the row."""
    if not TABLE.exists():
        return {}
    lines = [line for line in TABLE.read_text().splitlines() if line.startswith("| ")]
    rows = {}
    for line in lines[1:]:  # without the header
        name = line.split(" | ")[0].removeprefix("| ")
        rows[name] = line
    return rows


def all_passed(result: dict[str, str]) -> bool:
    if result["passed"] == NOT_STARTED:
        return False
    passed, total = result["passed"].split(" of ")
    return passed == total


def main(names: list[str]) -> int:
    rows = rows_of_table()
    exit_code = 0
    for name in names or ROWS:
        result = run(name)
        rows[name] = f"| {' | '.join([name, *result.values()])} |"
        header = f"| versions | {' | '.join(result)} |\n{'|---' * (len(result) + 1)}|"
        TABLE.write_text("\n".join([INTRODUCTION, header, *rows.values()]) + "\n")
        print(header, rows[name], sep="\n", flush=True)
        if not all_passed(result):
            exit_code = 1
    return exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
