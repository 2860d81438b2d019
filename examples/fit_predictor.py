"""
Fits a predictor of success rates to the groups of finished runs, and measures it on held-out prompts.

    python examples/fit_predictor.py --groups out/dataeff/groups.parquet --dataset openai/gsm8k --dataset_config main \
        --prompt_column question --embedding Qwen/Qwen2.5-0.5B-Instruct --output predictor
    trl-dataeff grpo --config recipe.yaml --prompt_embedding Qwen/Qwen2.5-0.5B-Instruct \
        --selection dots --selector_args '{"predictor": "predictor"}'

Give the prompts as the run has them: with a system prompt, as a dataset of conversations that contain it.

A success rate is that of one policy. A group is therefore predicted from groups of the same run and of nearby steps: a
run is cut, in the order of its steps, into slices of about 512 groups, and each slice is a task.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from trl_dataeff.difficulty import save_predictor
from trl_dataeff.difficulty.attention import HELD_OUT, AttentionDifficultyPredictor
from trl_dataeff.difficulty.embedding import embed_dataset
from trl_dataeff.difficulty.logistic import LogisticDifficultyPredictor
from trl_dataeff.difficulty.online import newest, pearson
from trl_dataeff.difficulty.predictor import DifficultyPredictor, Embeddings, Groups, PredictorError, take
from trl_dataeff.tracking.groups import read_groups


SLICE = 512
EPOCHS = 20
NEIGHBOURS = 10
FEWEST = 20  # prompts

#: Predicts the held-out groups of a task from its others: rows `(K,)`, success rates `(K,)`, rows `(n,)` -> `(n,)`.
Predict = Callable[[np.ndarray, torch.Tensor, np.ndarray], np.ndarray]


class Slice(NamedTuple):
    """Groups of one run and of nearby steps, each of another prompt: int64 `(n,)` and float32 `(n,)`."""

    prompt_ids: np.ndarray
    rates: np.ndarray


class Fitted(NamedTuple):
    """A predictor fitted without the held-out prompts, its predictions, and its final fit to all prompts."""

    predictor: DifficultyPredictor
    predict: Predict
    finish: Callable[[], None]


class Quality(NamedTuple):
    """How well held-out groups are predicted; `pearson` is the mean over tasks, the error is over all groups."""

    name: str
    pearson: float
    mean_absolute_error: float


def read_slices(paths: Sequence[str | Path], size: int) -> list[Slice]:
    """
    Read the groups of runs.

    Args:
        paths (sequence of `str` or `Path`): a `groups.parquet` for each run.
        size (`int`): number of prompts in the dataset.

    Raises:
        PredictorError: a file cannot be read, is of another kind or of another dataset, or there are too few groups.
    """
    slices = [piece for path in paths for piece in _slices_of(Path(path).expanduser(), size)]
    prompts = len(np.unique(np.concatenate([piece.prompt_ids for piece in slices]))) if slices else 0
    if prompts < FEWEST:
        raise PredictorError(
            f"{', '.join(map(str, paths))}: {prompts} prompts with a known success rate. At least {FEWEST} are needed; "
            "give the groups of longer or of more runs."
        )
    return slices


def fit_offline(
    kind: str, E: Embeddings, slices: Sequence[Slice], seed: int
) -> tuple[DifficultyPredictor, list[Quality]]:
    """
    Fit a predictor to all prompts but a fifth, and measure it on that fifth.

    Args:
        kind (`str`): `"logistic"`, which is then fitted to all groups, or `"attention"`, whose references are then the
            last slice.
        E (`torch.Tensor` or `np.ndarray` of shape `(N, h)`): embeddings of all prompts.
        slices (sequence of [`Slice`]): see [`read_slices`].
        seed (`int`): of the held-out prompts and of the fit.

    Returns:
        `tuple`: the predictor, and the quality of its predictions and of two baselines: each task's mean, and the mean
        of the 10 prompts of the task whose embeddings have the highest cosine similarity.
    """
    rng = np.random.default_rng(seed)
    prompts = np.unique(np.concatenate([piece.prompt_ids for piece in slices]))
    held_out = np.zeros(len(E), dtype=bool)
    held_out[rng.permutation(prompts)[: max(1, int(len(prompts) * HELD_OUT))]] = True
    predictor, predict, finish = FITS[kind](E, slices, held_out, rng, seed)
    contestants: dict[str, Predict] = {
        kind: predict,
        "mean": lambda references, p, queries: np.full(len(queries), float(p.mean())),
        "nearest neighbours": lambda references, p, queries: nearest_neighbours(E, references, p, queries),
    }
    quality = [measure(name, predict, slices, held_out) for name, predict in contestants.items()]
    finish()
    return predictor, quality


def measure(name: str, predict: Predict, slices: Sequence[Slice], held_out: np.ndarray) -> Quality:
    """Quality of the predictions of each slice's held-out prompts, `held_out` being bool `(N,)`, from its others."""
    predicted, observed, correlation, count = [], [], [], []
    for piece in slices:
        out = held_out[piece.prompt_ids]
        if not out.any() or out.all():
            continue
        known = torch.from_numpy(piece.rates[~out])
        predicted.append(predict(piece.prompt_ids[~out], known, piece.prompt_ids[out]))
        observed.append(piece.rates[out])
        correlation.append(pearson(predicted[-1], observed[-1]))
        count.append(out.sum())
    if not predicted:
        return Quality(name, float("nan"), float("nan"))
    defined = ~np.isnan(correlation)
    mean = np.average(np.array(correlation)[defined], weights=np.array(count)[defined]) if defined.any() else np.nan
    x, y = np.concatenate(predicted), np.concatenate(observed)
    return Quality(name, float(mean), float(np.abs(x - y).mean()))


