"""
Predictors of success rates. All keep the contract of [`DifficultyPredictor`]: `fit(E, p, weight)`, `predict(E)`,
`save(folder)`, `load(folder)`.

    LogisticDifficultyPredictor     on principal components of the embeddings; fitted in milliseconds
    AttentionDifficultyPredictor    the one of arXiv 2506.05316: attention over reference groups

[`load_predictor`] reads either from its folder, or the latter from a checkpoint of the paper's authors.
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file

from trl_dataeff.difficulty.attention import AttentionDifficultyPredictor
from trl_dataeff.difficulty.base import (
    CONFIG_FILE,
    FORMAT,
    TENSORS_FILE,
    DifficultyPredictor,
    Embeddings,
    PredictorError,
)
from trl_dataeff.difficulty.logistic import LogisticDifficultyPredictor


_CLASSES = {cls.__name__: cls for cls in (LogisticDifficultyPredictor, AttentionDifficultyPredictor)}


def load_predictor(path: str | Path) -> DifficultyPredictor:
    """
    Read a predictor.

    Args:
        path (`str` or `Path`): a folder that `save` wrote, or a checkpoint file of the paper's authors.

    Raises:
        PredictorError: there is none, or it is damaged.
    """
    folder = Path(path).expanduser()
    if folder.is_file():
        return AttentionDifficultyPredictor.from_published(folder)
    if not (folder / CONFIG_FILE).is_file():
        raise PredictorError(
            f"There is no predictor at {str(path)!r}: neither a folder with {CONFIG_FILE}, as `trl-dataeff "
            "fit-predictor` writes it, nor a checkpoint file."
        )
    try:
        config = json.loads((folder / CONFIG_FILE).read_text())
        name, version, settings = config["class"], config["format"], config["settings"]
        if version != FORMAT or name not in _CLASSES:
            raise PredictorError(
                f"{folder} holds a {name} of format {version}, written by trl_dataeff {config['trl_dataeff']}; this "
                f"version reads format {FORMAT} of {' and '.join(_CLASSES)}. Load it with that version."
            )
        predictor: DifficultyPredictor = _CLASSES[name](**settings)
        predictor.load_tensors(load_file(folder / TENSORS_FILE))
    except PredictorError:
        raise
    except (OSError, KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        raise PredictorError(
            f"The predictor in {folder} is damaged ({type(error).__name__}: {error}). Copy or fit it again."
        ) from error
    predictor.embedding = config.get("embedding", "")
    return predictor


__all__ = [
    "AttentionDifficultyPredictor",
    "DifficultyPredictor",
    "Embeddings",
    "LogisticDifficultyPredictor",
    "PredictorError",
    "load_predictor",
]
