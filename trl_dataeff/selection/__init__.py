"""Which prompts to roll out next."""

from trl_dataeff.selection.base import Selector
from trl_dataeff.selection.uniform import UniformSelector


__all__ = ["Selector", "UniformSelector"]
