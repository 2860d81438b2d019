"""The paper's predictor against the formulas of its paper and the parameter names of its authors' checkpoint."""

import math
from copy import deepcopy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from tests.factories.groups import difficulty_problem, generator
from trl_dataeff.difficulty import attention, load_predictor
from trl_dataeff.difficulty.attention import AttentionDifficultyPredictor, References
from trl_dataeff.difficulty.predictor import Groups, PredictorError


def parameters(seed: int = 0) -> dict[str, torch.Tensor]:
    """Those of a checkpoint, all of them random, so that each matters."""
    rng = generator(seed)
    shapes = AttentionDifficultyPredictor(24, width=16).state_dict().items()
    return {name: 0.5 * torch.randn(value.shape, generator=rng) for name, value in shapes}


def by_hand(w: dict[str, torch.Tensor], E: torch.Tensor, R: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Predictions of the authors' network for queries `E`, from references `R` with success rates `values`."""

    def layer(function, name: str, x: torch.Tensor, *size):
        return function(x, *size, w[f"regressor.{name}.weight"], w[f"regressor.{name}.bias"])

    def tower(name: str, x: torch.Tensor) -> torch.Tensor:
        x = layer(F.layer_norm, f"sim_head.{name}.0", x, (24,))
        for i in (1, 4):  # dropout follows each GELU
            x = F.gelu(layer(F.linear, f"sim_head.{name}.{i}", x))
        return layer(F.layer_norm, f"sim_head.{name}.8", layer(F.linear, f"sim_head.{name}.7", x), (16,))

    scores = tower("query_proj", E) @ tower("ref_proj", R).T / math.sqrt(16)
    p = (torch.softmax(scores, dim=-1) * values).sum(dim=-1).clamp(1e-4, 1 - 1e-4)
    moments = torch.stack([values.mean(), values.std()])
    out = layer(F.linear, "mlp.2", F.relu(layer(F.linear, "mlp.0", moments)))
    temperature = F.softplus(out[0]).clamp(0.01, 10)
    bias = torch.tanh(out[1])
    return torch.sigmoid(torch.log(p / (1 - p)) / temperature + bias)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 50), st.integers(2, 40), st.sampled_from([0.0, 0.3, 1.0]), st.sampled_from([0.0, 0.5, 1.0]))
def test_published_checkpoints_predict_what_their_code_predicts(tmp_path_factory, seed, k, scale, middle):
    """Also from references that all fail or succeed, whose average is clamped."""
    path = tmp_path_factory.mktemp("published") / "model.pt"
    w = parameters(seed)
    torch.save({"model_state_dict": w, "epoch": 20}, path)
    rng = generator(seed)
    E = torch.randn(30, 24, generator=rng)
    R = torch.randn(k, 24, generator=rng)
    spread = torch.rand(k, generator=rng) - 0.5
    values = (middle + scale * spread).clamp(0, 1)
    predictor = load_predictor(path)
    predictor.set_references(R, values)
    torch.testing.assert_close(predictor.predict(E), by_hand(w, E, R, values), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("regressor.sim_head.query_proj.1.weight", None),
        ("regressor.mlp.2.bias", None),
        ("regressor.sim_head.query_proj.9.weight", torch.ones(3)),
        ("regressor.mlp.0.weight", torch.ones(10, 3)),
        ("regressor.sim_head.query_proj.1.weight", torch.ones(3)),
        ("regressor.mlp.0.bias", torch.full((10,), math.nan)),
    ],
)
def test_other_architectures_are_rejected(tmp_path, name, value):
    state = {**parameters(), name: value}
    torch.save({"model_state_dict": {k: v for k, v in state.items() if v is not None}}, tmp_path / "m.pt")
    with pytest.raises(PredictorError, match=r"m\.pt"):
        load_predictor(tmp_path / "m.pt")


