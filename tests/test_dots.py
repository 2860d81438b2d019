"""DOTS: its weights and its draw against direct calculation, its selector on simulated prompts and in training."""

import itertools
import math
from decimal import Decimal, getcontext

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig
from trl import GRPOConfig

from tests.test_dynamic_sampling import Watched, mixed_reward
from tests.test_pool import visit
from tests.tiny import chat_dataset, even_length_reward, logged, plain_dataset, run
from trl_dataeff import DataEfficientGRPOConfig, DataEfficientGRPOTrainer, PromptPool
from trl_dataeff.difficulty.online import RollingDifficulty
from trl_dataeff.difficulty.loading import LogisticDifficultyPredictor
from trl_dataeff.difficulty.quality import PredictionRecord, pearson
from trl_dataeff.rollouts.group import EASY, EFFECTIVE, HARD
from trl_dataeff.selection import make_selector
from trl_dataeff.selection.dots import gumbel_top_k, log_weight_effective, log_weight_target
from trl_dataeff.selection.history import SuccessHistory
from trl_dataeff.validation import resolve_selection


getcontext().prec = 60


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@given(p=st.floats(1e-12, 1 - 1e-9), group_size=st.integers(2, 64), sharpness=st.floats(0.5, 8))
def test_effective_weight_to_sixty_digits(p, group_size, sharpness):
    exact = 1 - Decimal(p) ** group_size - (1 - Decimal(p)) ** group_size
    expected = sharpness * float(exact.ln())
    assert log_weight_effective(torch.tensor([p], dtype=torch.float64), group_size, sharpness).item() == pytest.approx(
        expected, rel=1e-9, abs=1e-12
    )


def test_effective_weight_is_symmetric_and_largest_in_the_middle():
    p = torch.linspace(0, 1, 101, dtype=torch.float64)
    weight = log_weight_effective(p, 8, 4.0)
    torch.testing.assert_close(weight, weight.flip(0))
    assert weight[[0, 100]].isneginf().all()
    assert weight.argmax() == 50
    assert (weight[1:51].diff() > 0).all()


def test_target_weight_by_hand():
    weight = log_weight_target(torch.tensor([0.0, 0.4, 0.5, 1.0]), 0.5, 0.1)
    torch.testing.assert_close(weight, torch.tensor([-5.0, -1.0, 0.0, -5.0], dtype=torch.float64), atol=1e-6, rtol=0)


@given(weights=st.lists(st.one_of(st.floats(-2000, 50), st.just(-math.inf)), min_size=1, max_size=30), data=st.data())
def test_a_draw_repeats_nothing_and_takes_what_has_no_weight_last(weights, data):
    n = data.draw(st.integers(0, len(weights)))
    ids = gumbel_top_k(torch.tensor(weights, dtype=torch.float64), n, generator()).tolist()
    assert len(set(ids)) == len(ids) == n
    weightless = [weights[i] == -math.inf for i in ids]
    assert weightless == sorted(weightless)
    if any(weightless):
        assert sum(not w for w in weightless) == sum(w != -math.inf for w in weights)


def test_frequencies_are_those_of_drawing_one_after_the_other():
    """Exact probabilities of every ordered pair, by enumeration: w_i / sum(w) and then w_j / (sum(w) - w_i)."""
    weights = np.array([0.05, 0.5, 0.3, 0.15])
    log_weights, rng, draws = torch.from_numpy(np.log(weights)) - 3, generator(5), 20_000
    counts = dict.fromkeys(itertools.permutations(range(4), 2), 0)
    for _ in range(draws):
        counts[tuple(gumbel_top_k(log_weights, 2, rng).tolist())] += 1
    for (i, j), count in counts.items():
        expected = weights[i] * weights[j] / (1 - weights[i])
        assert abs(count / draws - expected) < 4.5 * math.sqrt(expected * (1 - expected) / draws)


