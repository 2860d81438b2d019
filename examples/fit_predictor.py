"""
Fits a predictor of success rates to the groups of finished runs, and measures it on held-out prompts.

    python examples/fit_predictor.py --groups out/dataeff/groups.parquet --dataset openai/gsm8k --dataset_config main \
        --prompt_column question --embedding Qwen/Qwen2.5-0.5B-Instruct --output predictor
    trl-dataeff grpo --config recipe.yaml --prompt_embedding Qwen/Qwen2.5-0.5B-Instruct \
        --selection dots --selector_args '{"predictor": "predictor"}'

Needs the extra `embeddings` (in a clone: `pip install ".[embeddings]"`), and runs with selection, replay or several
rounds: the groups of a default run do not name rows of the dataset. They must have groups of at least 20 prompts.

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
from trl_dataeff.tracking.files import read_groups
from trl_dataeff.utils import UserError


SLICE = 512  # groups
EPOCHS = 20
NEIGHBOURS = 10
FEWEST_PROMPTS = 20

#: Predicts the held-out groups of a task from its others: rows `(K,)`, success rates `(K,)`, rows `(n,)` -> `(n,)`
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
    """Read the groups of runs.

    Args:
        paths (sequence of `str` or `Path`): A `groups.parquet` for each run.
        size (`int`): Number of prompts in the dataset.

    Raises:
        PredictorError: If a file cannot be read, is of another kind or of another dataset, or there are too few
        groups.
    """
    slices: list[Slice] = []
    for path in paths:
        slices += _slices_of(Path(path).expanduser(), size)
    prompts = len(_prompts_of(slices))
    if prompts < FEWEST_PROMPTS:
        names = ", ".join(str(path) for path in paths)
        raise PredictorError(
            f"{names}: {prompts} prompts with a known success rate. At least {FEWEST_PROMPTS} are needed; give the "
            "groups of longer or of more runs."
        )
    return slices


def fit_offline(
    kind: str, E: Embeddings, slices: Sequence[Slice], seed: int
) -> tuple[DifficultyPredictor, list[Quality]]:
    """Fit a predictor to all prompts but a fifth, and measure it on that fifth.

    Args:
        kind (`str`): `"logistic"`, which is then fitted to all groups, or `"attention"`, whose references are then the
            last slice.
        E (`torch.Tensor` or `np.ndarray` of shape `(N, h)`): Embeddings of all prompts.
        slices (sequence of [`Slice`]): See [`read_slices`].
        seed (`int`): Of the held-out prompts and of the fit.

    Returns:
        `tuple`: The predictor, and the quality of its predictions and of two baselines: each task's mean, and the mean
        of the 10 prompts of the task whose embeddings have the highest cosine similarity.
    """
    rng = np.random.default_rng(seed)
    prompts = rng.permutation(_prompts_of(slices))
    held_out_prompts = prompts[: max(1, int(len(prompts) * HELD_OUT))]
    held_out = np.zeros(len(E), dtype=bool)
    held_out[held_out_prompts] = True
    predictor, predict, finish = FITS[kind](E, slices, held_out, rng, seed)

    def predict_mean(references: np.ndarray, p: torch.Tensor, queries: np.ndarray) -> np.ndarray:
        return np.full(len(queries), float(p.mean()))

    def predict_nearest(references: np.ndarray, p: torch.Tensor, queries: np.ndarray) -> np.ndarray:
        return nearest_neighbours(E, references, p, queries)

    quality = [
        measure(kind, predict, slices, held_out),
        measure("mean", predict_mean, slices, held_out),
        measure("nearest neighbours", predict_nearest, slices, held_out),
    ]
    finish()
    return predictor, quality


def measure(name: str, predict: Predict, slices: Sequence[Slice], held_out: np.ndarray) -> Quality:
    """Measure the predictions of each slice's held-out prompts from its others.

    Args:
        name (`str`): Names the predictor.
        predict (`Callable`): Predicts.
        slices (sequence of [`Slice`]): The slices. Those without held-out prompts, or without others, are left out.
        held_out (`np.ndarray`): Which prompts are held out, bool `(N,)`.
    """
    predicted: list[np.ndarray] = []
    observed: list[np.ndarray] = []
    correlations: list[float] = []
    for piece in slices:
        is_held_out = held_out[piece.prompt_ids]
        if not is_held_out.any() or is_held_out.all():
            continue
        known = torch.from_numpy(piece.rates[~is_held_out])
        rates = piece.rates[is_held_out]
        predictions = predict(piece.prompt_ids[~is_held_out], known, piece.prompt_ids[is_held_out])
        predicted.append(predictions)
        observed.append(rates)
        correlations.append(pearson(predictions, rates))
    if not predicted:
        return Quality(name, float("nan"), float("nan"))
    errors = np.abs(np.concatenate(predicted) - np.concatenate(observed))
    correlation = float("nan")
    is_defined = ~np.isnan(correlations)
    if is_defined.any():
        sizes = np.array([len(rates) for rates in observed])
        correlation = np.average(np.array(correlations)[is_defined], weights=sizes[is_defined])
    return Quality(name, float(correlation), float(errors.mean()))


def nearest_neighbours(E: Embeddings, references: np.ndarray, p: torch.Tensor, queries: np.ndarray) -> np.ndarray:
    """Mean success rate of each query's 10 nearest references by cosine similarity of raw embeddings, `(n,)`."""
    reference_directions = torch.nn.functional.normalize(take(E, references), dim=1)  # (K, h)
    query_directions = torch.nn.functional.normalize(take(E, queries), dim=1)  # (n, h)
    similarity = query_directions @ reference_directions.T  # (n, K)
    nearest = similarity.topk(min(NEIGHBOURS, len(references)), dim=1).indices  # (n, 10)
    return p[nearest].mean(dim=1).numpy()


