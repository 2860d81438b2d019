"""
Predictors by name, from the folder that `save` wrote, or from a checkpoint of the authors of arXiv 2506.05316.

Importing this module registers the built-in predictors:

    logistic     logistic regression on principal components of the embeddings; fitted in milliseconds
    attention    the paper's: attention over reference groups
"""

from __future__ import annotations

import inspect
import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from trl_dataeff.difficulty.attention import AttentionDifficultyPredictor
from trl_dataeff.difficulty.base import (
    CONFIG_FILE,
    TENSORS_FILE,
    DifficultyPredictor,
    PredictorError,
    is_predictor,
    predictor_class,
    register_predictor,
    registered_predictors,
)
from trl_dataeff.difficulty.logistic import LogisticDifficultyPredictor
from trl_dataeff.version import FORMAT


__all__ = [
    "AttentionDifficultyPredictor",
    "DifficultyPredictor",
    "LogisticDifficultyPredictor",
    "PredictorError",
    "check_predictor",
    "is_predictor",
    "load_predictor",
    "make_predictor",
    "predictor_class",
    "register_predictor",
    "registered_predictors",
]

PREFIX = "regressor."


def make_predictor(
    name_or_path: str, embedding_width: int, seed: int = 0, /, **arguments: Any
) -> tuple[DifficultyPredictor, bool]:
    """
    Predictor for a run.

    Args:
        name_or_path (`str`): a registered name, or else a path for [`load_predictor`].
        embedding_width (`int`): width h of the run's embeddings.
        seed (`int`, *optional*, defaults to `0`): seed of a new predictor.
        arguments: arguments of the class, for a registered name.

    Returns:
        `tuple[DifficultyPredictor, bool]`: the predictor, and whether it is new. What was loaded was fitted before, and
        its slow part need not be fitted in the run.

    Raises:
        PredictorError: there is no such predictor, it cannot be read, or it takes no such argument.
    """
    if not is_predictor(name_or_path):
        return _load_without_arguments(name_or_path, arguments), False
    cls = predictor_class(name_or_path)
    _check_arguments(cls, arguments)
    try:
        return cls.create(embedding_width, seed, **arguments), True
    except TypeError as error:
        raise PredictorError(
            f"The predictor {name_or_path!r} cannot be created with the arguments {arguments} ({error}). Correct them; "
            f"if {cls.__name__} needs the width of embeddings or a seed, override its `create`."
        ) from error


def check_predictor(name_or_path: str, /, **arguments: Any) -> None:
    """
    Raise the error that [`make_predictor`] would raise, before embeddings are there.

    Args:
        name_or_path (`str`): a registered name, or else a path for [`load_predictor`].
        arguments: arguments of the class, for a registered name.

    Raises:
        PredictorError: there is no such predictor, it cannot be read, or it takes no such argument.
    """
    if is_predictor(name_or_path):
        _check_arguments(predictor_class(name_or_path), arguments)
    else:
        _load_without_arguments(name_or_path, arguments)