def test_at_the_papers_temperature_the_nearest_come_first():
    """In float32 the softmax of these weights is 0 but for a few, and a draw from it repeats or fails."""
    p = torch.linspace(0, 1, 1001)
    log_weights = log_weight_target(p, 0.5, 1e-3)
    assert (log_weights.float().softmax(0) == 0).sum() > 500
    chosen = p[gumbel_top_k(log_weights, 100, generator())]
    assert (chosen - 0.5).abs().max() < 0.1
    rest = p[gumbel_top_k(log_weights, 900, generator())]
    assert (rest - 0.5).abs().max() < 0.47


def test_ten_million_prompts():
    n = 10_000_000
    ids = gumbel_top_k(torch.zeros(n), 512, generator())
    assert len(ids.unique()) == 512
    assert ids.float().mean() / n == pytest.approx(0.5, abs=4 * math.sqrt(1 / 12 / 512))


@pytest.mark.parametrize("n", [-1, 4])
def test_impossible_draws_are_refused(n):
    with pytest.raises(ValueError, match="3 weights give from 0 to 3"):
        gumbel_top_k(torch.zeros(3), n)
    with pytest.raises(ValueError, match="NaN"):
        gumbel_top_k(torch.tensor([0.0, float("nan")]), 1)


VISITS = st.lists(
    st.lists(st.tuples(st.integers(0, 4), st.one_of(st.floats(0, 1), st.just(math.nan))), max_size=6), max_size=8
)


@given(windows=VISITS, prior=st.floats(0.5, 10), half_life=st.floats(0.5, 30), later=st.integers(0, 5))
def test_posterior_against_a_loop_over_visits(windows, prior, half_life, later):
    history, predicted = SuccessHistory(5, prior, half_life), np.linspace(0.1, 0.9, 5, dtype=np.float32)
    visits: list[tuple[int, int, float, int]] = []
    for window, groups in enumerate(windows):
        ids, rates = np.array([g[0] for g in groups], int), np.array([g[1] for g in groups], np.float32)
        trials = np.array([2 + i % 3 for i in range(len(groups))], np.float32)
        history.observe(ids, rates, trials, window)
        visits += [(window, i, r, t) for i, r, t in zip(ids, rates, trials, strict=True) if not math.isnan(r)]
    now = len(windows) + later
    estimate = history.estimate(predicted, now)
    for prompt in range(5):
        s, n = prior * predicted[prompt], prior
        for window, i, rate, trials in visits:
            if i == prompt:
                fade = 0.5 ** ((now - window) / half_life)
                s, n = s + fade * rate * trials, n + fade * trials
        assert estimate[prompt] == pytest.approx(s / n, abs=1e-5)
    assert estimate.dtype == np.float32


def test_the_record_keeps_the_newest_of_each_kind():
    record, rng = PredictionRecord(capacity=4), np.random.default_rng(0)
    predicted, observed = rng.random(30).astype(np.float32), rng.random(30).astype(np.float32)
    predicted[7] = np.nan
    uniform = np.arange(30) % 5 == 0
    for start in range(0, 30, 6):
        piece = slice(start, start + 6)
        record.add(predicted[piece], observed[piece], uniform[piece])
    newest = [i for i in range(30) if uniform[i]][-4:]
    chosen = [i for i in range(30) if not uniform[i] and i != 7][-4:]
    metrics = record.metrics()
    assert metrics["predictor/pearson_explored"] == pytest.approx(pearson(predicted[newest], observed[newest]))
    assert metrics["predictor/pearson_selected"] == pytest.approx(pearson(predicted[chosen], observed[chosen]))
    both = sorted(newest + chosen)
    assert metrics["predictor/mae"] == pytest.approx(np.abs(predicted[both] - observed[both]).mean())
    assert PredictionRecord().metrics() == {}


