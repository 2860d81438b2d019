"""Fixtures of the command's tests."""

from __future__ import annotations

import datasets.config
import pytest

from tests.factories import save_tiny


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory) -> str:
    """Folder of a tiny model and its tokenizer."""
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write a file in the current folder, which is an empty one; returns its name."""
    monkeypatch.chdir(tmp_path)

    def _write(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        return name

    return _write


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """No test reads what another one has loaded, and none leaves anything in the user's cache."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