def _prompts_of(slices: Sequence[Slice]) -> np.ndarray:
    """The different prompts of all slices."""
    if not slices:
        return np.zeros(0, dtype=np.int64)
    return np.unique(np.concatenate([piece.prompt_ids for piece in slices]))


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
    ids = np.concatenate([piece.prompt_ids for piece in slices])
    rates = np.concatenate([piece.rates for piece in slices])
    used = ~left_out[ids]
    projected = predictor.project(take(E, ids[used]))
    predictor.fit_projected(projected, torch.from_numpy(rates[used]))


def _fit_attention(
    E: Embeddings, slices: Sequence[Slice], held_out: np.ndarray, rng: np.random.Generator, seed: int
) -> Fitted:
    """Of the other prompts, a fifth decides when to stop."""
    stopping = ~held_out & (rng.random(len(E)) < HELD_OUT)
    tasks = []
    for piece in slices:
        used = ~held_out[piece.prompt_ids]
        rows = piece.prompt_ids[used]
        rates = piece.rates[used]
        fitted_to = int((~stopping[rows]).sum())
        if fitted_to > 1:
            tasks.append(Groups(rows, rates, np.ones(len(rows), dtype=np.float32)))
    predictor = AttentionDifficultyPredictor(E.shape[1], seed=seed)
    predictor.fit_tasks(E, tasks, stopping, seed, EPOCHS)

    def predict(references: np.ndarray, p: torch.Tensor, queries: np.ndarray) -> np.ndarray:
        predictor.set_references(take(E, references), p)
        return predictor.predict(take(E, queries)).numpy()

    def finish() -> None:
        last = slices[-1]
        predictor.set_references(take(E, last.prompt_ids), torch.from_numpy(last.rates))

    return Fitted(predictor, predict, finish)


FITS = {"logistic": _fit_logistic, "attention": _fit_attention}


def _slices_of(path: Path, size: int) -> list[Slice]:
    """The groups of a run with a known prompt and success rate; of each slice, the newest one of a prompt."""
    table = read_groups(path)
    ids = table["prompt_id"].to_numpy()
    rates = table["success_rate"].to_numpy().astype(np.float32)
    known = (ids >= 0) & ~np.isnan(rates)
    step = table["step"].to_numpy()[known]
    ids = ids[known]
    rates = rates[known]
    if len(ids) and ids.max() >= size:
        raise PredictorError(
            f"{path} has a group of prompt {ids.max()}, and the dataset has {size} rows: give the dataset of that run."
        )
    order = np.argsort(step, kind="stable")
    slices = []
    for rows in np.array_split(order, max(1, round(len(order) / SLICE))):
        prompt_ids = ids[rows].astype(np.int64)
        kept = newest(prompt_ids)
        if len(kept):
            slices.append(Slice(prompt_ids[kept], rates[rows][kept]))
    return slices


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
    embeddings = embed_dataset(dataset, options.embedding)
    predictor, quality = fit_offline(options.kind, embeddings, slices, options.seed)
    save_predictor(predictor, options.output, options.embedding)
    print("Groups of held-out prompts, a fifth of all:")
    for row in quality:
        print(f"  {row.name:<20}Pearson {row.pearson:.3f}, mean absolute error {row.mean_absolute_error:.3f}")
    print(f"Written to {options.output}.")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:  # such as too few groups
        raise SystemExit(f"fit_predictor.py: error: {error}") from error
