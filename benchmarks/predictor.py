"""
How well success rates are predicted, over a training run on the lab, on prompts that the run never saw.

    python -m benchmarks.predictor

Each seed trains the lab's language model with `selection="dots"`. Every few generation batches the true success rate of each prompt, under
the policy of that moment, is computed exactly (one right answer: a product of probabilities), for the pool and for 512 held-out
prompts of the same mixture. Then, from the groups that the run had rolled out by then, and from nothing else:

    rolling     the package's way: the logistic predictor, fitted to all recent groups weighted by age; no rollout of its own
    paper set   the same predictor fitted to K = B/2 fresh reference groups of random prompts, which cost K groups each time
    attention   the paper's predictor, started cold in the run, attending to all recent groups; and to the K fresh ones
    neighbours  mean of the 8 nearest recent groups by cosine of the raw embeddings
    Gaussian process   on the same principal components
    history     each prompt's own groups, faded; nothing is predicted for a prompt that was not seen

are compared with the truth: Pearson correlation on the held-out prompts, and (last column) on the pool, where the package joins
prediction and history. Mean over seeds.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
import torch

from benchmarks.gaussian_process import GaussianProcess
from trl_dataeff.difficulty.online import pearson


ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "benchmarks" / "results" / "predictor.json"
GROUP, BATCH, NEIGHBOURS, HALF_LIFE, PRIOR = 8, 16, 8, 20.0, 4.0
K = BATCH // 2


def record_run(seed: int, steps: int, every: int, start: Path) -> dict[str, np.ndarray]:
    """Train, and return the run's groups, the embeddings and the true success rates at each look, as arrays."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback

    from benchmarks.lab.evaluate import success
    from benchmarks.lab.methods import METHODS
    from benchmarks.lab.pools import POOLS, cached_cell_success, classify, pool_dataset
    from benchmarks.lab.tasks import Task
    from benchmarks.lab.train import LEARNING_RATE, RunSpec, config_options
    from trl_dataeff.difficulty.embedding import embed_dataset

    tokenizer = AutoTokenizer.from_pretrained(start)
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    kinds = classify(cached_cell_success(start, model, tokenizer))
    pool = pool_dataset(POOLS["first"], kinds, seed)
    seen = set(pool["prompt"])
    unseen = pool_dataset(POOLS["first"], kinds, seed + 1000).filter(lambda row: row["prompt"] not in seen)
    tasks = [[Task(r["family"], r["length"], r["prompt"], r["answer"]) for r in data] for data in (pool, unseen)]
    embeddings = [
        np.array(embed_dataset(d, policy=model, tokenizer=tokenizer, progress=False)) for d in (pool, unseen)
    ]
    groups: list[tuple[int, float, int]] = []
    looks: list[tuple[int, np.ndarray, np.ndarray]] = []

    class Looks(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step % every == 0:
                model.eval()
                truth = [success(model, tokenizer, part)[0].numpy() for part in tasks]
                model.train()
                looks.append((state.global_step, *truth))

    trainer_class, config_class = METHODS["dots"].classes()

    class Recorded(trainer_class):
        batches = 0

        def _log(self, batch):
            self.batches += 1
            groups.extend((g.prompt_id, g.success_rate, self.batches) for g in batch.generated)
            super()._log(batch)

    spec = RunSpec("dots", seed, "first", "", steps=steps, learning_rate=LEARNING_RATE)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Recorded(
            model=model,
            reward_funcs=POOLS["first"].reward,
            args=config_class(**config_options(spec, folder), **METHODS["dots"].options),
            train_dataset=pool,
            processing_class=tokenizer,
            callbacks=[Looks()],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    ids, rates, windows = (np.array(column) for column in zip(*groups, strict=True))
    return {
        "ids": ids, "rates": rates.astype(np.float32), "windows": windows,
        "pool": embeddings[0], "unseen": embeddings[1], "at": np.array([look[0] for look in looks]),
        "true_pool": np.stack([look[1] for look in looks]), "true_unseen": np.stack([look[2] for look in looks]),
    }  # fmt: skip


def neighbours(run: dict, known: np.ndarray) -> np.ndarray:
    """Mean rate of the nearest groups, by cosine of raw embeddings, `(unseen,)`."""

    def unit(E):
        E = E.astype(np.float32)
        return E / np.linalg.norm(E, axis=1, keepdims=True)

    cosine = unit(run["unseen"]) @ unit(run["pool"][run["ids"][known]]).T
    nearest = np.argsort(-cosine, axis=1)[:, :NEIGHBOURS]
    return run["rates"][known][nearest].mean(axis=1)


def compare(run: dict, seed: int) -> list[dict[str, float]]:
    """Correlations at each look."""
    from trl_dataeff.difficulty.loading import AttentionDifficultyPredictor, LogisticDifficultyPredictor
    from trl_dataeff.difficulty.online import RollingDifficulty
    from trl_dataeff.selection.estimate import SuccessHistory

    rng = np.random.default_rng(seed)
    width = run["pool"].shape[1]
    rolling = RollingDifficulty(run["pool"], LogisticDifficultyPredictor(), half_life=HALF_LIFE)
    attention = RollingDifficulty(
        run["pool"], AttentionDifficultyPredictor(width, seed=seed), half_life=HALF_LIFE, capacity=2048, seed=seed
    )
    history, rows, done = SuccessHistory(len(run["pool"]), PRIOR, (HALF_LIFE,)), [], 0
    unseen = torch.from_numpy(run["unseen"].astype(np.float32))
    for at, true_pool, true_unseen in zip(run["at"], run["true_pool"], run["true_unseen"], strict=True):
        for window in range(done + 1, at + 1):
            now = run["windows"] == window
            ids, rates = run["ids"][now], run["rates"][now]
            history.observe(ids, rates, np.full(len(ids), float(GROUP), np.float32), window)
            rolling.observe(ids, rates, window)
            attention.observe(ids, rates, window)
            attention._refit(window)
        done = at
        prior = rolling.refresh(at)
        known = run["windows"] <= at
        newest = np.flatnonzero(known)[::-1]
        newest = np.sort(newest[np.unique(run["ids"][newest], return_index=True)[1]])
        weight = 0.5 ** ((at - run["windows"][newest]) / HALF_LIFE)
        process = GaussianProcess()
        process.fit_projected(
            rolling.predictor.project(run["pool"][run["ids"][newest]]),
            torch.from_numpy(run["rates"][newest]),
            torch.from_numpy(weight.astype(np.float32)),
        )
        references = rng.choice(len(run["pool"]), K, replace=False)
        given = (rng.random((K, GROUP)) < true_pool[references, None]).mean(axis=1).astype(np.float32)
        paper = LogisticDifficultyPredictor()
        paper.fit_basis(run["pool"])
        paper.fit(run["pool"][references], torch.from_numpy(given))
        predictions = {
            "rolling": rolling.predictor.predict(unseen).numpy(),
            "paper set": paper.predict(unseen).numpy(),
            "neighbours": neighbours(run, known),
            "Gaussian process": process.predict_projected(rolling.predictor.project(unseen)).numpy(),
        }
        attention.refresh(at)
        predictions["attention"] = attention.predictor.predict(unseen).detach().numpy()
        attention.predict_with_references(references, given)
        predictions["attention, paper set"] = attention.predictor.predict(unseen).detach().numpy()
        # a group's own rate is what a run can see: the truth with the noise of 8 completions
        observed = (rng.random((len(true_unseen), GROUP)) < true_unseen[:, None]).mean(axis=1)
        row = {name: pearson(value, true_unseen) for name, value in predictions.items()}
        row["rolling, against 8 completions"] = pearson(predictions["rolling"], observed)
        row["pool: predictor"] = pearson(prior, true_pool)
        row["pool: history"] = pearson(history.estimate(np.full((1, len(prior)), 0.5, np.float32), at)[0], true_pool)
        row["pool: joined"] = pearson(history.estimate(prior[None], at)[0], true_pool)
        rows.append({"window": int(at), "seed": seed, **row})
    return rows


def table(rows: list[dict], windows: list[int]) -> str:
    """
    Means over seeds as Markdown, a column for each generation batch. A correlation is undefined if all predictions are equal;
    a mean over fewer seeds than were run says how many.
    """
    names = [name for name in rows[0] if name not in ("window", "seed")]
    lines = ["| | " + " | ".join(f"batch {w}" for w in windows) + " |", "|---" * (len(windows) + 1) + "|"]
    for name in names:
        cells = [mean_of_defined([r[name] for r in rows if r["window"] == w]) for w in windows]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def mean_of_defined(values: list[float]) -> str:
    """Mean of the values that are not NaN, and of how many if not of all."""
    defined = [value for value in values if not np.isnan(value)]
    if not defined:
        return "undefined"
    return f"{np.mean(defined):.2f}" + (f" ({len(defined)} of {len(values)})" if len(defined) < len(values) else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "lab")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    from benchmarks.lab.pretrain import StartRecipe, start_folder

    start = start_folder(StartRecipe(), options.cache, lambda step, loss: None)
    rows: list[dict] = []
    for seed in options.seeds:
        rows += compare(record_run(seed, options.steps, options.every, start), seed)
        print(f"seed {seed} done", flush=True)
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
    windows = sorted({row["window"] for row in rows})
    print(table(rows, [w for w in windows if w in (10, 20, 40, 60, windows[-1])]))


if __name__ == "__main__":
    main()
