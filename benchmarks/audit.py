"""
What `trl-dataeff audit` projects from plain TRL runs of the synthetic benchmark, against what its runs measured.

    python -m benchmarks.audit            # the table, from the groups of the recorded runs
    python -m benchmarks.audit --record   # make the recorded runs again: plain TRL, 80 CPU seconds each
    python -m benchmarks.audit --scale    # time and peak memory on a million completions

Each recorded run is of TRL's own `GRPOTrainer`, for 100 steps, with `log_completions=True` and a table at each step. Its
groups are kept in `benchmarks/results/audit`. The measured ratios are those of docs/results.md, on other seeds of the same
pools as well. The settings that are projected are those with which the measured runs were made.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.lab.ratios import ratios, show
from benchmarks.proof import load, table
from trl_dataeff.analysis.audit import audit
from trl_dataeff.analysis.audit_projection import PROJECTED, project
from trl_dataeff.rollouts.group import KINDS
from trl_dataeff.tracking.completions import RecordedGroups, read_groups


RESULT = Path(__file__).parent / "results" / "audit.txt"
SCALE = RESULT.with_name("audit_scale.txt")
RECORDED = RESULT.with_suffix("")
ROOT = Path(__file__).parents[1]
POOLS, SEEDS, STEPS = ("first", "second", "third"), (10,), 100
#: Fields with which the runs of the studies of these names were made, where the defaults are others now
COMMITTED = {
    "dots_sharpness": 4.0,
    "dots_threshold": None,
    "dots_coverage": 0.0,
    "history_half_lives": [20.0],
    "replay_order": "random",
    "replay_max_age": 20,
}
#: The settings of these runs, by method, and their names
METHODS = {
    "default": {**COMMITTED},
    "dots": {**COMMITTED, "selection": "dots", "replay_fraction": 0.0},
    "replay50": {**COMMITTED, "selection": "uniform"},
    "greso": {"selection": "greso", "replay_fraction": 0.0},
    "dynamic": {"selection": "uniform", "replay_fraction": 0.0, "dynamic_sampling": True},
}
#: Methods whose settings are others now, by what the command projects
PRESENT = {"default": "DOTS and replay", "dots": "DOTS", "replay50": "replay"}
POINTS = 15  # of the saving, within which the projection is to be


def measured(pool: str) -> dict[str, dict]:
    """The rows of the ratio table of the pool's study, at the lab's learning rate."""
    return {row["method"]: row for row in ratios(next(iter(load(pool).values())), at_step=STEPS)}


def record(cache: Path, out: Path) -> None:
    """Train plain TRL on each pool and seed, with completions logged, and keep the groups."""
    from benchmarks.lab.methods import METHODS as LAB
    from benchmarks.lab.pretrain import StartRecipe
    from benchmarks.lab.train import RunSpec, run

    start = StartRecipe().key
    for seed in SEEDS:
        for pool in POOLS:
            folder = out / f"{pool}-{seed}"
            if not (folder / "done").exists():
                logged = {"log_completions": True, "logging_strategy": "steps", "logging_steps": 1}
                LAB["logged"] = replace(LAB["uniform"], options={**logged, "output_dir": str(folder)})
                spec = RunSpec("logged", seed, pool, start, steps=STEPS, eval_every=STEPS)
                with contextlib.redirect_stdout(io.StringIO()):  # TRL prints each table
                    run(spec, cache / f"start-{start}", lambda row: None)
                (folder / "done").touch()
            keep(read_groups([folder]), RECORDED / f"{pool}-{seed}.parquet")


def keep(groups: RecordedGroups, path: Path) -> None:
    """Write the groups, and the prompts' texts, to a small file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {
        "step": pa.array(groups.step, pa.int16()),
        "prompt": pa.array([groups.texts[i] for i in groups.prompt]).dictionary_encode(),
        "success": pa.array(groups.success, pa.float32()),
        "kind": pa.array([KINDS[kind] for kind in groups.kind]).dictionary_encode(),
        "tokens": pa.array(groups.tokens, pa.float32()),
    }
    pq.write_table(pa.table(columns), path, compression="zstd")