def load_predictor(path: str | Path) -> DifficultyPredictor:
    """
    Read a predictor.

    Args:
        path (`str` or `Path`): a folder that `save` wrote, or a checkpoint file of the paper's authors. The latter gives
            an [`AttentionDifficultyPredictor`] with its towers and calibration, and without references. Nothing but
            tensors is unpickled.

    Raises:
        PredictorError: there is no predictor, its class is not registered, or it is corrupt.
    """
    folder = Path(path).expanduser()
    if folder.is_file():
        return _read_published(folder)
    if not (folder / CONFIG_FILE).is_file():
        raise PredictorError(
            f"There is no predictor at {str(path)!r}: neither a folder with {CONFIG_FILE}, as `trl-dataeff "
            "fit-predictor` writes it, nor a checkpoint file."
        )
    try:
        config = json.loads((folder / CONFIG_FILE).read_text())
        name, version, settings = config["predictor"], config["format"], config["settings"]
        if version != FORMAT:
            raise PredictorError(
                f"{folder} holds a predictor {name!r} of format {version}, written by trl_dataeff "
                f"{config['trl_dataeff']}; this version reads format {FORMAT}. Load it with that version."
            )
        predictor = _class_of(folder, name)(**settings)
        predictor.load_tensors(load_file(folder / TENSORS_FILE))
    except PredictorError:
        raise
    except (OSError, KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        raise PredictorError(
            f"The predictor in {folder} is corrupt ({type(error).__name__}: {error}). Copy or fit it again."
        ) from error
    predictor.embedding = config.get("embedding", "")
    return predictor


def _class_of(folder: Path, name: str) -> type[DifficultyPredictor]:
    try:
        return predictor_class(name)
    except PredictorError as error:
        raise PredictorError(f"The predictor in {folder} cannot be loaded: {error}") from error


def _load_without_arguments(path: str, arguments: dict[str, Any]) -> DifficultyPredictor:
    if Path(path).name == path and not Path(path).exists():  # meant as a name
        try:
            predictor_class(path)
        except PredictorError as error:
            raise PredictorError(f"{error} There is no predictor at the path {path!r} either.") from error
    predictor = load_predictor(path)
    if arguments:
        raise PredictorError(
            f"The predictor at {path!r} was fitted with arguments of its own and takes no others; got "
            f"{', '.join(sorted(arguments))}. Remove them, or name a registered predictor: "
            f"{', '.join(registered_predictors())}."
        )
    return predictor


def _check_arguments(cls: type[DifficultyPredictor], arguments: dict[str, Any]) -> None:
    signature = inspect.signature(cls)
    try:
        signature.bind_partial(**arguments)
    except TypeError as error:
        raise PredictorError(
            f"The predictor {cls.name!r} takes the arguments {', '.join(signature.parameters) or 'none'}; got "
            f"{', '.join(sorted(arguments))} ({error})."
        ) from error


# ---------------------------------------------------------------- published checkpoints


def _read_published(path: Path) -> AttentionDifficultyPredictor:
    """Towers and calibration of a published checkpoint. What it holds beside `regressor.*` is ignored."""
    checkpoint = _unpickle(path)
    state = checkpoint.get("model_state_dict") if isinstance(checkpoint, dict) else None
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        found = (
            ", ".join(map(str, list(checkpoint)[:8])) if isinstance(checkpoint, dict) else type(checkpoint).__name__
        )
        raise PredictorError(
            f"{path} is not a checkpoint of a difficulty predictor: it needs a dictionary of tensors under "
            f"`model_state_dict`, and holds {found or 'nothing'}."
        )
    ours = {name: value for name, value in state.items() if name.startswith(PREFIX)}
    embedding_width, width = _published_widths(path, ours)
    predictor = AttentionDifficultyPredictor(embedding_width, width)
    _check_published(path, ours, predictor.state_dict())
    predictor.load_state_dict(ours)
    return predictor


def _unpickle(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if not zipfile.is_zipfile(path):
            raise _unreadable(path, error) from error
        raise PredictorError(
            f"{path} holds pickled objects other than tensors, which could run any code, and is not loaded. Save its "
            "`model_state_dict` alone: torch.save({'model_state_dict': model.state_dict()}, path)."
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, AttributeError, IndexError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> PredictorError:
    reason = str(error).split("\n", 1)[0]
    return PredictorError(
        f"{path} ({path.stat().st_size} bytes) cannot be read as a torch checkpoint: it is truncated or something else "
        f"({type(error).__name__}: {reason}). Copy it again, or name another file."
    )


def _published_widths(path: Path, state: dict[str, torch.Tensor]) -> tuple[int, int]:
    """Widths of embeddings and projections, by the first linear layer of the query tower."""
    name = f"{PREFIX}sim_head.query_proj.1.weight"
    if name not in state:
        raise PredictorError(f"{path} lacks the parameter `{name}`; it is not a checkpoint of a difficulty predictor.")
    if state[name].ndim != 2:
        raise PredictorError(f"In {path} the parameter `{name}` has shape {tuple(state[name].shape)}, not (width, h).")
    width, embedding_width = state[name].shape
    return embedding_width, width


def _check_published(path: Path, given: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    missing, unknown = sorted(wanted.keys() - given.keys()), sorted(given.keys() - wanted.keys())
    if missing or unknown:
        what = [f"lacks {', '.join(missing)}"] if missing else []
        what += [f"has the unknown {', '.join(unknown)}"] if unknown else []
        raise PredictorError(
            f"The difficulty predictor in {path} {' and '.join(what)}: it is of another architecture."
        )
    for name, value in wanted.items():
        if given[name].shape != value.shape:
            raise PredictorError(
                f"In {path} the parameter `{name}` has shape {tuple(given[name].shape)}; towers whose first layer is "
                f"as wide as this one's need {tuple(value.shape)}."
            )
        if not bool(given[name].isfinite().all()):
            raise PredictorError(f"In {path} the parameter `{name}` has values that are not finite.")
