"""Predictors by name, and their folders."""

from __future__ import annotations

import copy
import inspect
import json
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from trl_dataeff.difficulty.attention import AttentionDifficultyPredictor
from trl_dataeff.difficulty.logistic import LogisticDifficultyPredictor
from trl_dataeff.difficulty.predictor import DifficultyPredictor, PredictorError
from trl_dataeff.difficulty.published import read_published
from trl_dataeff.utils import FORMAT, __version__, closest, write_atomically


CONFIG_FILE, TENSORS_FILE = "config.json", "predictor.safetensors"
#: `logistic`: logistic regression on principal components of the embeddings, fitted in milliseconds. `attention`: the paper's,
#: attention over reference groups.
PREDICTORS: dict[str, type[DifficultyPredictor]] = {
    "logistic": LogisticDifficultyPredictor,
    "attention": AttentionDifficultyPredictor,
}


def make_predictor(
    name_or_path: str | DifficultyPredictor,
    embedding_width: int = 1,
    seed: int = 0,
    arguments: dict[str, Any] | None = None,
) -> tuple[DifficultyPredictor, bool]:
    """
    Predictor for a run with embeddings of width `embedding_width`, and whether it is fitted in the run: the slow part of one
    that was fitted before need not be.

    Args:
        name_or_path (`str` or [`DifficultyPredictor`]): `"logistic"`, `"attention"`, a path for [`load_predictor`], or an
            instance, which is copied.
        embedding_width (`int`, *optional*, defaults to `1`), seed (`int`, *optional*, defaults to `0`), arguments (`dict`,
            *optional*): of a new predictor. The default finds every error below, before there are embeddings.

    Raises:
        PredictorError: the predictor is unknown, cannot be read, or does not take an argument.
    """
    arguments = arguments or {}
    if not isinstance(name_or_path, str | DifficultyPredictor):
        raise ValueError(
            f"`predictor` is a {type(name_or_path).__name__}; it takes 'logistic', 'attention', a path, or an instance."
        )
    is_new = isinstance(name_or_path, DifficultyPredictor) and not name_or_path.fitted
    if isinstance(name_or_path, DifficultyPredictor) or name_or_path not in PREDICTORS:
        predictor = load_predictor(name_or_path) if isinstance(name_or_path, str) else copy.deepcopy(name_or_path)
        if arguments:
            raise PredictorError(
                f"The predictor {name_or_path!r} takes no arguments; got {', '.join(sorted(arguments))}. Remove them, or name "
                f"{' or '.join(map(repr, PREDICTORS))}."
            )
        return predictor, is_new
    cls = PREDICTORS[name_or_path]
    parameters = inspect.signature(cls).parameters
    given_by_run = {"embedding_width": embedding_width, "seed": seed}
    known = [name for name in parameters if name not in given_by_run]
    for argument in arguments:
        if argument not in known:
            raise PredictorError(
                f"The predictor {name_or_path!r} has no argument `{argument}`.{closest(argument, known)} It takes {', '.join(known)}."
            )
    return cls(**arguments, **{name: value for name, value in given_by_run.items() if name in parameters}), True


def save_predictor(predictor: DifficultyPredictor, folder: str | Path, embedding: str = "") -> None:
    """
    Write `predictor.safetensors` and then `config.json` to a folder, which [`load_predictor`] reads. `embedding`, the model whose
    embeddings it was fitted to, is written down for its users.
    """
    folder = Path(folder)
    tensors = {key: value.detach().contiguous().clone() for key, value in predictor.tensors().items()}
    (name,) = [name for name, cls in PREDICTORS.items() if type(predictor) is cls]
    config = {
        "predictor": name,
        "format": FORMAT,
        "trl_dataeff": __version__,
        "embedding": embedding,
        "settings": predictor.settings(),
    }
    write_atomically(folder / TENSORS_FILE, partial(save_file, tensors))
    write_atomically(folder / CONFIG_FILE, lambda path: path.write_text(json.dumps(config, indent=2) + "\n"))


def load_predictor(path: str | Path) -> DifficultyPredictor:
    """
    Read a predictor from a folder that [`save_predictor`] wrote, or from a checkpoint file of the paper's authors, which gives
    an [`AttentionDifficultyPredictor`] with its towers and calibration, and without references. Nothing but tensors is
    unpickled. Raises a [`PredictorError`] if there is none, or it is corrupt or of another format.
    """
    folder = Path(path).expanduser()
    if folder.is_file():
        return read_published(folder)
    if not (folder / CONFIG_FILE).is_file():
        raise PredictorError(
            f"There is no predictor {str(path)!r}.{closest(str(path), PREDICTORS)} It takes {' or '.join(map(repr, PREDICTORS))}, a "
            f"folder with {CONFIG_FILE}, as `examples/fit_predictor.py` writes it, or a published checkpoint file."
        )
    try:
        config = json.loads((folder / CONFIG_FILE).read_text())
        if config["format"] != FORMAT:
            raise ValueError(f"it has format {config['format']} of trl_dataeff {config['trl_dataeff']}, not {FORMAT}")
        predictor = PREDICTORS[config["predictor"]](**config["settings"])
        predictor.load_tensors(load_file(folder / TENSORS_FILE))
    except (OSError, KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        raise PredictorError(
            f"The predictor in {folder} cannot be loaded ({type(error).__name__}: {error}). Copy it or fit one again, or install "
            "the version of this package that wrote it."
        ) from error
    return predictor
