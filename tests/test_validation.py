"""Each mistake ends in one message that says what was given and what would do, before a model is loaded if possible."""

import re
import time
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset, IterableDataset
from trl import GRPOConfig, GRPOTrainer

from tests.factories import (
    DYNAMIC,
    FILL,
    Watched,
    all_finite,
    chat_dataset,
    even_length_reward,
    history,
    last_logged,
    make_trainer,
    messages,
    plain_dataset,
    run,
    train_briefly,
)
from trl_dataeff import DataEfficientGRPOConfig, DataEfficientGRPOTrainer
from trl_dataeff.rollouts.context import ContextCheck
from trl_dataeff.rollouts.prompts import without_prompt
from trl_dataeff.selection import DotsSelector, GresoSelector, UniformSelector
from trl_dataeff.validation import (
    RewardChecks,
    check_dataset,
    check_no_tool_images,
    check_prompts,
    resolve_selector,
    unsupported_reason,
)


def config(tmp_path, **fields):
    return DataEfficientGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", **fields)


def build(tmp_path, dataset, selector=None, **fields):
    """A model that does not exist: whatever is found out before it is loaded is found out here."""
    return DataEfficientGRPOTrainer(
        model="no/such-model",
        reward_funcs=even_length_reward,
        args=config(tmp_path, **fields),
        train_dataset=dataset,
        selector=selector,
    )


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Dataset.from_dict({"prompt": []}), "has 0 prompts, and each batch takes 4"),
        (plain_dataset(3), "has 3 prompts, .* takes 4 .*`generation_batch_size` 16 / `num_generations` 4"),
        (plain_dataset(3).rename_column("prompt", "question"), r"no column `prompt`; its columns are \['question'"),
        (None, "`train_dataset` is required"),
    ],
)
def test_datasets_that_cannot_be_used(tmp_path, dataset, message):
    with pytest.raises(ValueError, match=message):
        build(tmp_path, dataset, per_device_train_batch_size=16, num_generations=4)


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"max_rollout_rounds": 4}, "max_rollout_rounds=4"),
        ({"selection": "dots"}, "selection='dots'"),
        ({"selection": "greso"}, "selection='greso'"),
        ({"selector": UniformSelector()}, r"selector=UniformSelector\(...\)"),
    ],
)
def test_streams_and_environments_cannot_be_selected_from(tmp_path, fields, wanted):
    stream = IterableDataset.from_generator(lambda: iter(plain_dataset()))
    needs = rf"`{wanted}` needs a map-style dataset, and "
    with pytest.raises(ValueError, match=rf"{needs}this one is streamed \(iterable\)"):
        build(tmp_path, stream, **fields, max_steps=2)
    own = config(tmp_path, **{name: value for name, value in fields.items() if name != "selector"})
    with pytest.raises(ValueError, match=rf"{needs}an environment provides the prompts"):
        check_dataset(own, None, object, fields.get("selector"))


def test_reward_of_the_wrong_length(tmp_path):
    with pytest.raises(ValueError, match="returned 1 rewards, but 8 were expected"):
        run(DataEfficientGRPOTrainer, DataEfficientGRPOConfig, tmp_path, rewards=lambda **kwargs: [1.0])


@pytest.mark.parametrize(("value", "fields"), [(None, DYNAMIC), (float("nan"), {"selection": "greso"}), (None, FILL)])
def test_rewards_that_score_nothing(tmp_path, value, fields):
    def silent_reward(completions, **kwargs):
        return [value] * len(completions)

    fields = {"per_device_train_batch_size": 64, "max_steps": 20, **fields}
    with pytest.raises(
        ValueError, match=r"No reward function gave a score for any of the first (5|6)\d\d completions"
    ) as error:
        run(DataEfficientGRPOTrainer, DataEfficientGRPOConfig, tmp_path, rewards=silent_reward, **fields)
    assert "`silent_reward`" in str(error.value)


