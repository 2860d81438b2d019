"""Predictors by name: registered by the decorator or by an entry point, made, checked, saved and loaded."""

from __future__ import annotations

import sys
import types
from importlib import metadata

import numpy as np
import pytest
import torch

from tests.factories import difficulty_problem
from trl_dataeff.difficulty.base import DifficultyPredictor, PredictorError, register_predictor
from trl_dataeff.difficulty.loading import (
    AttentionDifficultyPredictor,
    LogisticDifficultyPredictor,
    check_predictor,
    load_predictor,
    make_predictor,
    predictor_class,
    registered_predictors,
)
from trl_dataeff.difficulty.online import RollingDifficulty


N = 160
E, P = difficulty_problem(N)
RATES = P.numpy()


@register_predictor("test-ridge")
class Ridge(DifficultyPredictor):
    """
    A linear regression that implements the abstract methods and no other. What `project` gives depends on the fit, and
    before a fit there is nothing to project on.
    """

    def __init__(self, l2: float = 1.0):
        self.l2 = l2
        self.mean = self.coefficients = torch.zeros(0)

    def fit(self, E, p, weight=None):
        X = torch.as_tensor(np.asarray(E)).double()
        weight = (torch.ones(len(p)) if weight is None else weight).double()
        mean = (weight[:, None] * X).sum(0) / weight.sum()
        X = (X - mean) * weight.sqrt()[:, None]
        y = (p.double() - 0.5) * weight.sqrt()
        self.mean = mean.float()
        self.coefficients = torch.linalg.solve(X.T @ X + self.l2 * torch.eye(X.shape[1]).double(), X.T @ y).float()

    def project(self, E):
        assert self.fitted
        return (torch.as_tensor(np.asarray(E)).float() - self.mean) @ self.coefficients[:, None]

    def predict_projected(self, Z):
        return (0.5 + Z[:, 0]).clamp(0, 1)

    @property
    def fitted(self):
        return len(self.coefficients) > 0

    @property
    def embedding_width(self):
        return len(self.mean)

    def settings(self):
        return {"l2": self.l2}

    def tensors(self):
        return {"mean": self.mean, "coefficients": self.coefficients}

    def load_tensors(self, tensors):
        self.mean, self.coefficients = tensors["mean"], tensors["coefficients"]


class Offered(Ridge):
    """What another package offers; not registered by a decorator."""


class Decorated(Ridge):
    """Registered by a decorator while its module is imported."""


@pytest.fixture
def offer(monkeypatch):
    """Offers `value` as an entry point called `name`, of the distribution `package`."""
    points: list[metadata.EntryPoint] = []

    def entry_points(**given):
        return metadata.EntryPoints(points).select(**given)

    def call(name, value, package="their-package", group="trl_dataeff.predictors"):
        point = metadata.EntryPoint(name, value, group)
        distribution = types.SimpleNamespace(name=package)
        points.append(point._for(distribution))

    monkeypatch.setattr(metadata, "entry_points", entry_points)
    return call


@pytest.fixture(autouse=True)
def _registry_kept(monkeypatch):
    from trl_dataeff.difficulty import base

    monkeypatch.setattr(base._PREDICTORS, "_classes", dict(base._PREDICTORS._classes))
    yield
    if "name" in Offered.__dict__:
        del Offered.name


# ---------------------------------------------------------------- names


def test_the_decorator_names_the_class():
    assert Ridge.name == "test-ridge"
    assert predictor_class("test-ridge") is Ridge
    assert predictor_class("logistic") is LogisticDifficultyPredictor
    assert predictor_class("attention") is AttentionDifficultyPredictor
    assert {"attention", "logistic", "test-ridge"} <= set(registered_predictors())
    assert registered_predictors() == sorted(registered_predictors())


def test_a_name_belongs_to_one_class():
    register_predictor("test-ridge")(Ridge)  # again, as by a second import
    with pytest.raises(PredictorError, match=r"'logistic' belongs to .*LogisticDifficultyPredictor already.*Offered"):
        register_predictor("logistic")(Offered)
    assert predictor_class("logistic") is LogisticDifficultyPredictor
    assert Offered.name == "test-ridge", "nothing was changed"


@pytest.mark.parametrize(("name", "cls"), [("", Offered), ("new", dict), ("new", Ridge())])
def test_only_predictors_are_registered(name, cls):
    with pytest.raises(PredictorError, match="needs a name and is a subclass of DifficultyPredictor"):
        register_predictor(name)(cls)


def test_an_unknown_name_says_which_there_are(offer):
    offer("theirs", "no.such.module:Class")
    with pytest.raises(PredictorError) as caught:
        predictor_class("logistc")
    message = str(caught.value)
    assert "no predictor 'logistc'; known are 'attention', 'logistic', 'test-ridge', 'theirs'." in message
    assert "Did you mean 'logistic'?" in message
    assert "@register_predictor('logistc')" in message
    assert "'trl_dataeff.predictors'" in message
    with pytest.raises(PredictorError) as caught:
        predictor_class("zzz")
    assert "Did you mean" not in str(caught.value)