class Population:
    """400 prompts whose success rate is a function of their embedding, 70 % of them out of reach."""

    def __init__(self, seed: int = 0):
        rng = np.random.default_rng(seed)
        self.embeddings = rng.normal(size=(400, 12)).astype(np.float16)
        score = 3.0 * self.embeddings[:, 0].astype(float)
        self.p = 1 / (1 + np.exp(-(score - np.quantile(score, 0.7)) * 3))
        self.rng = rng

    def selector(self, name: str, **fields):
        config = DataEfficientGRPOConfig(
            "out", use_cpu=True, bf16=False, per_device_train_batch_size=128, num_generations=8, **fields
        )
        self.pool = PromptPool(400)
        return make_selector(name, self.pool, config, lambda: self.embeddings)

    def window(self, selector, step, rng, n=16):
        ids = selector.propose(n, rng)
        rates = (self.rng.random((n, 8)) < self.p[ids, None]).mean(axis=1)
        kinds = np.where(rates == 0, HARD, np.where(rates == 1, EASY, EFFECTIVE))
        groups = [visit(int(i), int(k), step, float(r)) for i, k, r in zip(ids, kinds, rates)]
        for group, predicted in zip(groups, selector.predict(ids)):
            group.predicted = float(predicted)
            group.rewards = np.zeros((8, 1))
        self.pool.observe(groups)
        selector.observe(groups, step)
        return ids, kinds


@pytest.mark.parametrize("name", ["dots", "dots+greso"])
def test_what_is_drawn_teaches_more_than_uniform(name):
    shares = {}
    for candidate in ("uniform", name):
        population, rng = Population(), generator()
        selector = population.selector(candidate)
        kinds = [population.window(selector, step, rng)[1] for step in range(20)]
        shares[candidate] = np.mean(np.concatenate(kinds[4:]) == EFFECTIVE)
    assert shares[name] > 1.8 * shares["uniform"]
    unseen = population.pool.visits == 0
    assert pearson(selector.estimate()[unseen], population.p[unseen]) > 0.8
    assert selector.metrics()["predictor/pearson"] > 0.5


def test_the_gate_skips_what_keeps_giving_nothing():
    population, rng = Population(), generator()
    selector = population.selector("dots+greso", dots_sharpness=0.1, exploration=0.0)  # nearly uniform proposals
    pool = population.pool
    dead = np.arange(0, 400, 2)
    for _ in range(8):
        pool.observe([visit(int(i), HARD, 0) for i in dead])
    chosen = np.concatenate([population.window(selector, step, rng)[0] for step in range(10)])
    assert np.isin(chosen, dead).mean() < 0.1
    assert selector.metrics()["prompts_skipped"] > 100
    assert selector.metrics()["p_hard"] == 0.5, "it adapts before it has looked at as many as there are"


def test_what_is_sure_to_give_nothing_still_comes_before_what_is_out():
    """With estimates of exactly 0 and 1, no prompt is proposed twice while others are left."""
    population, rng = Population(), generator()
    selector = population.selector("dots", exploration=0.5)
    selector._prior = np.where(np.arange(400) % 2, 1.0, 0.0).astype(np.float32)
    for _ in range(5):
        ids = selector.propose(80, rng)
        assert len(set(ids)) == 80
    assert len(selector._proposed) == len(set(selector._proposed)) == 400


def test_no_prompt_twice_in_a_window_while_there_are_others():
    population, rng = Population(), generator()
    selector = population.selector("dots")
    ids = np.concatenate([selector.propose(100, rng) for _ in range(4)])
    assert len(set(ids)) == 400
    assert len(set(selector.propose(16, rng))) == 16


def test_the_explored_share_is_uniform():
    """Also once estimates are settled: half of what is proposed covers easy, dead and teaching prompts alike."""
    population, rng = Population(), generator()
    selector = population.selector("dots", exploration=0.5, dots_objective="target")
    ids = [population.window(selector, step, rng)[0][:8] for step in range(150)]
    dead = population.p < 0.02
    share = np.isin(np.concatenate(ids[10:]), np.flatnonzero(dead)).mean()
    assert share == pytest.approx(dead.mean(), abs=0.05)