@pytest.mark.parametrize("value", [None, float("nan")])
def test_rewards_that_score_nothing_are_trls_matter_when_everything_is_off(tmp_path, caplog_transformers, value):
    def silent_reward(completions, **kwargs):
        return [value] * len(completions)

    options = {"rewards": silent_reward, "per_device_train_batch_size": 64, "max_steps": 9}
    reference = run(GRPOTrainer, GRPOConfig, tmp_path / "trl", **options)
    ours = run(DataEfficientGRPOTrainer, DataEfficientGRPOConfig, tmp_path / "ours", **options)
    for expected, got in zip(history(reference.state.log_history), history(ours.state.log_history), strict=True):
        assert expected.items() <= got.items()
    (message,) = messages(caplog_transformers, "returned only None or NaN")
    assert message.startswith("`silent_reward` returned only None or NaN for the first 64 completions. Check")


def reward_array(*scored: bool) -> np.ndarray:
    """Rewards of 2 groups of 3 completions, `(2, 3, F)`: of each function all or none."""
    return np.stack([np.full((2, 3), 0.5 if given else np.nan) for given in scored], axis=-1)


@pytest.mark.parametrize("is_main_process", [True, False])
def test_completions_without_any_score_end_the_run_in_all_processes(caplog_transformers, is_main_process):
    checks = RewardChecks(["a", "b"], most_unscored=18, is_main_process=is_main_process)
    checks.check(reward_array(False, False))
    checks.check(reward_array(False, False))
    with pytest.raises(ValueError, match="any of the first 18 completions: `a`, `b` returned only None or NaN"):
        checks.check(reward_array(False, False))
    assert len(messages(caplog_transformers)) == is_main_process
    never = RewardChecks(["a", "b"])
    for _ in range(1000):
        never.check(reward_array(False, False))


def test_one_score_is_enough(caplog_transformers):
    checks = RewardChecks(["a", "b"], most_unscored=12)
    checks.check(reward_array(True, False))
    for _ in range(10):
        checks.check(reward_array(False, False))
    checks.check(reward_array(False, True))
    (message,) = messages(caplog_transformers, "returned only None or NaN")
    assert message.startswith("`b` returned only None or NaN for the first 6 completions")


def test_a_resumed_run_knows_that_there_were_scores(tmp_path, monkeypatch):
    monkeypatch.setattr("trl_dataeff.collector.collector.MOST_UNSCORED", 32)
    steps = []

    def failing_judge(completion_ids, trainer_state, **kwargs):
        steps.append(trainer_state.global_step)
        return even_length_reward(completion_ids) if trainer_state.global_step < 2 else [None] * len(completion_ids)

    options = {"rewards": failing_judge, "selection": "greso", "save_strategy": "steps", "save_steps": 2}
    run(DataEfficientGRPOTrainer, DataEfficientGRPOConfig, tmp_path, **options, max_steps=2)
    resumed = run(DataEfficientGRPOTrainer, DataEfficientGRPOConfig, tmp_path, **options, max_steps=10, train=False)
    resumed.train(resume_from_checkpoint=True)
    assert steps == list(range(10))


def turns(*contents, **last) -> list[dict]:
    """A conversation: system, user, system, ..."""
    conversation = [{"role": ["system", "user"][i % 2], "content": text} for i, text in enumerate(contents)]
    return [*conversation[:-1], {**conversation[-1], **last}]


CHATS = [turns("Be brief.", prompt) for prompt in plain_dataset(8)["prompt"]]


@pytest.mark.parametrize("dynamic", ["off", "dynamic"])
@pytest.mark.parametrize(
    "rows",
    [
        [*plain_dataset(8)["prompt"], None],
        [*plain_dataset(8)["prompt"], ""],
        [*chat_dataset(8)["prompt"], []],
        [*chat_dataset(8)["prompt"], None],
        [*CHATS, turns("", "")],
        [*CHATS, turns("Be brief.", "")],
        [*CHATS, turns("Be brief.", None)],
        [*CHATS, turns("")],
    ],
)
def test_rows_without_a_prompt_are_named_before_training(tmp_path, rows, dynamic):
    dataset = Dataset.from_dict({"prompt": rows})
    with pytest.raises(ValueError, match=r"has 1 rows without a prompt .*: 8\. Remove them: `(.*)`") as raised:
        make_trainer(tmp_path, dynamic, trainer={"train_dataset": dataset})
    advice = re.search("Remove them: `(.*)`", str(raised.value))[1]
    make_trainer(tmp_path, dynamic, trainer={"train_dataset": eval(advice, {"dataset": dataset})})
    make_trainer(tmp_path, dynamic, trainer={"train_dataset": dataset.select(range(8))})


