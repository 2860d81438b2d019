import pytest

from trl_dataeff.selection import base


@pytest.fixture
def registry(monkeypatch):
    """What a test registers is forgotten afterwards."""
    monkeypatch.setattr(base._SELECTORS, "_classes", dict(base._SELECTORS._classes))
    return base._SELECTORS