def dots(tmp_path, trainer_class=Watched, rewards=mixed_reward, **options):
    options = {"selection": "dots", "steps_per_generation": 2, "replay_fraction": 0.0, **options}
    return run(trainer_class, DataEfficientGRPOConfig, tmp_path, rewards=rewards, **options)


def test_predictions_are_made_before_the_rollout(tmp_path):
    """By an estimate taken when prompts are proposed, which cannot know what they will give."""

    class Asked(Watched):
        def _roll_out(self, ids, round_index, reference):
            before = self.ledger.selector.predict(ids)
            groups = super()._roll_out(ids, round_index, reference)
            np.testing.assert_array_equal([g.predicted for g in groups], before)
            return groups

    trainer = dots(tmp_path, trainer_class=Asked, dynamic_sampling=True, max_steps=16)
    table = pd.read_parquet(tmp_path / "dataeff" / "groups.parquet")
    first = table["step"] == 0
    assert table["predicted"][first].isna().all()
    assert table["predicted"][~first].between(0, 1).all()
    logs = [log for log in trainer.state.log_history if "dataeff/predictor/mae" in log]
    seen = table[~first & table["success_rate"].notna()]
    assert logs[-1]["dataeff/predictor/mae"] == pytest.approx(
        (seen["predicted"] - seen["success_rate"]).abs().mean(), abs=1e-4
    )


@pytest.mark.parametrize("replay", [0.0, 0.5])
def test_the_papers_reference_set(tmp_path, replay):
    options = {"dots_reference": "paper", "dots_reference_size": 6, "dots_refresh_windows": 2, "max_steps": 16}
    trainer = dots(tmp_path, rewards=even_length_reward, replay_fraction=replay, **options)
    table = pd.read_parquet(tmp_path / "dataeff" / "groups.parquet")
    references = table[table["source"] == "reference"]
    assert references.groupby("step").size().to_dict() == {0: 6, 4: 6, 8: 6, 12: 6}
    assert (table.groupby("step")["prompt_id"].nunique() == table.groupby("step").size()).all()
    for collection in trainer.collections:
        taught = [g for g in collection.fresh if g.reference and g.effective]
        assert all(not g.effective or (g.reference and not replay) for g in collection.dropped)
        for group in taught:  # nothing effective that was paid for is thrown away
            if replay:
                assert any(g.prompt_id == group.prompt_id for g in trainer.ledger.buffer.groups)
        if not replay:  # they make up at most half of a window
            assert sum(g.reference for g in collection.trained) == min(len(taught), 2)
            assert not collection.surplus
        if replay:
            assert not any(g.reference for g in collection.trained if g not in collection.replayed)
    # what is predicted rests on the references alone: not known in the round that rolls them out, then known
    assert references["predicted"][references["step"] == 0].isna().all()
    assert table[table["source"] == "fresh"]["predicted"].notna().all()


SETTINGS = {
    "dots": {},
    "dots+greso": {"selection": "dots+greso"},
    "all three": {"selection": "dots+greso", "replay_fraction": 0.5},
    "all three, dynamic": {"selection": "dots+greso", "replay_fraction": 0.5, "dynamic_sampling": True},
    "target": {"dots_objective": "target"},
    "attention": {"dots_predictor": "attention"},
    "refresh": {"dots_refresh_windows": 3},
    "conversational": {"trainer": {"train_dataset": chat_dataset()}},
    "lora": {"trainer": {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])}},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_train(setting, tmp_path):
    trainer = dots(tmp_path, **SETTINGS[setting])
    assert trainer.state.global_step == 12
    assert all(np.isfinite(loss) for (loss,) in logged(trainer, "loss"))
    assert logged(trainer, "dataeff/predictor/mae")
    proposed = [{g.prompt_id for g in c.fresh} for c in trainer.collections]
    assert len(set.union(*proposed)) > 4


