"""What a run says at its start: what is on, how to switch it off, and which options have no effect."""

import re
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

from tests.factories import make_trainer, messages, plain_dataset, tiny_model
from trl_dataeff import DataEfficientGRPOConfig, UniformSelector
from trl_dataeff.notice import OFF, active_dropout, announce_options
from trl_dataeff.replay.buffer import replay_groups
from trl_dataeff.rollouts.distributed import Processes
from trl_dataeff.selection import make_selector


SINGLE = Processes()


def config(tmp_path, **fields):
    return DataEfficientGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", **fields)


def announced(caplog, args, selector="uniform", reason=None, processes=SINGLE, **kwargs) -> list[str]:
    caplog.clear()
    announce_options(args, make_selector(selector), reason, processes, **kwargs)
    return messages(caplog)


def test_a_run_says_once_what_is_on_and_how_to_switch_it_off(tmp_path, caplog_transformers):
    options = {"per_device_train_batch_size": 16, "replay_fraction": 0.5, "selection": "auto"}
    make_trainer(tmp_path, "dynamic", **options)
    (notice,) = messages(caplog_transformers, "Data efficiency is on")
    assert notice == (
        "Data efficiency is on: selection='dots' (dots_objective='effective', dots_embedding='policy', exploration=0.05); "
        "replay of 2 of the 4 groups of a generation batch (replay_fraction=0.5, replay_clip='behavior', "
        "replay_max_age=5, replay_pause_ess=0.0); dynamic sampling (max_rollout_rounds=4). "
        "With `selection='uniform'`, `replay_fraction=0`, `dynamic_sampling=False` training is that of GRPOTrainer."
    )
    assert caplog_transformers.records[-1].levelname == "WARNING"  # what a script shows


def test_with_the_settings_that_it_names_nothing_is_said(tmp_path, caplog_transformers):
    settings = dict(re.findall(r"`(\w+)=([^`]*)`", OFF))
    assert len(settings) == 3
    values = {name: {"False": False, "0": 0}.get(value, value.strip("'")) for name, value in settings.items()}
    make_trainer(tmp_path, "off", **values)
    assert messages(caplog_transformers) == []


def test_sequential_rollouts_are_named_with_the_size_of_the_first_half(tmp_path, caplog_transformers):
    args = config(tmp_path, replay_fraction=0, num_generations=5, generation_batch_size=40, sequential_rollouts=True)
    (notice,) = announced(caplog_transformers, args)
    assert "on: sequential rollouts (2 of 5 completions of each group first)." in notice
    assert notice.endswith("`dynamic_sampling=False`, `sequential_rollouts=False` training is that of GRPOTrainer.")
    (warning,) = announced(caplog_transformers, args, reason="prompts or tools with images")
    assert "`sequential_rollouts=True` does not stop groups" in warning


def test_only_what_is_on_is_named(tmp_path, caplog_transformers):
    args = config(tmp_path, selection="greso", replay_fraction=0, selector_args={"p_init": 0.4})
    (notice,) = announced(caplog_transformers, args, "greso")
    assert "on: selection='greso' (greso_target_zero_variance=0.25, selector_args={'p_init': 0.4}). With" in notice
    args = config(tmp_path, selection="uniform", replay_fraction=0.25, per_device_train_batch_size=32)
    (notice,) = announced(caplog_transformers, args)
    assert "on: replay of 1 of the 4 groups" in notice


def test_an_adaptive_number_of_fresh_groups_and_the_limits_that_are_set_are_named(tmp_path, caplog_transformers):
    options = {"fresh_groups": "adaptive", "replay_max_uses": 3, "replay_min_ess": 0.5, "selection": "uniform"}
    (notice,) = announced(caplog_transformers, config(tmp_path, per_device_train_batch_size=32, **options))
    assert (
        "on: replay, with an adaptive number of fresh groups (effective_target=0.25, replay_max_uses=3, "
        "replay_clip='behavior', replay_max_age=5, replay_pause_ess=0.9, replay_min_ess=0.5). With" in notice
    )
    (_, warning) = announced(caplog_transformers, config(tmp_path, **{**options, "selection": "dots"}), "dots")
    assert warning.startswith(
        "`fresh_groups='adaptive'` of 1 group per process rounds to no group: nothing is replayed."
    )