# ---------------------------------------------------------------- entry points


def test_an_entry_point_is_imported_when_it_is_asked_for(offer):
    offer("theirs", f"{__name__}:Offered")
    offer("broken", "no.such.module:Class")
    offer("elsewhere", f"{__name__}:Offered", group="other.group")
    assert {"theirs", "broken"} <= set(registered_predictors())
    assert "elsewhere" not in registered_predictors()
    assert Offered.name == "test-ridge"
    assert predictor_class("theirs") is Offered
    assert Offered.name == "theirs"
    assert predictor_class("theirs") is Offered


def test_an_entry_point_whose_module_registers_it(offer, monkeypatch):
    module = types.ModuleType("their_module")

    class Theirs(Ridge):
        pass

    def load(name):
        register_predictor("theirs")(Theirs)
        return Theirs

    module.__getattr__ = load
    monkeypatch.setitem(sys.modules, "their_module", module)
    offer("theirs", "their_module:Theirs")
    assert predictor_class("theirs") is Theirs
    offer("alias", "their_module:Theirs")
    with pytest.raises(PredictorError, match=r"'alias' of their-package .* registered as 'theirs' in its own code"):
        predictor_class("alias")


def test_entry_points_that_fail_name_their_package(offer):
    offer("missing", "no.such.module:Class")
    with pytest.raises(
        PredictorError, match=r"'missing' of their-package \(entry point 'no\.such\.module:Class'.*Mod"
    ):
        predictor_class("missing")
    offer("function", f"{__name__}:difficulty_problem")
    with pytest.raises(PredictorError, match=r"their-package .* not a subclass of DifficultyPredictor"):
        predictor_class("function")
    offer("twice", f"{__name__}:Offered", "one-package")
    offer("twice", f"{__name__}:Decorated", "another-package")
    with pytest.raises(PredictorError, match=r"Several installed packages .*one-package.*another-package"):
        predictor_class("twice")


# ---------------------------------------------------------------- for a run


def test_registered_predictors_are_made_for_a_run():
    logistic, new = make_predictor("logistic", 40, 3, components=5)
    assert (type(logistic), logistic.components, new) == (LogisticDifficultyPredictor, 5, True)
    attention, new = make_predictor("attention", 40, 3, width=8)
    assert (type(attention), attention.embedding_width, attention.width, new) == (
        AttentionDifficultyPredictor,
        *(40, 8, True),
    )
    same = AttentionDifficultyPredictor(40, width=8, seed=3)
    assert torch.equal(attention.project(E), same.project(E))
    ridge, new = make_predictor("test-ridge", 40, 3, l2=2.0)
    assert (type(ridge), ridge.l2, new) == (Ridge, 2.0, True)


def test_a_path_is_loaded(tmp_path):
    predictor = Ridge()
    predictor.fit(E, P)
    predictor.save(tmp_path / "saved")
    loaded, new = make_predictor(str(tmp_path / "saved"), 40)
    assert torch.equal(loaded.predict(E), predictor.predict(E))
    assert not new
    check_predictor(str(tmp_path / "saved"))
    for function in (check_predictor, lambda path, **given: make_predictor(path, 40, **given)):
        with pytest.raises(PredictorError, match="takes no others; got l2"):
            function(str(tmp_path / "saved"), l2=1.0)


@pytest.mark.parametrize("function", [check_predictor, lambda name, **given: make_predictor(name, 40, **given)])
def test_wrong_names_and_arguments(function, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        PredictorError, match=r"no predictor 'logistc'.*Did you mean 'logistic'.*at the path 'logistc'"
    ):
        function("logistc")
    with pytest.raises(PredictorError, match=r"There is no predictor at 'some/folder'"):
        function("some/folder")
    with pytest.raises(PredictorError, match=r"'logistic' takes the arguments components, l2; got .*ridge"):
        function("logistic", l2=1.0, ridge=2.0)
    with pytest.raises(PredictorError, match="at least 1"):
        make_predictor("logistic", 40, components=0)
    with pytest.raises(PredictorError, match="'attention' cannot be created"):
        make_predictor("attention", 40, embedding_width=30)
    (tmp_path / "logistc").mkdir()
    with pytest.raises(PredictorError, match="There is no predictor at 'logistc': neither a folder"):
        function("logistc")


def test_a_class_that_is_not_registered_is_not_saved(tmp_path):
    class Unnamed(Ridge):
        pass

    with pytest.raises(PredictorError, match="Unnamed is not registered"):
        Unnamed().save(tmp_path)
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- a third party's in a run


