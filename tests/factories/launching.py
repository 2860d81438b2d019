"""Scripts that run on several processes (gloo, on the CPU)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from filelock import FileLock


def launched(script: Path, processes: int, tmp_path_factory, *arguments: str, timeout: int = 1200) -> list[dict]:
    """
    What `script` reports from each of `processes` processes in `rank-{rank}.json` of the folder that is its first argument. It
    runs once per test run, whichever worker asks first.
    """
    folder = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        folder = folder.parent  # one for all workers
    folder = folder / "-".join([script.stem, str(processes), *arguments])
    reports = [folder / f"rank-{rank}.json" for rank in range(processes)]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            folder.mkdir()
            root = Path(__file__).parents[2]
            command = [*launch, script, folder, *arguments]
            own = dict(os.environ)
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=root, env=own)
            (folder / "output.txt").write_text(f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
    assert all(report.exists() for report in reports), (folder / "output.txt").read_text()
    return [json.loads(report.read_text()) for report in reports]
