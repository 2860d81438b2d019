"""A start small enough for tests: it knows little, so the bounds of easy, learnable and unsolvable are moved."""

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.lab import pools
from benchmarks.lab.pretrain import StartRecipe, start_folder


#: A start that is trained in seconds
TINY = StartRecipe(hidden=32, layers=2, steps=150, batch_size=64, learning_rate=1e-2)


@pytest.fixture(scope="session")
def start(tmp_path_factory):
    return start_folder(TINY, tmp_path_factory.mktemp("cache"))


@pytest.fixture
def model(start):
    return AutoModelForCausalLM.from_pretrained(start)


@pytest.fixture(scope="session")
def tokenizer(start):
    return AutoTokenizer.from_pretrained(start)


@pytest.fixture
def tiny_bounds(monkeypatch):
    """Bounds under which the small start has cells of every kind, and few held-out prompts."""
    monkeypatch.setattr(pools, "EASY_FROM", 0.3)
    monkeypatch.setattr(pools, "LEARNABLE_RANGE", (0.003, 0.3))
    monkeypatch.setattr(pools, "UNSOLVABLE_UP_TO", 1e-4)
    monkeypatch.setattr(pools, "HELD_OUT", 64)