def nearest_neighbours(E: Embeddings, references: np.ndarray, p: torch.Tensor, queries: np.ndarray) -> np.ndarray:
    """Mean success rate of each query's 10 nearest references by cosine similarity of raw embeddings, `(n,)`."""
    directions = torch.nn.functional.normalize(take(E, references), dim=1)
    similarity = torch.nn.functional.normalize(take(E, queries), dim=1) @ directions.T
    return p[similarity.topk(min(NEIGHBOURS, len(references)), dim=1).indices].mean(dim=1).numpy()


def _fit_logistic(
    E: Embeddings, slices: Sequence[Slice], held_out: np.ndarray, rng: np.random.Generator, seed: int
) -> Fitted:
    """Measured as it is used in a run: fitted to a slice, and regularised towards the fit to all slices."""
    predictor = LogisticDifficultyPredictor()
    predictor.fit_basis(E)
    _fit_all(predictor, E, slices, held_out)
    predictor.anchor()

    def predict(references: np.ndarray, p: torch.Tensor, queries: np.ndarray) -> np.ndarray:
        predictor.fit(take(E, references), p)
        return predictor.predict(take(E, queries)).numpy()

    def finish() -> None:
        predictor.prior = torch.zeros(0)
        _fit_all(predictor, E, slices, np.zeros(len(E), dtype=bool))

    return Fitted(predictor, predict, finish)


def _fit_all(
    predictor: LogisticDifficultyPredictor, E: Embeddings, slices: Sequence[Slice], left_out: np.ndarray
) -> None:
    ids, rates = (np.concatenate(column) for column in zip(*slices, strict=True))
    used = ~left_out[ids]
    predictor.fit_projected(predictor.project(take(E, ids[used])), torch.from_numpy(rates[used]))


def _fit_attention(
    E: Embeddings, slices: Sequence[Slice], held_out: np.ndarray, rng: np.random.Generator, seed: int
) -> Fitted:
    """Of the other prompts, a fifth decides when to stop."""
    stopping = ~held_out & (rng.random(len(E)) < HELD_OUT)
    tasks = []
    for piece in slices:
        rows, rates = (values[~held_out[piece.prompt_ids]] for values in piece)
        if (~stopping[rows]).sum() > 1:
            tasks.append(Groups(rows, rates, np.ones(len(rows), dtype=np.float32)))
    predictor = AttentionDifficultyPredictor(E.shape[1], seed=seed)
    predictor.fit_tasks(E, tasks, stopping, seed, EPOCHS)

    def predict(references: np.ndarray, p: torch.Tensor, queries: np.ndarray) -> np.ndarray:
        predictor.set_references(take(E, references), p)
        return predictor.predict(take(E, queries)).numpy()

    def finish() -> None:
        predictor.set_references(take(E, slices[-1].prompt_ids), torch.from_numpy(slices[-1].rates))

    return Fitted(predictor, predict, finish)


FITS = {"logistic": _fit_logistic, "attention": _fit_attention}


def _slices_of(path: Path, size: int) -> list[Slice]:
    table = read_groups(path)
    rates = table["success_rate"].to_numpy().astype(np.float32)
    ids, step = table["prompt_id"].to_numpy(), table["step"].to_numpy()
    known = (ids >= 0) & ~np.isnan(rates)
    ids, rates, step = ids[known], rates[known], step[known]
    if len(ids) and ids.max() >= size:
        raise PredictorError(
            f"{path} has a group of prompt {ids.max()}, and the dataset has {size} rows: give the dataset of that run."
        )
    order = np.argsort(step, kind="stable")
    pieces = np.array_split(order, max(1, round(len(order) / SLICE)))
    slices = [Slice(ids[piece].astype(np.int64), rates[piece]) for piece in pieces]
    kept = [newest(piece.prompt_ids) for piece in slices]
    return [Slice(s.prompt_ids[k], s.rates[k]) for s, k in zip(slices, kept, strict=True) if len(k)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", nargs="+", required=True, help="dataeff/groups.parquet of each run")
    parser.add_argument("--dataset", required=True, help="the runs' dataset: Hub id, or a JSON lines file")
    parser.add_argument("--dataset_config", help="its configuration")
    parser.add_argument("--split", default="train", help="its split (default: train)")
    parser.add_argument("--prompt_column", default="prompt", help="its column of prompts (default: prompt)")
    parser.add_argument("--embedding", required=True, help="id or path of the model that embeds the prompts")
    parser.add_argument("--kind", choices=("attention", "logistic"), default="attention", help="default: attention")
    parser.add_argument("--seed", type=int, default=0, help="of the held-out prompts and the fit (default: 0)")
    parser.add_argument("--output", required=True, help="folder to write the predictor to")
    options = parser.parse_args()

    from datasets import load_dataset

    if Path(options.dataset).is_file():
        dataset = load_dataset("json", data_files=options.dataset, split="train")
    else:
        dataset = load_dataset(options.dataset, options.dataset_config, split=options.split)
    dataset = dataset.select_columns(options.prompt_column).rename_columns({options.prompt_column: "prompt"})
    slices = read_slices(options.groups, len(dataset))
    predictor, quality = fit_offline(options.kind, embed_dataset(dataset, options.embedding), slices, options.seed)
    save_predictor(predictor, options.output, options.embedding)
    print("Groups of held-out prompts, a fifth of all:")
    for row in quality:
        print(f"  {row.name:<20}Pearson {row.pearson:.3f}, mean absolute error {row.mean_absolute_error:.3f}")
    print(f"Written to {options.output}.")


if __name__ == "__main__":
    main()