def test_files_that_are_no_checkpoint(tmp_path):
    path = tmp_path / "m.pt"
    torch.save({"model_state_dict": parameters()}, path)
    whole = path.read_bytes()
    for data in (b"not a checkpoint, but some text", b"", whole[: len(whole) * 99 // 100]):
        path.write_bytes(data)
        with pytest.raises(PredictorError, match=rf"m\.pt \({len(data)} bytes\)"):
            load_predictor(path)
    for content in (torch.ones(3), {"weights": torch.ones(2)}, {"model_state_dict": {"a": 1}}, {}):
        torch.save(content, path)
        with pytest.raises(PredictorError, match=r"m\.pt"):
            load_predictor(path)


class Payload:
    ran = False

    def __reduce__(self):
        return setattr, (Payload, "ran", True)


def test_pickled_objects_are_rejected_and_not_run(tmp_path):
    torch.save({"model_state_dict": parameters(), "optimizer": Payload()}, tmp_path / "m.pt")
    with pytest.raises(PredictorError, match="pickle"):
        load_predictor(tmp_path / "m.pt")
    assert not Payload.ran


def parts(n: int = 12, k: int = 7):
    model = AttentionDifficultyPredictor(10, width=8, seed=3)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.7, generator=generator(4))
    zq = torch.randn(n, 8, generator=generator(5))
    zr = torch.randn(k, 8, generator=generator(6))
    p = torch.rand(k, generator=generator(7))
    return model.requires_grad_(False), zq, References(zr, p, torch.ones(k))


def test_whole_weights_are_repetitions_up_to_the_unbiased_deviation():
    model, zq, references = parts()
    model.regressor.mlp[2].weight.zero_()  # the calibration sees nothing
    weight = torch.tensor([1.0, 2.0, 0.0, 3.0, 1.0, 1.0, 0.0])
    repeated = References(*(value.repeat_interleave(weight.long(), dim=0) for value in references))
    expected = model.attend(zq, repeated)
    for factor in (1, 10):
        torch.testing.assert_close(model.attend(zq, references._replace(weight=factor * weight)), expected)


def test_weighted_moments_by_hand():
    mean, deviation = attention.weighted_moments(torch.tensor([0.0, 1.0, 0.5]), torch.tensor([1.0, 1.0, 2.0]))
    assert mean == 0.5
    # sum of w (p - mean)^2 = (1 + 1) / 4 * 0.25 = 0.125; 1 - sum of w^2 = 1 - (1 + 1 + 4) / 16 = 0.625
    assert deviation == pytest.approx(math.sqrt(0.125 / 0.625))


def test_one_reference_and_none_left():
    model, zq, references = parts(k=1)
    got = model.attend(zq, references, torch.tensor([0] + [-1] * 11))
    assert bool(got.isfinite().all())
    out = model.regressor.mlp(torch.tensor([references.p[0], 0.0]))
    assert got[0] == pytest.approx(torch.sigmoid(torch.tanh(out[1])).item(), rel=1e-5)


def test_chunks_change_nothing(monkeypatch):
    model, zq, references = parts(n=50)
    exclude = torch.arange(50) % 8 - 1
    whole = model.attend(zq, references, exclude)
    monkeypatch.setattr(attention, "SCORES", 30)
    torch.testing.assert_close(model.attend(zq, references, exclude), whole)
    assert model.attend(zq[:0], references).shape == (0,)


def test_a_fit_repeats_and_leaves_the_global_random_state_alone():
    E, p = difficulty_problem(60)
    torch.manual_seed(0)
    state = torch.random.get_rng_state()
    models = [AttentionDifficultyPredictor(40, width=16, seed=1) for _ in range(3)]
    for model, seed in zip(models, [5, 5, 6]):
        model.fit(E, p, seed=seed, epochs=3)
    assert torch.equal(torch.random.get_rng_state(), state)
    one, two, other = (model.predict(E) for model in models)
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    assert not any(module.training for module in models[0].modules())


def test_every_parameter_learns_but_not_from_few_groups_and_a_further_fit_goes_on_from_the_last():
    E, p = difficulty_problem(200)
    model = AttentionDifficultyPredictor(40, width=16)
    start = deepcopy(model.state_dict())
    model.fit(E[:31], p[:31])
    assert model.fitted
    assert all(torch.equal(value, start[name]) for name, value in model.state_dict().items())
    model.fit(E, p, epochs=2)
    middle = deepcopy(model.state_dict())
    assert [name for name in start if torch.equal(start[name], middle[name])] == []
    model.fit(E, p, epochs=0)
    assert all(torch.equal(value, middle[name]) for name, value in model.state_dict().items())


def noise(n: int = 120) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels that cannot be learned."""
    E, _ = difficulty_problem(n)
    return E, torch.rand(n, generator=generator()).round()


class Noted(AttentionDifficultyPredictor):
    """Notes the losses that decide when to stop, and on which groups they are taken."""

    def held_out_loss(self, E, tasks, held_out):
        self.tasks = tasks
        self.held_out = held_out
        loss = super().held_out_loss(E, tasks, held_out)
        self.losses = [*getattr(self, "losses", []), loss]
        return loss


def test_held_out_groups_end_a_fit_that_only_learns_noise_and_choose_its_best_parameters():
    E, p = noise()
    weight = torch.ones(120)
    weight[::6] = 0
    model = Noted(40, width=32)
    model.fit(E, p, weight, epochs=50)
    losses = model.losses
    best = int(np.argmin(losses))
    assert len(losses) == best + 1 + attention.PATIENCE < 50
    assert losses[-1] > losses[best]
    assert model.held_out_loss(E, model.tasks, model.held_out) == losses[best]
    assert model.held_out.sum() == 20  # a fifth of those with a weight
    assert not model.held_out[::6].any()


def test_each_group_is_predicted_from_all_others():
    E, p = noise(40)
    model = AttentionDifficultyPredictor(40, width=32).requires_grad_(False)
    groups = np.arange(3, 40)
    weight = torch.rand(40, generator=generator(3)) + 0.1
    queries = groups[4:9]
    got = model.loss(E, Groups(np.arange(40), p.numpy(), weight.numpy()), queries, groups)
    predicted = []
    for i in queries:
        others = groups[groups != i]
        model.set_references(E[others], p[others], weight[others])
        predicted.append(model.predict(E[[i]]))
    bce = nn.functional.binary_cross_entropy(torch.cat(predicted), p[queries], reduction="none")
    share = weight[queries] / weight[queries].sum()
    assert got.item() == pytest.approx((bce * share).sum().item(), rel=1e-5)
