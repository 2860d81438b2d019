"""Predictors by name or path; saving and loading them."""

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


CONFIG_FILE = "config.json"
TENSORS_FILE = "predictor.safetensors"
#: `logistic`: logistic regression on principal components of the embeddings, fitted in milliseconds. `attention`: the
#: paper's, attention over reference groups.
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
    Make the predictor of a run. Without `embedding_width` and `seed` it finds every error below, before there are
    embeddings.

    Args:
        name_or_path (`str` or [`DifficultyPredictor`]): `"logistic"`, `"attention"`, a path for [`load_predictor`], or
            an instance, which is copied.
        embedding_width (`int`, *optional*, defaults to `1`): width of the embeddings that a new predictor is for.
        seed (`int`, *optional*, defaults to `0`): seed of a new predictor.
        arguments (`dict[str, Any]`, *optional*): keyword arguments of a new predictor.

    Returns:
        `tuple[DifficultyPredictor, bool]`: the predictor, and whether it is to be fitted in the run: the slow part of
            one that was fitted before need not be.

    Raises:
        ValueError: `name_or_path` is neither a string nor a predictor.
        PredictorError: the predictor is unknown, cannot be read, or does not take an argument.
    """
    arguments = arguments or {}
    if isinstance(name_or_path, DifficultyPredictor):
        _check_no_arguments(name_or_path, arguments)
        return copy.deepcopy(name_or_path), not name_or_path.fitted
    if not isinstance(name_or_path, str):
        raise ValueError(
            f"`predictor` is a {type(name_or_path).__name__}; it takes 'logistic', 'attention', a path, or an "
            "instance."
        )
    if name_or_path not in PREDICTORS:
        predictor = load_predictor(name_or_path)
        _check_no_arguments(name_or_path, arguments)
        return predictor, False
    return _new_predictor(name_or_path, embedding_width, seed, arguments), True


def _new_predictor(name: str, embedding_width: int, seed: int, arguments: dict[str, Any]) -> DifficultyPredictor:
    cls = PREDICTORS[name]
    parameters = inspect.signature(cls).parameters
    given_by_run = {"embedding_width": embedding_width, "seed": seed}
    known = [parameter for parameter in parameters if parameter not in given_by_run]
    for argument in arguments:
        if argument not in known:
            hint = closest(argument, known)
            raise PredictorError(
                f"The predictor {name!r} has no argument `{argument}`.{hint} It takes {', '.join(known)}."
            )
    from_run = {parameter: value for parameter, value in given_by_run.items() if parameter in parameters}
    return cls(**arguments, **from_run)


def _check_no_arguments(predictor: str | DifficultyPredictor, arguments: dict[str, Any]) -> None:
    if arguments:
        given = ", ".join(sorted(arguments))
        raise PredictorError(
            f"The predictor {predictor!r} takes no arguments; got {given}. Remove them, or name {_names()}."
        )


def _names() -> str:
    return " or ".join(repr(name) for name in PREDICTORS)


def save_predictor(predictor: DifficultyPredictor, folder: str | Path, embedding: str = "") -> None:
    """
    Write `predictor.safetensors` and then `config.json` to a folder, which [`load_predictor`] reads.

    Args:
        predictor ([`DifficultyPredictor`]): of one of the classes in `PREDICTORS`.
        folder (`str` or `Path`): made if it does not exist.
        embedding (`str`, *optional*, defaults to `""`): the model whose embeddings it was fitted to, written down for
            its users.
    """
    folder = Path(folder)
    # safetensors requires that each tensor owns its memory
    tensors = {key: value.detach().contiguous().clone() for key, value in predictor.tensors().items()}
    config = {
        "predictor": _name_of(predictor),
        "format": FORMAT,
        "trl_dataeff": __version__,
        "embedding": embedding,
        "settings": predictor.settings(),
    }
    text = json.dumps(config, indent=2) + "\n"
    write_atomically(folder / TENSORS_FILE, partial(save_file, tensors))
    write_atomically(folder / CONFIG_FILE, lambda path: path.write_text(text))


def _name_of(predictor: DifficultyPredictor) -> str:
    (name,) = [name for name, cls in PREDICTORS.items() if type(predictor) is cls]
    return name


def load_predictor(path: str | Path) -> DifficultyPredictor:
    """
    Read a predictor. Nothing but tensors is unpickled.

    Args:
        path (`str` or `Path`): a folder that [`save_predictor`] wrote, or a checkpoint file of the authors of arXiv
            2506.05316, which gives an [`AttentionDifficultyPredictor`] with its towers and calibration, and without
            references.

    Returns:
        [`DifficultyPredictor`]: the predictor.

    Raises:
        PredictorError: there is none, or it is corrupt or of another format.
    """
    folder = Path(path).expanduser()
    if folder.is_file():
        return read_published(folder)
    if not (folder / CONFIG_FILE).is_file():
        hint = closest(str(path), PREDICTORS)
        raise PredictorError(
            f"There is no predictor {str(path)!r}.{hint} It takes {_names()}, a folder with {CONFIG_FILE}, as "
            "`examples/fit_predictor.py` writes it, or a published checkpoint file."
        )
    try:
        config = json.loads((folder / CONFIG_FILE).read_text())
        if config["format"] != FORMAT:
            raise ValueError(f"it has format {config['format']} of trl_dataeff {config['trl_dataeff']}, not {FORMAT}")
        cls = PREDICTORS[config["predictor"]]
        predictor = cls(**config["settings"])
        predictor.load_tensors(load_file(folder / TENSORS_FILE))
    except (OSError, KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        raise PredictorError(
            f"The predictor in {folder} cannot be loaded ({type(error).__name__}: {error}). Copy it or fit one again, "
            "or install the version of this package that wrote it."
        ) from error
    return predictor
