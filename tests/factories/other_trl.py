"""TRL's trainer as another version of TRL might have it, and our trainer on top of it."""

import importlib.util
import inspect
import sys
from pathlib import Path

import pytest
import trl
from trl import GRPOTrainer

import trl_dataeff.compact.trainer
import trl_dataeff.trainer


def changed_trl(monkeypatch: pytest.MonkeyPatch, folder: Path, old: str, new: str) -> type[GRPOTrainer]:
    """TRL's trainer with a replacement in the source of its module, which is written to `folder`."""
    source = inspect.getsource(sys.modules[GRPOTrainer.__module__])
    assert old in source
    return load(monkeypatch, "trl.trainer.changed", source.replace(old, new), folder / "changed.py").GRPOTrainer


def ours_on(monkeypatch: pytest.MonkeyPatch, folder: Path, base: type[GRPOTrainer]) -> type[GRPOTrainer]:
    """
    Our trainer, both of its storeys, as it is when `base` stands in the place of TRL's while it is imported, from
    files in `folder`.
    """
    monkeypatch.setattr(trl, "GRPOTrainer", base)
    source = inspect.getsource(trl_dataeff.compact.trainer)
    lower = load(monkeypatch, f"trl_dataeff.compact_on_{base.__name__}", source, folder / "compact.py")
    monkeypatch.setattr(trl_dataeff.compact, "CompactGRPOTrainer", lower.CompactGRPOTrainer)
    source = inspect.getsource(trl_dataeff.trainer)
    return load(monkeypatch, f"trl_dataeff.on_{base.__name__}", source, folder / "ours.py").DataEfficientGRPOTrainer


def load(monkeypatch: pytest.MonkeyPatch, name: str, source: str, path: Path):
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module
