"""Which prompts to roll out next."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from transformers.utils import logging

from trl_dataeff.config import DataEfficientGRPOConfig
from trl_dataeff.difficulty.base import Embeddings
from trl_dataeff.difficulty.loading import DifficultyPredictor, make_predictor
from trl_dataeff.difficulty.online import RollingDifficulty
from trl_dataeff.selection.base import Selector
from trl_dataeff.selection.combined import DotsGresoSelector
from trl_dataeff.selection.dots import DotsSelector, ReferenceSet, log_weight_effective, log_weight_target
from trl_dataeff.selection.greso import GresoController, GresoGate, GresoSelector
from trl_dataeff.selection.history import SuccessHistory
from trl_dataeff.selection.pool import PromptPool
from trl_dataeff.selection.uniform import UniformSelector


logger = logging.get_logger(__name__)

FIT_EVERY = 16  # windows between two fits of the towers of an attention predictor that the run itself fits


def make_selector(
    name: str, pool: PromptPool, config: DataEfficientGRPOConfig, embed: Callable[[], Embeddings] | None = None
) -> Selector:
    """
    The selector that `selection=name` stands for, with the settings of `config`.

    Args:
        name (`str`): `"uniform"`, `"greso"`, `"dots"` or `"dots+greso"`.
        pool ([`PromptPool`]): the prompts and their history.
        config ([`DataEfficientGRPOConfig`]): the run's configuration.
        embed (`Callable`, *optional*): gives the embeddings of the pool's prompts, `(N, h)`; for DOTS.
    """
    if name == "uniform":
        return UniformSelector(len(pool), _batch_groups(config), config.shuffle_dataset)
    if name == "greso":
        return GresoSelector(pool, _controller(config))
    if name not in ("dots", "dots+greso") or embed is None:
        raise ValueError(f"There is no selector {name!r}, or it needs embeddings, and there are none.")
    options = _dots_options(config, embed())
    if name == "dots":
        return DotsSelector(**options)
    return DotsGresoSelector(**options, gate=GresoGate(pool, _controller(config)))


def _batch_groups(config: DataEfficientGRPOConfig) -> int:
    assert config.generation_batch_size is not None
    return config.generation_batch_size // config.num_generations


def _controller(config: DataEfficientGRPOConfig) -> GresoController:
    return GresoController(
        config.greso_p_init,
        config.greso_p_step,
        config.greso_p_min,
        config.greso_p_max,
        config.greso_target_zero_variance,
        config.greso_easy_share,
    )


def _dots_options(config: DataEfficientGRPOConfig, embeddings: Embeddings) -> dict:
    if config.dots_objective == "effective":
        weight = partial(log_weight_effective, group_size=config.num_generations, sharpness=config.dots_sharpness)
    else:
        weight = partial(log_weight_target, target=config.dots_target, temperature=config.dots_temperature)
    references = None
    if config.dots_reference == "paper":
        references = ReferenceSet(config.dots_reference_size, config.dots_refresh_windows)
    predictor, fitted_here = _predictor(config, embeddings.shape[1])
    difficulty = RollingDifficulty(
        embeddings,
        predictor,
        capacity=predictor.capacity(_batch_groups(config)),
        half_life=config.history_half_life,
        fit_every=FIT_EVERY if fitted_here else 0,
        seed=config.seed,
    )
    return {
        "difficulty": difficulty,
        "history": SuccessHistory(len(embeddings), config.history_prior, config.history_half_life),
        "log_weights": weight,
        "exploration": config.exploration,
        "refresh_windows": config.dots_refresh_windows,
        "references": references,
    }


def _predictor(config: DataEfficientGRPOConfig, width: int) -> tuple[DifficultyPredictor, bool]:
    """The predictor, and whether its towers are fitted in the run."""
    predictor, fitted_here = make_predictor(config.dots_predictor, width, config.seed)
    if predictor.embedding and predictor.embedding != config.dots_embedding:
        logger.warning(
            f"The predictor in {config.dots_predictor!r} was fitted to embeddings of {predictor.embedding!r}, and "
            f"`dots_embedding` is {config.dots_embedding!r}. Unless these are the same model, set it to the former."
        )
    return predictor, fitted_here


__all__ = [
    "DotsGresoSelector",
    "DotsSelector",
    "GresoController",
    "GresoGate",
    "GresoSelector",
    "Selector",
    "UniformSelector",
    "make_selector",
]