def test_a_selector_that_was_handed_over_is_named_by_its_class(tmp_path, caplog_transformers):
    make_trainer(tmp_path, "off", selection="auto", trainer={"selector": UniformSelector(shuffle=False)})
    (notice,) = messages(caplog_transformers, "Data efficiency is on")
    assert "on: selector=UniformSelector(...). Without `selector=`, and with `selection='uniform'`, " in notice


def test_of_several_processes_the_main_one_speaks_and_counts_the_groups_of_all(tmp_path, caplog_transformers):
    args = config(tmp_path, selection="uniform", per_device_train_batch_size=16)
    args.generation_batch_size *= 2
    (notice,) = announced(caplog_transformers, args, processes=Processes(rank=0, world_size=2))
    assert "replay of 2 of the 4 groups" in notice
    assert announced(caplog_transformers, args, processes=Processes(rank=1, world_size=2)) == []


def test_with_trls_default_batch_it_says_which_numbers_make_room_for_replay(tmp_path, caplog_transformers):
    args = config(tmp_path)  # TRL's own defaults: one group of 8 per process
    notice, warning = announced(caplog_transformers, args, "dots")
    assert "replay" not in notice.partition("With")[0]
    assert warning == (
        "`replay_fraction=0.5` of 1 group per process rounds to no group: nothing is replayed. It takes 2 groups: a "
        "`per_device_train_batch_size` of 16 (now 8), or `steps_per_generation` (by default `gradient_accumulation_steps`) "
        "of 2 (now 1)."
    )


