"""Which prompts to roll out next."""

from trl_dataeff.config import DataEfficientGRPOConfig
from trl_dataeff.pool import PromptPool
from trl_dataeff.selection.base import Selector
from trl_dataeff.selection.greso import GresoController, GresoSelector
from trl_dataeff.selection.uniform import UniformSelector


def make_selector(name: str, pool: PromptPool, config: DataEfficientGRPOConfig) -> Selector:
    """The selector that `selection=name` stands for, with the settings of `config`."""
    if name == "uniform":
        assert config.generation_batch_size is not None
        batch = config.generation_batch_size // config.num_generations
        return UniformSelector(len(pool), batch, config.shuffle_dataset)
    if name == "greso":
        controller = GresoController(
            config.greso_p_init,
            config.greso_p_step,
            config.greso_p_min,
            config.greso_p_max,
            config.greso_target_zero_variance,
            config.greso_easy_share,
        )
        return GresoSelector(pool, controller)
    raise ValueError(f"There is no selector {name!r} in this version.")


__all__ = ["GresoController", "GresoSelector", "Selector", "UniformSelector", "make_selector"]