def kept(path: Path) -> RecordedGroups:
    """What `keep` wrote."""
    found = pq.read_table(path).to_pydict()
    texts = list(dict.fromkeys(found["prompt"]))
    number = {text: i for i, text in enumerate(texts)}
    return RecordedGroups(
        step=np.array(found["step"], dtype=np.int64),
        prompt=np.array([number[text] for text in found["prompt"]], dtype=np.int64),
        success=np.array(found["success"], dtype=np.float64),
        kind=np.array([KINDS.index(kind) for kind in found["kind"]], dtype=np.int8),
        tokens=np.array(found["tokens"], dtype=np.float64),
        seconds=np.full(len(found["step"]), np.nan),
        group_size=8,
        texts=tuple(texts),
        format="TRL completion tables",
    )


def compare() -> str:
    """The table: ratios of rollouts by pool and method, means over the recorded runs, and their errors."""
    body, errors = [], {}
    for pool in POOLS:
        rows = measured(pool)
        names = [name for name in METHODS if name in rows]
        settings = {name: METHODS[name] for name in names}
        settings |= {PRESENT[name]: PROJECTED[PRESENT[name]] for name in names if name in PRESENT}
        found = [project(kept(path), settings=settings) for path in recorded(pool)]
        for name in names:
            ratios = [projection.of(name).rollouts for projection in found]
            present = [projection.of(PRESENT.get(name, name)).rollouts for projection in found]
            projected, real = float(np.mean(ratios)), rows[name]["rollouts_ratio"]
            both = math.isfinite(projected) and math.isfinite(real)
            error = 100 * (real - projected) if both else math.nan
            if both:
                errors[pool, name] = error
            body.append(
                (
                    *(pool, f"`{name}`", show(projected), ", ".join(map(show, ratios)), show(real)),
                    ", ".join(map(show, rows[name]["rollouts_ratios"])),
                    f"{error:+.0f}" if both else "",
                    f"{np.mean([projection.of(name).effective for projection in found]):.2f}",
                    f"{rows[name]['effective']:.2f}",
                    show(float(np.mean(present))),
                )
            )
    header = (
        *("pool", "method", "projected", "per run", "measured", "per seed", "error of the saving, points"),
        *("effective, projected", "measured", "with today's defaults"),
    )
    worst = max(errors.values(), key=abs)
    defaults = [abs(error) for (_, name), error in errors.items() if name == "default"]
    inside = sum(abs(error) <= POINTS for error in errors.values())
    return "\n".join(
        [
            table(header, body),
            "",
            f"The saving of the defaults is off by {max(defaults):.0f} points at most on the three pools; of all "
            f"{len(errors)} comparisons {inside} are within {POINTS} points, and the largest error is {worst:+.0f}.",
        ]
    )


def recorded(pool: str) -> list[Path]:
    """The kept runs of a pool."""
    return sorted(RECORDED.glob(f"{pool}-*.parquet"))


def shares() -> str:
    """What the audits say of the runs themselves."""
    body = []
    for path in (path for pool in POOLS for path in recorded(pool)):
        found = audit(kept(path))
        it = found.persistence
        body.append(
            (
                path.stem,
                *(f"{share:.0%}" for share in (found.overall.effective, found.overall.easy, found.overall.hard)),
                *(f"{chance.share:.0%} ({chance.cases})" for chance in (it.again, it.after_effective)),
            )
        )
    header = ("run", "effective", "easy", "hard", "zero variance after zero variance", "after effective")
    return table(header, body)