@given(
    st.floats(0.004, 0.99), st.integers(2, 6), st.sampled_from([(1, 1), (2, 1), (1, 2), (3, 2), (4, 3), (1, 5)])
)  # fmt: skip
def test_the_numbers_are_the_smallest_that_make_room(tmp_path_factory, fraction, group_size, shape):
    size, steps = shape[0] * group_size, shape[1]
    groups = size * steps // group_size
    said: list[str] = []
    args = config(
        tmp_path_factory.getbasetemp(), num_generations=group_size, per_device_train_batch_size=size,
        steps_per_generation=steps, replay_fraction=fraction, selection="uniform",
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trl_dataeff.notice.logger.warning", said.append)
        announce_options(args, make_selector("uniform"), None, SINGLE)
    if replay_groups(fraction, groups, 1):
        assert "no group" not in said[0]
        return
    (message,) = said
    best_size, best_steps = (int(n) for n in re.findall(r" of (\d+) \(now", message))

    def has_room(size: int, steps: int) -> bool:
        return size * steps % group_size == 0 and replay_groups(fraction, size * steps // group_size, 1) > 0

    assert best_size == next(n for n in range(1, 10_000) if has_room(n, steps))
    assert best_steps == next(n for n in range(1, 10_000) if has_room(size, n))


def test_a_stream_is_told_once_what_has_no_effect_and_what_to_change(tmp_path, caplog_transformers):
    dataset = plain_dataset().to_iterable_dataset()
    options = {"selection": "auto", "replay_fraction": 0.5, "max_steps": 1}
    make_trainer(tmp_path, "off", trainer={"train_dataset": dataset}, **options)
    (warning,) = messages(caplog_transformers, "With a streaming")
    assert "`selection='auto'` is 'uniform' and `replay_fraction=0.5` does not replay" in warning
    assert warning.endswith("A dataset that is loaded without streaming can be selected from, replayed and refilled.")
    assert messages(caplog_transformers, "Data efficiency is on") == []


def test_tools_with_images_are_told_that_prompts_can_be_selected(tmp_path, caplog_transformers):
    reason = "tools that may answer with images"
    (warning,) = announced(caplog_transformers, config(tmp_path), reason=reason)
    assert "`selection='dots'` or 'greso' selects such prompts nevertheless" in warning
    notice, warning = announced(caplog_transformers, config(tmp_path, selection="greso"), "greso", reason)
    assert "selection='greso'" in notice
    assert "`replay_fraction=0.5` does not replay" in warning
    assert "nevertheless" not in warning


def test_the_page_shows_what_is_said(tmp_path, caplog_transformers):
    page = (Path(__file__).parents[1] / "docs" / "one_line.md").read_text()
    (notice,) = announced(caplog_transformers, config(tmp_path, per_device_train_batch_size=32), "dots")
    assert f"```\n{notice}\n```" in page
    _, warning = announced(caplog_transformers, config(tmp_path), "dots")
    assert f"```\n{warning}\n```" in page


DROPOUT = "The model has dropout"


def lora(dropout: float) -> LoraConfig:
    return LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=dropout)


@pytest.mark.parametrize("options", [{"replay_fraction": 0.5}, {"dynamic_sampling": True}])
def test_dropout_in_recorded_log_probs_is_said_once_with_the_remedy(tmp_path, caplog_transformers, options):
    options = {"per_device_train_batch_size": 16, "replay_fraction": 0.0, **options}
    make_trainer(tmp_path, "off", **options, trainer={"peft_config": lora(0.05)})
    (warning,) = messages(caplog_transformers, DROPOUT)
    assert "(lora_dropout=0.05)" in warning
    assert "Set `lora_dropout` to 0 (in peft's `LoraConfig`, or in the recipe)." in warning


@pytest.mark.parametrize(
    ("dropout", "options"),
    [(0.0, {"replay_fraction": 0.5}), (0.05, {"replay_fraction": 0.5, "disable_dropout": True}), (0.05, {})],
)
def test_without_dropout_or_without_rollouts_that_are_used_again_nothing_is_said(
    tmp_path, caplog_transformers, dropout, options
):
    options = {"per_device_train_batch_size": 16, "replay_fraction": 0.0, **options}
    make_trainer(tmp_path, "off", **options, trainer={"peft_config": lora(dropout)})
    assert not messages(caplog_transformers, DROPOUT)


def test_with_vllm_log_probs_are_the_samplers(tmp_path, caplog_transformers):
    args = config(tmp_path, replay_fraction=0.5, selection="uniform", per_device_train_batch_size=16)
    model = get_peft_model(tiny_model(), lora(0.1))
    assert any(m.startswith(DROPOUT) for m in announced(caplog_transformers, args, model=model))
    args.use_vllm = True
    assert not any(m.startswith(DROPOUT) for m in announced(caplog_transformers, args, model=model))
    args.use_vllm = False
    other = Processes(rank=1, world_size=2)
    assert not announced(caplog_transformers, args, processes=other, model=model)


def test_every_kind_of_dropout_is_found(tmp_path, caplog_transformers):
    model = tiny_model()
    assert active_dropout(model) == {}
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.2
    assert active_dropout(get_peft_model(model, lora(0.1))) == {"lora_dropout": 0.1, "attention_dropout": 0.2}
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=10, attn_pdrop=0.0))
    assert active_dropout(gpt2) == {"drop": 0.1, "resid_dropout": 0.1, "dropout": 0.1}
    args = config(tmp_path, replay_fraction=0.5, selection="uniform", per_device_train_batch_size=16)
    warning = announced(caplog_transformers, args, model=gpt2)[-1]
    assert warning.endswith("Set `disable_dropout=True`.")
    warning = announced(caplog_transformers, args, model=model)[-1]
    assert warning.endswith("recipe) and `model_init_kwargs={'attention_dropout': 0.0}`.")
