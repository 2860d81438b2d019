"""Golden runs: whether seeded trainings do the same to the last bit as with an earlier commit.

    python -m tests.golden COMMIT                all cases
    python -m tests.golden COMMIT --case NAME    one of them (may be repeated)
    python -m tests.golden COMMIT --jobs 2       two cases at a time

Each case (see `training.py`) trains a very small model twice on this machine: with the package of COMMIT and with that
of the working tree, each in a process of its own. The exit status is 1 if any case differs.
"""

import argparse
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.golden.comparison import ROOT, first_difference, record_case
from tests.golden.training import CASES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="The commit to compare with.")
    parser.add_argument("--case", choices=CASES, action="append", help="A case; by default all of them.")
    parser.add_argument("--jobs", type=int, default=1, help="How many cases run at a time.")
    options = parser.parse_args()

    names = options.case or list(CASES)
    any_difference = False
    with tempfile.TemporaryDirectory() as folder:
        earlier = Path(folder) / "earlier"
        earlier.mkdir()
        extract_package(options.commit, earlier)

        def compare(name: str) -> str | None:
            before = record_case(name, earlier)
            now = record_case(name, ROOT)
            return first_difference(before, now)

        with ThreadPoolExecutor(options.jobs) as executor:
            for name, difference in zip(names, executor.map(compare, names), strict=True):
                print(f"{name:<40}{difference or 'equal'}", flush=True)
                if difference is not None:
                    any_difference = True
    sys.exit(1 if any_difference else 0)


def extract_package(commit: str, folder: Path) -> None:
    """Write the package as of `commit` to `folder`."""
    archive = subprocess.run(
        ["git", "archive", commit, "trl_dataeff"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
    )
    subprocess.run(["tar", "-x"], cwd=folder, input=archive.stdout, check=True)


if __name__ == "__main__":
    main()