def rows_of(completions: int, prompts: int, seed: int = 0) -> Iterator[dict]:
    """Rollouts of a run, 64 groups of 8 a step, of 450 characters in the mean, as verl would dump them."""
    rng = np.random.default_rng(seed)
    rates = rng.choice([0.0, 0.3, 0.7, 1.0], prompts, p=[0.5, 0.2, 0.1, 0.2])
    stem = " ".join(f"word{i}" for i in range(90))
    order, at = rng.permutation(prompts), 0
    for step in range(completions // 512):
        for _ in range(64):
            prompt = order[at]
            at += 1
            if at == prompts:
                order, at = rng.permutation(prompts), 0
            for reward in (rng.random(8) < rates[prompt]).astype(float):
                yield {
                    "input": f"Question {prompt}: what is the sum of {prompt * 7919 % 1013} and {prompt % 97}?",
                    "output": stem[: 300 + int(rng.integers(0, 300))],
                    "gts": "42",
                    "score": reward,
                    "step": step,
                }


def write_files(folder: Path, completions: int, prompts: int) -> dict[str, Path]:
    """The same rollouts as JSON lines and as TRL's tables."""
    lines, tables = folder / "rollouts.jsonl", folder / "trl" / "completions"
    tables.mkdir(parents=True)
    block: list[dict] = []
    with lines.open("w") as file:
        for row in rows_of(completions, prompts):
            file.write(json.dumps(row) + "\n")
            block.append(row)
            if len(block) == 512:
                columns = {new: [row[old] for row in block] for new, old in TRL_NAMES.items()}
                scores = np.array(columns["accuracy_reward"]).reshape(-1, 8)
                spread = scores.std(axis=1, ddof=1, keepdims=True)
                columns["advantage"] = ((scores - scores.mean(axis=1, keepdims=True)) / (spread + 1e-4)).ravel()
                pq.write_table(pa.table(columns), tables / f"completions_{block[0]['step'] + 1:05d}.parquet")
                block = []
    return {"JSON lines": lines, "TRL tables": tables.parent}


TRL_NAMES = {"step": "step", "prompt": "input", "completion": "output", "accuracy_reward": "score"}


def scale(completions: int, prompts: int) -> str:
    """Time and peak memory of the command, each in a process of its own."""
    body = []
    with tempfile.TemporaryDirectory() as folder:
        for name, path in write_files(Path(folder), completions, prompts).items():
            size = sum(file.stat().st_size for file in ([path] if path.is_file() else path.rglob("*.parquet"))) / 1e6
            for options in ([], ["--no_projection"]):
                seconds, cpu, peak = measure(
                    [sys.executable, "-m", "trl_dataeff.cli.main", "audit", str(path), *options]
                )
                what = "described" if options else "described and projected"
                body.append((name, f"{size:,.0f} MB", what, f"{cpu:.0f}", f"{seconds:.0f}", f"{peak:.2f}"))
    text = table(("files", "size", "", "CPU seconds", "seconds", "peak GB"), body)
    return f"{completions:,} completions of {prompts:,} prompts\n\n{text}"


def measure(command: list[str]) -> tuple[float, float, float]:
    """Seconds, CPU seconds and peak memory in GB of a process."""
    began = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=ROOT)
    _, status, used = os.wait4(child.pid, 0)
    if status:
        raise RuntimeError(f"{command} failed")
    return time.perf_counter() - began, used.ru_utime + used.ru_stime, used.ru_maxrss / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--scale", action="store_true")
    parser.add_argument("--completions", type=int, default=1_000_000)
    parser.add_argument("--prompts", type=int, default=10_000)
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "lab", help="folder of the trained start")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "audit", help="folder of the recorded runs")
    options = parser.parse_args()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    warnings.simplefilter("ignore", FutureWarning)
    if options.scale:
        text, file = scale(options.completions, options.prompts), SCALE
    else:
        if options.record:
            record(options.cache, options.out.resolve())
        text, file = f"{compare()}\n\n{shares()}", RESULT
    file.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
