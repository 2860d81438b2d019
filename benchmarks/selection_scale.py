"""
What one refresh costs: predict every prompt from reference groups, and sample a batch.

    python -m benchmarks.selection_scale

The paper's predictor: projections are 896 wide, K is 256, 512 prompts are drawn. Query projections are computed once per
fit and are not part of a refresh; a refresh projects the references, takes one (N x 896)(896 x K) product, and samples by
Gumbel-top-k. Beside it the logistic predictor and a Gaussian process, fitted to 2,048 groups on 32 components. Each
predictor and size runs in a process of its own, whose peak memory is that of the whole process, query projections
(3.6 GB at a million) included.

At 10,000 prompts the paper's refresh is also computed as the published implementation does it: for every batch of 32
questions it projects the questions and all K references again. The two take turns in one process, and have to agree.

CPU seconds are those of all threads; on a machine that does other things they say more than the seconds that passed.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.gaussian_process import GaussianProcess
from benchmarks.timing import Cost, timed
from trl_dataeff.difficulty.loading import AttentionDifficultyPredictor, LogisticDifficultyPredictor
from trl_dataeff.selection.draw import gumbel_top_k, log_weight_target


RESULTS = Path(__file__).parent / "results" / "selection_scale.txt"
WIDTH, REFERENCES, DRAWN, QUESTIONS = 896, 256, 512, 32
GROUPS, COMPONENTS = 2048, 32
GAUSSIAN_PROCESS_MOST = 100_000  # minutes beyond
KINDS = ("attention", "logistic", "Gaussian process")
PUBLISHED_SIZE = 10_000
SECONDS, GIGABYTES = 20.0, 6.0


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
    drawn: int = DRAWN,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, all of it for every 32 questions; then a softmax over the log-weights, and a draw from it."""
    pieces = []
    with torch.no_grad():
        for start in range(0, len(E), QUESTIONS):
            zq = predictor.project_queries(E[start : start + QUESTIONS])
            pieces.append(predictor.attend(zq, predictor.project_references(E_ref), p_ref))
    p = torch.cat(pieces)
    chance = torch.softmax(log_weight(p).double(), dim=0)
    return p, torch.multinomial(chance, drawn, generator=generator)


def log_weight(p: torch.Tensor) -> torch.Tensor:
    """The paper's, at a temperature of 0.05 so that a plain softmax has as many chances above 0 as are drawn."""
    return log_weight_target(p, 0.5, 0.05)