PARTS = [{"type": "text", "text": "1+1="}]


@pytest.mark.parametrize(
    ("prompts", "empty"),
    [
        ([" ", "a", "", None], [2, 3]),
        ([turns("Be brief.", "1+1="), turns("", "1+1="), turns("Be brief.")], []),
        ([turns("a", "", role="assistant"), turns("a", "", role="tool"), turns("a", "", role="user")], [2]),
        ([[{"role": "user", "content": PARTS}], [{"role": "user", "content": []}], []], [1, 2]),
        ([[{"content": ""}], [{"content": "a"}]], [0]),
        ([[{"text": "a"}], []], [1]),
        ([[], []], [0, 1]),
        ([], []),
        ([[1, 2], [], None], [1, 2]),
        ([None, None], [0, 1]),
        ([1, 2], []),
    ],
)
def test_which_prompts_are_empty(prompts, empty):
    """Of columns of one chunk and of several, of which each may be a slice."""
    table = pa.table({"prompt": pa.array([*prompts, *prompts])})
    n = len(prompts)
    for column in (
        table["prompt"][n:],
        pa.chunked_array([table["prompt"].chunk(0)[n:]] if n else [], table["prompt"].type),
    ):
        assert np.flatnonzero(without_prompt(column)).tolist() == empty
    twice = pa.concat_tables([table[n:], table[:n]]).column("prompt")
    assert np.flatnonzero(without_prompt(twice)).tolist() == [*empty, *(n + i for i in empty)]


def test_good_prompts_are_checked_without_a_loop_over_rows():
    dataset = Dataset.from_dict({"prompt": [turns("Be brief.", "1+1=")] * 200_000})
    started = time.perf_counter()
    check_prompts(dataset)
    assert time.perf_counter() - started < 0.5  # reading the rows takes 2 seconds


def test_empty_prompts_are_for_an_environment_to_fill(tmp_path):
    dataset = Dataset.from_dict({"prompt": [[{"role": "user", "content": ""}]] * 24})
    check_dataset(config(tmp_path), dataset, object)
    with pytest.raises(ValueError, match="has 24 rows without a prompt"):
        check_dataset(config(tmp_path), dataset, None)


def test_a_row_that_cannot_be_tokenized_is_named(tmp_path):
    def transform(rows):
        return {"prompt": [p if not p.startswith("05") else 7 for p in rows["prompt"]]}

    dataset = plain_dataset(8).with_transform(transform)
    with pytest.raises((TypeError, ValueError)) as raised:
        make_trainer(tmp_path, "off", trainer={"train_dataset": dataset}, max_steps=8).train()
    assert any(re.search(r"dataset's rows \[.*\b5\b.*\]", note) for note in raised.value.__notes__)


def test_a_prompt_that_fills_the_context(tmp_path, caplog_transformers):
    prompts = [f"{i:02d}:1+1=" for i in range(7)] + ["07:" + "1+" * 508 + "1="]
    dataset = Dataset.from_dict({"prompt": prompts})
    trainer = train_briefly(tmp_path, "off", trainer={"train_dataset": dataset}, max_steps=10)
    assert trainer.state.global_step == 10
    assert all_finite(trainer)
    assert last_logged(trainer, "overlong_prompts") in (4, 8, 12)  # once an epoch, four completions each
    (message,) = messages(caplog_transformers, "leaves no room")
    assert (
        "A prompt of 1021 tokens leaves no room for `max_completion_length` (8) in the model's context of 1024"
        in message
    )


