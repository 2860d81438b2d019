"""Predictors by name, to a folder and back."""

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
from trl_dataeff.difficulty.base import DifficultyPredictor, PredictorError
from trl_dataeff.difficulty.logistic import LogisticDifficultyPredictor
from trl_dataeff.difficulty.published import read_published
from trl_dataeff.utils import FORMAT, __version__, closest, write_atomically


CONFIG_FILE, TENSORS_FILE = "config.json", "predictor.safetensors"
#: `logistic`: logistic regression on principal components of the embeddings, fitted in milliseconds. `attention`: the paper's,
#: attention over reference groups.
PREDICTORS: dict[str, type[DifficultyPredictor]] = {
    "logistic": LogisticDifficultyPredictor,
    "attention": AttentionDifficultyPredictor,
}


def check_predictor(name_or_path: str | DifficultyPredictor, arguments: dict[str, Any] | None = None) -> None:
    """Raise the error that [`make_predictor`] would raise, before embeddings are there."""
    if isinstance(name_or_path, DifficultyPredictor):
        return
    if not isinstance(name_or_path, str):
        raise ValueError(
            f"`predictor` is a {type(name_or_path).__name__}; it takes 'logistic', 'attention', a path, or an instance."
        )
    cls = PREDICTORS.get(name_or_path)
    if cls is None:
        load_predictor(name_or_path)
        if arguments:
            raise PredictorError(
                f"The predictor at {name_or_path!r} was fitted with arguments of its own and takes no others; got "
                f"{', '.join(sorted(arguments))}. Remove them, or name {' or '.join(map(repr, PREDICTORS))}."
            )
        return
    known = [name for name in inspect.signature(cls).parameters if name not in ("embedding_width", "seed")]
    for argument in arguments or {}:
        if argument not in known:
            raise PredictorError(
                f"The predictor {name_or_path!r} has no argument `{argument}`.{closest(argument, known)} It takes {', '.join(known)}."
            )


def make_predictor(
    name_or_path: str | DifficultyPredictor,
    embedding_width: int,
    seed: int = 0,
    arguments: dict[str, Any] | None = None,
) -> tuple[DifficultyPredictor, bool]:
    """
    Predictor for a run with embeddings of width `embedding_width`, and whether it is fitted in the run: the slow part of one
    that was fitted before need not be.

    Args:
        name_or_path (`str` or [`DifficultyPredictor`]): `"logistic"`, `"attention"`, a path for [`load_predictor`], or an
            instance, which is copied.
        seed (`int`, *optional*, defaults to `0`), arguments (`dict`, *optional*): seed and arguments of a new predictor.

    Raises:
        PredictorError: there is no such predictor, it cannot be read, or it takes no such argument.
    """
    check_predictor(name_or_path, arguments)
    if isinstance(name_or_path, DifficultyPredictor):
        return copy.deepcopy(name_or_path), not name_or_path.fitted
    if name_or_path not in PREDICTORS:
        return load_predictor(name_or_path), False
    if name_or_path == "attention":
        return AttentionDifficultyPredictor(embedding_width, seed=seed, **(arguments or {})), True
    return PREDICTORS[name_or_path](**(arguments or {})), True


def save_predictor(predictor: DifficultyPredictor, folder: str | Path) -> None:
    """Write `predictor.safetensors` and then `config.json` to a folder, which [`load_predictor`] reads."""
    folder = Path(folder)
    tensors = {key: value.detach().cpu().contiguous().clone() for key, value in predictor.tensors().items()}
    (name,) = [name for name, cls in PREDICTORS.items() if type(predictor) is cls]
    config = {
        "predictor": name,
        "format": FORMAT,
        "trl_dataeff": __version__,
        "embedding": predictor.embedding,
        "settings": predictor.settings(),
    }
    write_atomically(folder / TENSORS_FILE, partial(save_file, tensors))
    write_atomically(folder / CONFIG_FILE, lambda path: path.write_text(json.dumps(config, indent=2) + "\n"))


def load_predictor(path: str | Path) -> DifficultyPredictor:
    """
    Read a predictor.

    Args:
        path (`str` or `Path`): a folder that [`save_predictor`] wrote, or a checkpoint file of the paper's authors. The latter
            gives an [`AttentionDifficultyPredictor`] with its towers and calibration, and without references. Nothing but
            tensors is unpickled. Raises a [`PredictorError`] if there is no predictor, or it is corrupt.
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
            raise PredictorError(
                f"{folder} holds a predictor of format {config['format']}, written by trl_dataeff "
                f"{config['trl_dataeff']}; this version reads format {FORMAT}. Load it with that version."
            )
        predictor = PREDICTORS[config["predictor"]](**config["settings"])
        predictor.load_tensors(load_file(folder / TENSORS_FILE))
    except PredictorError:
        raise
    except (OSError, KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        raise PredictorError(
            f"The predictor in {folder} is corrupt ({type(error).__name__}: {error}). Copy or fit it again."
        ) from error
    predictor.embedding = config.get("embedding", "")
    return predictor