def run(difficulty: RollingDifficulty, batches: range) -> list[np.ndarray]:
    predictions = []
    for batch in batches:
        ids = np.random.default_rng(batch).choice(N, 16, replace=False)
        difficulty.observe(ids, RATES[ids], batch)
        predictions += [difficulty.refresh(batch), difficulty.predict_with_references(ids, RATES[ids], batch)]
    return predictions


def test_the_abstract_methods_are_enough_in_a_run():
    difficulty = RollingDifficulty(E.numpy(), Ridge(), half_life=4.0)
    assert difficulty.capacity == Ridge().capacity(1) == 2048
    assert Ridge().capacity(300) == 4800
    np.testing.assert_array_equal(difficulty.refresh(0), np.full(N, 0.5, np.float32))
    run(difficulty, range(1, 9))
    ids = difficulty.ids
    weight = 0.5 ** (torch.from_numpy(9 - difficulty.batches) / 4.0)
    expected = Ridge()
    expected.fit(E[ids], torch.from_numpy(difficulty.rates), weight.float())
    predicted = difficulty.refresh(9)
    np.testing.assert_allclose(predicted, expected.predict(E).numpy(), atol=1e-5)
    assert predicted.dtype == np.float32
    assert np.corrcoef(predicted, RATES)[0, 1] > 0.7
    np.testing.assert_array_equal(difficulty.predict_with_references(ids[:0], RATES[:0]), predicted)


def test_it_survives_a_checkpoint_and_a_folder(tmp_path):
    difficulty = RollingDifficulty(E.numpy(), Ridge(), half_life=4.0)
    run(difficulty, range(1, 5))
    state = difficulty.state_dict()
    assert {"predictor.mean", "predictor.coefficients"} <= set(state)
    restored = RollingDifficulty(E.numpy(), Ridge(), half_life=4.0)
    restored.load_state_dict(state)
    empty = np.array([], dtype=np.int64)
    np.testing.assert_array_equal(
        restored.predict_with_references(empty, empty), difficulty.predict_with_references(empty, empty)
    )
    difficulty.predictor.save(tmp_path)
    loaded = load_predictor(tmp_path)
    assert type(loaded) is Ridge
    assert torch.equal(loaded.predict(E), difficulty.predictor.predict(E))
    for one, other in zip(run(restored, range(5, 8)), run(difficulty, range(5, 8))):
        np.testing.assert_array_equal(one, other)


def test_a_predictor_that_was_fitted_before_predicts_from_the_start():
    predictor = Ridge()
    predictor.fit(E, P)
    expected = predictor.predict(E).numpy()
    np.testing.assert_array_equal(RollingDifficulty(E.numpy(), predictor).refresh(0), expected)


class Slow(Ridge):
    """Counts calls; refitted when there are 32 groups."""

    def __init__(self):
        super().__init__()
        self.calls: list = []

    def start(self, E):
        self.calls.append(("start", E.shape))

    def refit(self, groups, seed):
        self.calls.append(("refit", len(groups), seed))
        return len(groups) >= 32

    def project(self, E):
        self.calls.append(("project", len(E)))
        return super().project(E)

    def update(self, groups):
        assert torch.equal(groups.embeddings(), E[groups.ids])
        if len(groups):
            self.fit(groups.embeddings(), groups.p, groups.weight)
            self.calls.append(("update", groups.projections().shape))
        return False

    def predict_pool(self, Z, groups):
        self.calls.append(("predict", len(Z), len(groups)))
        return super().predict_pool(Z, groups)


def test_when_each_method_is_called():
    predictor = Slow()
    difficulty = RollingDifficulty(E.numpy(), predictor, fit_every=2, seed=7)
    for batch in range(1, 6):
        ids = np.arange(16 * batch, 16 * batch + 16)
        difficulty.observe(ids, RATES[ids], batch)
        difficulty.refresh(batch)
    assert predictor.calls == [
        ("start", (N, 40)),
        *[("refit", 16, 8), ("project", N), ("update", (16, 1)), ("predict", N, 16)],
        *[("refit", 32, 9), ("project", N), ("update", (32, 1)), ("predict", N, 32)],
        *[("update", (48, 1)), ("predict", N, 48)],
        *[("refit", 64, 11), ("project", N), ("update", (64, 1)), ("predict", N, 64)],
        *[("update", (80, 1)), ("predict", N, 80)],
    ]


def test_without_the_predictors_arrays_only_groups_are_restored():
    difficulty = RollingDifficulty(E.numpy(), LogisticDifficultyPredictor(4))
    run(difficulty, range(1, 4))
    other = E.flip(1).contiguous().numpy()
    restored = RollingDifficulty(other, LogisticDifficultyPredictor(4))
    basis = restored.predictor.basis.clone()
    restored.load_state_dict(difficulty.state_dict(), predictor=False)
    assert torch.equal(restored.predictor.basis, basis)
    np.testing.assert_array_equal(restored.ids, difficulty.ids)
    assert not restored.predictor.fitted