@pytest.mark.parametrize(("mode", "accepted"), [("colocate", 4000), ("server", 10**6)])
def test_prompts_are_rejected_by_the_limit_of_the_engine(tmp_path, mode, accepted):
    """With scaled positions (YaRN) it is above `max_position_embeddings`; that of a server is not known here."""
    text_config = SimpleNamespace(max_position_embeddings=1024)
    engine = SimpleNamespace(model_config=SimpleNamespace(max_model_len=4001))
    vllm = SimpleNamespace(llm=SimpleNamespace(llm_engine=engine))
    args = config(tmp_path, use_vllm=True, vllm_mode=mode)
    check = ContextCheck.of(SimpleNamespace(get_text_config=lambda: text_config), args, vllm)
    check.check_room(["a"], [accepted])
    if mode == "colocate":
        assert check.overlong([4001 - args.max_completion_length]) == [False]
        with pytest.raises(
            ValueError, match=r"1 of 2 prompts are too long for vLLM: the first has 4001 tokens, .* takes 4001"
        ):
            check.check_room(["a", "b"], [4000, 4001])


@pytest.mark.parametrize(
    ("fields", "reason", "sharded", "expected"),
    [
        ({}, None, False, DotsSelector),
        ({}, "tools with images", False, UniformSelector),
        ({}, None, True, GresoSelector),
        ({"prompt_embedding": "some/model"}, None, True, DotsSelector),
        ({"selection": "greso"}, "tools with images", True, GresoSelector),
    ],
)
def test_what_auto_stands_for(fields, reason, sharded, expected):
    config = DataEfficientGRPOConfig("out", use_cpu=True, bf16=False, **fields)
    assert type(resolve_selector(config, None, reason, sharded=sharded)) is expected


class Mine(UniformSelector):
    pass


@pytest.mark.parametrize(
    ("fields", "selector", "error", "message"),
    [
        ({"selection": "dost"}, None, ValueError, "There is no selector 'dost'.*Did you mean `dots`"),
        ({"selection": "DOTS"}, None, ValueError, "There is no selector 'DOTS'.*Did you mean `dots`"),
        ({"selection": "no_such_module.Mine"}, None, ValueError, "'no_such_module.Mine' cannot be imported"),
        ({"selection": "collections.Counter"}, None, ValueError, "a subclass of `trl_dataeff.Selector`"),
        ({"selection": "greso", "selector_args": {"p_start": 0.5}}, None, ValueError, "no argument `p_start`.*p_init"),
        ({"selection": "greso", "selector_args": {"p_init": 2}}, None, ValueError, "`p_init` is 2"),
        ({"selector_args": {"threshold": 2}}, None, ValueError, "`threshold` is 2"),
        ({"selector_args": {"predictor": "logistics"}}, None, ValueError, "'logistics'.*`logistic`"),
        ({"selector_args": {"predictor_args": {"depth": 3}}}, None, ValueError, "`depth`"),
        ({"selection": "greso"}, Mine(), ValueError, r"`selector=Mine\(...\)` is given beside `selection='greso'`"),
        ({"selector_args": {"shuffle": False}}, Mine(), ValueError, "`selector_args={'shuffle': False}`"),
        ({}, Mine, TypeError, "`selector` is the class Mine; it takes an instance of `trl_dataeff.Selector`"),
        ({}, "uniform", TypeError, "`selector` is a str; it takes an instance of `trl_dataeff.Selector`"),
    ],
)
def test_a_selector_that_cannot_be_made_is_found_before_the_model_is_loaded(
    tmp_path, fields, selector, error, message
):
    with pytest.raises(error, match=message):
        build(tmp_path, plain_dataset(), selector=selector, **fields)


