"""The driver of what only a GPU can show: it goes on where it stopped, and begins nothing that it cannot end."""

import json
import time

from benchmarks import gpu, update
from benchmarks.lab.store import append_run


def test_work_begins_nothing_that_takes_longer_than_what_is_left():
    done = []

    def job(name: str):
        def run() -> None:
            done.append(name)
            time.sleep(0.2)

        return name, run

    assert not gpu.work(iter([job("a"), job("b"), job("c")]), time.monotonic() + 0.5)
    assert done == ["a", "b"]
    assert gpu.work(iter([job("d")]), time.monotonic() + 60)


def test_what_is_recorded_is_not_done_again(tmp_path):
    size = update.cuda_sizes()[0].name
    name = update.CUDA_ROWS[0]
    recorded = tmp_path / "cuda.jsonl"
    recorded.write_text(json.dumps({"model": size, "name": name}) + "\n")
    missing = [job_name for job_name, _ in gpu.update_jobs(recorded, tiny=False)]
    assert f"{size}, {name}" not in missing
    assert len(missing) == 2 * len(update.CUDA_ROWS) - 1

    runs = tmp_path / "gpu.jsonl"
    first, *others = gpu.specs()
    append_run(runs, [{"run": first.name, "step": 38}])
    assert [run_name for run_name, _ in gpu.run_jobs(runs, tiny=False)] == [spec.name for spec in others]
