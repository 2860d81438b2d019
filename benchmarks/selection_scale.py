"""
What one refresh of the paper's predictor costs: predict every prompt from K reference groups, and sample a batch.

    python -m benchmarks.selection_scale

Projections are 896 wide, K is 256, 512 prompts are drawn. Query projections are computed once per fit and are not part
of a refresh; a refresh projects the references, takes one (N x 896)(896 x K) product, and samples by Gumbel-top-k. Each
size runs in a process of its own, whose peak memory is that of the whole process, query projections (3.6 GB at a
million) included; where the system has no such count, it is left blank.

At 10,000 prompts the same refresh is also computed as the published implementation does it: for every batch of 32
questions it projects the questions and all K references again. The two take turns in one process, and have to agree.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from trl_dataeff.difficulty.predictor import AttentionDifficultyPredictor


RESULTS = Path(__file__).parent / "results" / "selection_scale.txt"
WIDTH, REFERENCES, DRAWN, QUESTIONS = 896, 256, 512, 32
PUBLISHED_SIZE = 10_000
SECONDS, GIGABYTES, FACTOR = 20.0, 6.0, 500.0


def gumbel_top_k(log_weights: torch.Tensor, n: int, generator: torch.Generator) -> torch.Tensor:
    """`n` of N ids, without repetition, by the largest of their log-weights plus Gumbel noise."""
    noise = -torch.empty(len(log_weights), dtype=torch.float64).exponential_(generator=generator).log()
    return (log_weights.double() + noise).topk(n).indices


def refresh(
    predictor: AttentionDifficultyPredictor,
    zq: torch.Tensor,
    E_ref: torch.Tensor,
    p_ref: torch.Tensor,
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Success rates `(N,)` and the ids drawn `(512,)`."""
    with torch.no_grad():
        p = predictor.attend(zq, predictor.project_references(E_ref), p_ref)
    return p, gumbel_top_k(log_weight(p), DRAWN, generator)


def published_refresh(
    predictor: AttentionDifficultyPredictor,
    E: torch.Tensor,
    E_ref: torch.Tensor,
    p_ref: torch.Tensor,
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, all of it for every 32 questions; then a softmax over the log-weights, and a draw from it."""
    pieces = []
    with torch.no_grad():
        for start in range(0, len(E), QUESTIONS):
            zq = predictor.project_queries(E[start : start + QUESTIONS])
            pieces.append(predictor.attend(zq, predictor.project_references(E_ref), p_ref))
    p = torch.cat(pieces)
    chance = torch.softmax(log_weight(p).double(), dim=0)
    return p, torch.multinomial(chance, DRAWN, generator=generator)


def log_weight(p: torch.Tensor) -> torch.Tensor:
    """The paper's, at a temperature of 0.05 so that a plain softmax has as many chances above 0 as are drawn."""
    return -(p - 0.5).abs() / 0.05


def references(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(REFERENCES, WIDTH, generator=generator), torch.rand(REFERENCES, generator=generator)


def measure(size: int, turns: int) -> list[float]:
    """Seconds of each of our refreshes of `size` prompts, after one that is not counted."""
    generator, seconds = torch.Generator().manual_seed(0), []
    predictor = AttentionDifficultyPredictor(WIDTH)
    zq = torch.randn(size, WIDTH, generator=generator)  # as LayerNorm leaves projections
    for _ in range(turns + 1):
        E_ref, p_ref = references(generator)
        began = time.perf_counter()
        refresh(predictor, zq, E_ref, p_ref, generator)
        seconds.append(time.perf_counter() - began)
    return seconds[1:]


def compare(size: int, turns: int) -> tuple[list[float], list[float]]:
    """Seconds of our refreshes and of published ones of the same prompts and references, which take turns."""
    generator = torch.Generator().manual_seed(0)
    predictor = AttentionDifficultyPredictor(WIDTH)
    E = torch.randn(size, WIDTH, generator=generator)
    zq = predictor.project_queries(E)
    ours, published = [], []
    refresh(predictor, zq, *references(generator), generator)
    for _ in range(turns):
        E_ref, p_ref = references(generator)
        for _ in range(5):  # milliseconds each
            began = time.perf_counter()
            p, _ = refresh(predictor, zq, E_ref, p_ref, generator)
            ours.append(time.perf_counter() - began)
        began = time.perf_counter()
        same, _ = published_refresh(predictor, E, E_ref, p_ref, generator)
        published.append(time.perf_counter() - began)
        torch.testing.assert_close(p, same, atol=1e-4, rtol=0)
    return ours, published


def peak_gigabytes() -> float:
    """Largest resident size of this process so far, in 10^9 bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def worker(size: int, turns: int) -> None:
    seconds = measure(size, turns)
    print(statistics.median(seconds), peak_gigabytes())


def in_own_process(size: int, turns: int, threads: int) -> tuple[float, float]:
    command = [sys.executable, "-m", "benchmarks.selection_scale", "--threads", str(threads)]
    command += ["--turns", str(turns), "--worker", str(size)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    seconds, gigabytes = map(float, output.split())
    return seconds, gigabytes


def table(rows: list[tuple[int, float, float]]) -> list[str]:
    lines = ["| prompts | seconds per refresh | microseconds per prompt | peak memory, GB |", "|---:|---:|---:|---:|"]
    lines += [f"| {n:,} | {s:.3f} | {s / n * 1e6:.2f} | {gb:.2f} |" for n, s, gb in rows]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[10_000, 100_000, 1_000_000], help="numbers of prompts"
    )
    parser.add_argument("--turns", type=int, default=5, help="timed refreshes of each size")
    parser.add_argument("--published-turns", type=int, default=2, help="published refreshes; 0 leaves them out")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch")
    parser.add_argument("--output", type=Path, default=RESULTS, help="file of the table")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.worker is not None:
        worker(options.worker, options.turns)
        return
    rows = [(n, *in_own_process(n, options.turns, options.threads)) for n in options.sizes]
    lines = [f"One refresh, K {REFERENCES}, width {WIDTH}, {options.threads} threads, float32.", "", *table(rows)]
    passed = all(s <= SECONDS and gb <= GIGABYTES for _, s, gb in rows)
    if options.published_turns:
        ours, published = (statistics.median(s) for s in compare(PUBLISHED_SIZE, options.published_turns))
        passed &= published / ours >= FACTOR
        lines += [
            "",
            f"At {PUBLISHED_SIZE:,} prompts, in turns: ours {ours:.3f} s, as published {published:.1f} s,"
            f" {published / ours:,.0f} times as long.",
        ]
    text = "\n".join(lines)
    print(text)
    options.output.write_text(text + "\n")
    sys.exit(not passed)


if __name__ == "__main__":
    main()
