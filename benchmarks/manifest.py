"""
What a checkpoint's manifest costs: hashing files that were just written, from the system's cache.

    python -m benchmarks.manifest
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from benchmarks.timing import Cost, timed
from trl_dataeff.checkpoint.manifest import check_checkpoint, write_manifest


def measure(folder: Path, megabytes: int, files: int, turns: int) -> tuple[float, float]:
    """Medians of the bytes per second at which a manifest is made, and checked."""
    block = os.urandom(1 << 20)
    for i in range(files):
        with open(folder / f"part-{i}.bin", "wb") as handle:
            for _ in range(megabytes // files):
                handle.write(block)
    size = sum(path.stat().st_size for path in folder.glob("*.bin"))
    made, checked = [], []
    for _ in range(turns):
        made.append(timed(lambda: write_manifest(folder, run="", step=1, processes=1, resumable=True)))
        checked.append(timed(lambda: check_checkpoint(folder)))
    return size / Cost.median(made).seconds, size / Cost.median(checked).seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1600)
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "checkpoint-1"
        folder.mkdir()
        made, checked = measure(folder, options.megabytes, options.files, options.turns)
    print(
        f"{options.megabytes / 1000:.1f} GB in {options.files} files: {made / 1e9:.1f} GB/s made, {checked / 1e9:.1f} GB/s checked"
    )


if __name__ == "__main__":
    main()
