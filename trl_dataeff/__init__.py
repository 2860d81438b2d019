from trl_dataeff.config import DataEfficientGRPOConfig
from trl_dataeff.version import __version__


__all__ = ["DataEfficientGRPOConfig", "__version__"]