def test_a_stream_is_trained_on_without_replay_and_that_is_said(tmp_path, caplog_transformers):
    stream = plain_dataset().to_iterable_dataset()
    options = {"selection": "auto", "max_steps": 3, **FILL}
    trainer = run(Watched, DataEfficientGRPOConfig, tmp_path, trainer={"train_dataset": stream}, **options)
    assert trainer.collector.buffer is None
    assert [len(batch.generated) for batch in trainer.batches] == [2, 2, 2]
    (message,) = messages(caplog_transformers, "does not replay")
    assert message.startswith(
        "With a streaming (iterable) dataset, `selection='auto'` is 'uniform', `replay='fill'` does not replay: each batch"
    )


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (FILL, "replay fills the batch; 24 prompts"),
        ({**FILL, **DYNAMIC}, "up to 4 rounds of rollouts a batch, replay fills the batch"),
        ({"replay": "share"}, "replay has 1 places of each batch"),
        (
            {"replay": "share", "replay_fraction": 0.1},
            "`replay_fraction=0.1` of 2 groups per process rounds to no group",
        ),
        ({"replay_fraction": 0.3}, "`replay_fraction=0.3` has no effect: it needs `replay` to be share"),
        ({"rollout_margin": 2.0}, "`rollout_margin=2.0` has no effect: it needs `max_rollout_rounds` to be 2 or more"),
        ({}, None),
    ],
)
def test_what_is_on_and_what_has_no_effect(tmp_path, caplog_transformers, fields, said):
    make_trainer(tmp_path, "off", **fields)
    shown = messages(caplog_transformers)
    assert shown == [] if said is None else len(messages(caplog_transformers, said)) == 1


def test_images_of_tools_are_found_where_they_would_be_lost():
    check_no_tool_images([[], []])
    with pytest.raises(ValueError, match="Rollouts of tools that answer with images cannot be kept, and one did"):
        check_no_tool_images([[], ["image"]])


def test_reference_rollouts_that_cannot_be_generated():
    config = DataEfficientGRPOConfig("out", use_cpu=True, bf16=False, selection="dots_paper")
    assert resolve_selector(config, None, None, sharded=False).uses_references
    with pytest.raises(
        ValueError, match=r"PaperDotsSelector generates reference rollouts .* not possible with tools that may"
    ):
        resolve_selector(config, None, unsupported_reason(plain_dataset(), False, tool_images=True), sharded=False)
    with pytest.raises(ValueError, match="`reference_size` is 256, and each of 257 processes"):
        resolve_selector(config, None, None, sharded=False, processes=257)


def judge(completions, anwser, **kwargs):
    return [0.0] * len(completions)


def judge_prompt(prompt, completions, **kwargs):
    return [0.0] * len(completions)


@pytest.mark.parametrize(
    ("function", "given", "meant"), [(judge, "anwser", "answer"), (judge_prompt, "prompt", "prompts")]
)
def test_an_argument_that_trl_does_not_pass_is_found_before_anything_is_generated(tmp_path, function, given, meant):
    with pytest.raises(ValueError, match=f"has the argument `{given}`.*, `answer`.*Did you mean `{meant}`"):
        make_trainer(tmp_path, "off", rewards=function)


def test_arguments_that_trl_passes_that_have_defaults_or_are_made_by_a_transform_are_no_mistake(tmp_path):
    def passed(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, answer, level=0):
        return [0.0] * len(completions)

    train_briefly(tmp_path, "off", rewards=passed, max_steps=1)
    dataset = plain_dataset().with_transform(lambda rows: {**rows, "anwser": rows["answer"]})
    train_briefly(tmp_path, "off", rewards=judge, max_steps=1, trainer={"train_dataset": dataset})


@pytest.mark.parametrize(("rewards", "warnings"), [("equal", 1), ("mixed", 0)])
def test_a_run_without_any_gradient_is_warned_of_once(tmp_path, caplog_transformers, rewards, warnings):
    def reward(completion_ids, **kwargs):
        return [0.0] * len(completion_ids) if rewards == "equal" else even_length_reward(completion_ids)

    run(DataEfficientGRPOTrainer, DataEfficientGRPOConfig, tmp_path, rewards=reward, max_steps=30)
    assert len(messages(caplog_transformers, "No group of the first 20 generation batches")) == warnings


def test_the_warning_counts_from_the_start_of_the_run(caplog_transformers):
    before, after = RewardChecks(["a"]), RewardChecks(["a"])
    for _ in range(19):
        before.check_gradient(effective=False, progress=0.5)
    after.load_state(before.state())
    after.check_gradient(effective=False, progress=0.5)
    assert len(messages(caplog_transformers, "No group of the first 20 generation batches")) == 1