def references(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(REFERENCES, WIDTH, generator=generator), torch.rand(REFERENCES, generator=generator)


def attention_refresh(size: int, generator: torch.Generator) -> Callable[[], object]:
    predictor = AttentionDifficultyPredictor(WIDTH)
    zq = torch.randn(size, WIDTH, generator=generator)  # as LayerNorm leaves projections
    return lambda: refresh(predictor, zq, *references(generator), generator)


def component_refresh(predictor, size: int, generator: torch.Generator) -> Callable[[], object]:
    """Fit to groups drawn anew, predict all, sample."""
    Z = torch.randn(size, COMPONENTS, generator=generator) * torch.linspace(1, 0.1, COMPONENTS)
    chance = torch.sigmoid(2 * Z[:, 0])

    def run() -> torch.Tensor:
        ids = torch.randint(size, (GROUPS,), generator=generator)
        predictor.fit_projected(Z[ids], torch.binomial(torch.full((GROUPS,), 8.0), chance[ids], generator) / 8)
        return gumbel_top_k(log_weight(predictor.predict_projected(Z)), DRAWN, generator)

    return run


def measure(kind: str, size: int, turns: int) -> Cost:
    """Cost of a refresh of `size` prompts, after one that is not counted."""
    generator = torch.Generator().manual_seed(0)
    if kind == "attention":
        run = attention_refresh(size, generator)
    else:
        predictor = LogisticDifficultyPredictor() if kind == "logistic" else GaussianProcess()
        run = component_refresh(predictor, size, generator)
    run()
    return Cost.median(timed(run) for _ in range(turns))


def compare(size: int, turns: int) -> tuple[Cost, Cost]:
    """Cost of our refresh and of the published one of the same prompts and references, which take turns."""
    generator = torch.Generator().manual_seed(0)
    predictor = AttentionDifficultyPredictor(WIDTH)
    E = torch.randn(size, WIDTH, generator=generator)
    zq = predictor.project_queries(E)
    ours, published = [], []
    refresh(predictor, zq, *references(generator), generator)
    for _ in range(turns):
        E_ref, p_ref = references(generator)
        several = [timed(lambda: refresh(predictor, zq, E_ref, p_ref, generator)) for _ in range(5)]  # noqa: B023
        ours.append(Cost.median(several))
        published.append(timed(lambda: published_refresh(predictor, E, E_ref, p_ref, generator)))  # noqa: B023
    p, _ = refresh(predictor, zq, E_ref, p_ref, generator)
    same, _ = published_refresh(predictor, E[: 4 * QUESTIONS + 1], E_ref, p_ref, generator, drawn=64)
    torch.testing.assert_close(p[: len(same)], same, atol=1e-4, rtol=0)
    return Cost.median(ours), Cost.median(published)


def arithmetic_ratio(size: int) -> float:
    """Multiplications of the published refresh over those of ours."""
    tower = 3 * WIDTH * WIDTH
    product = size * WIDTH * REFERENCES
    batches = -(-size // QUESTIONS)
    return (batches * REFERENCES * tower + size * tower + product) / (REFERENCES * tower + product)


def peak_gigabytes() -> float:
    """Largest resident size of this process so far, in 10^9 bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def in_own_process(kind: str, size: int, turns: int, threads: int) -> tuple[Cost, float]:
    """Cost of a refresh, and the peak memory in GB."""
    command = [sys.executable, "-m", "benchmarks.selection_scale", "--threads", str(threads)]
    command += ["--turns", str(turns), "--sizes", str(size), "--worker", kind]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    seconds, cpu, gigabytes = map(float, output.split())
    return Cost(seconds, cpu), gigabytes


def table(rows: list[tuple[str, int, Cost, float]]) -> list[str]:
    head = ["predictor", "prompts", "seconds per refresh", "CPU seconds", "CPU microseconds per prompt", "peak GB"]
    lines = ["| " + " | ".join(head) + " |", "|---|---:|---:|---:|---:|---:|"]
    for kind, n, cost, gigabytes in rows:
        per_prompt = cost.cpu_seconds / n * 1e6
        lines.append(
            f"| {kind} | {n:,} | {cost.seconds:.3f} | {cost.cpu_seconds:.3f} | {per_prompt:.2f} | {gigabytes:.2f} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[10_000, 100_000, 1_000_000], help="numbers of prompts"
    )
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS, help="predictors")
    parser.add_argument("--turns", type=int, default=3, help="timed refreshes of each size")
    parser.add_argument("--published-turns", type=int, default=1, help="published refreshes; 0 leaves them out")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch")
    parser.add_argument("--output", type=Path, default=RESULTS, help="file of the table")
    parser.add_argument("--worker", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.worker:
        print(*measure(options.worker, options.sizes[0], options.turns), peak_gigabytes())
        return
    rows = [
        (kind, n, *in_own_process(kind, n, options.turns, options.threads))
        for kind in options.kinds
        for n in options.sizes
        if kind != "Gaussian process" or n <= GAUSSIAN_PROCESS_MOST
    ]
    lines = [f"One refresh on {options.threads} CPU thread(s), float32.", "", *table(rows)]
    if options.published_turns:
        ours, published = compare(PUBLISHED_SIZE, options.published_turns)
        lines += [
            "",
            f"The paper's predictor at {PUBLISHED_SIZE:,} prompts, in turns: ours {ours.seconds:.3f} s"
            f" ({ours.cpu_seconds:.3f} CPU s), as published {published.seconds:.1f} s ({published.cpu_seconds:.1f} CPU"
            f" s): {published.seconds / ours.seconds:,.0f} times as long, {published.cpu_seconds / ours.cpu_seconds:,.0f}"
            f" times the CPU time, {arithmetic_ratio(PUBLISHED_SIZE):,.0f} times the multiplications.",
        ]
    text = "\n".join(lines)
    print(text)
    options.output.write_text(text + "\n")
    sys.exit(any(cost.seconds > SECONDS or gb > GIGABYTES for kind, _, cost, gb in rows if kind != KINDS[-1]))


if __name__ == "__main__":
    main()