@pytest.mark.parametrize("setting", ["all three", "attention", "refresh"])
def test_resume_is_exact(tmp_path, setting):
    options = {**SETTINGS[setting], "save_strategy": "steps", "save_steps": 5, "max_steps": 14}
    whole = dots(tmp_path / "whole", trainer_class=DataEfficientGRPOTrainer, **options)
    resumed = dots(tmp_path / "resumed", trainer_class=DataEfficientGRPOTrainer, train=False, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-5"))
    names = (
        "loss",
        "grad_norm",
        "reward",
        "dataeff/predictor/mae",
        "dataeff/rollouts_generated",
        "dataeff/success_rate",
    )
    assert logged(whole, *names) == logged(resumed, *names)


def test_other_embeddings_on_resume_are_said_and_the_run_goes_on(tmp_path, caplog_transformers):
    options = {"save_strategy": "steps", "save_steps": 5, "max_steps": 8}
    dots(tmp_path / "whole", **options)

    class Elsewhere(Watched):
        def _embed(self):
            return super()._embed()[:] * np.float16(1.01)

    resumed = dots(tmp_path / "resumed", trainer_class=Elsewhere, train=False, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-5"))
    assert resumed.state.global_step == 8
    assert any("embeddings are not those of the run" in r.message for r in caplog_transformers.records)


def test_a_predictor_of_another_width_or_none_at_all_is_refused(tmp_path):
    predictor = LogisticDifficultyPredictor()
    predictor.fit(torch.randn(40, 9), torch.rand(40))
    predictor.save(tmp_path / "predictor")
    with pytest.raises(ValueError, match=r"width 9.*width 32"):
        dots(tmp_path, dots_predictor=str(tmp_path / "predictor"))
    with pytest.raises(ValueError, match="There is no predictor at"):
        dots(tmp_path, dots_predictor="nowhere", train=False)


def test_a_predictor_that_was_fitted_before_is_there_from_the_start(tmp_path):
    population = Population()
    predictor = LogisticDifficultyPredictor()
    predictor.fit(population.embeddings, torch.from_numpy(population.p))
    rolling = RollingDifficulty(population.embeddings, predictor)
    assert pearson(rolling.refresh(0), population.p) > 0.9


def test_the_papers_reference_set_is_refused_where_no_round_can_be_made(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": f"{i:02d}"}], "image": None} for i in range(24)]
    with pytest.raises(ValueError, match="Use `dots_reference='rolling'`"):
        dots(tmp_path, train=False, dots_reference="paper", trainer={"train_dataset": Dataset.from_list(rows)})


def test_what_changing_one_import_gives(tmp_path):
    """A plain `GRPOConfig` on text prompts: DOTS and GRESO, and half of each batch replayed; else what can be had."""
    trainer = run(DataEfficientGRPOTrainer, GRPOConfig, tmp_path, rewards=even_length_reward, steps_per_generation=2)
    assert trainer.selection == "dots"
    assert logged(trainer, "dataeff/rollouts_replayed")[-1][0] > 0
    stream = {"train_dataset": plain_dataset().to_iterable_dataset()}
    streaming = run(DataEfficientGRPOTrainer, GRPOConfig, tmp_path, max_steps=1, trainer=stream)
    assert streaming.selection == "uniform"


@pytest.mark.parametrize(
    ("fields", "obstacle", "sharded", "expected"),
    [
        ({}, None, False, "dots"),
        ({}, "images", False, "uniform"),
        ({}, None, True, "greso"),
        ({"dots_embedding": "some/model"}, None, True, "dots"),
        ({"selection": "greso"}, "images", True, "greso"),
    ],
)
def test_what_auto_stands_for(fields, obstacle, sharded, expected):
    config = DataEfficientGRPOConfig("out", use_cpu=True, bf16=False, **fields)
    assert resolve_selection(config, obstacle, sharded=sharded) == expected


def test_a_stream_is_refused(tmp_path):
    with pytest.raises(ValueError, match="streaming"):
        dots(tmp_path, train=False, trainer={"train_dataset": plain_dataset().to_iterable_dataset()})
