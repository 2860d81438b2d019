"""
Each mistake ends in one message that says what was given and what would do, before a model is loaded if possible.
"""

import functools

import pytest
from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

from tests.factories.comparison import assert_identical, messages
from tests.factories.configurations import DYNAMIC, FILL, make_trainer, train_briefly
from tests.factories.tiny import CHAT_TEMPLATE, chat_dataset, even_length_reward, plain_dataset, run, tiny_tokenizer
from trl_dataeff import DataEfficientGRPOConfig, DataEfficientGRPOTrainer
from trl_dataeff.selection import DotsSelector, GresoSelector, PaperDotsSelector, UniformSelector, resolve_selector
from trl_dataeff.selection.base import uses_references
from trl_dataeff.utils import UserError
from trl_dataeff.validation import (
    check_dataset,
    check_steps,
    check_unchanged,
    check_whole_groups,
    reserved_places,
    unsupported_reason,
)


def config(**fields):
    return DataEfficientGRPOConfig("out", use_cpu=True, bf16=False, report_to="none", **fields)


def build(dataset, selector=None, **fields):
    """A model that does not exist: whatever is found out before it is loaded is found out here."""
    model = {"model": "no/such-model", "reward_funcs": even_length_reward, "args": config(**fields)}
    return DataEfficientGRPOTrainer(**model, train_dataset=dataset, selector=selector)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Dataset.from_dict({"prompt": []}), r"\b0 prompts"),
        (plain_dataset(4).rename_column("prompt", "question"), "'question'"),
    ],
)
def test_datasets_that_cannot_be_used(dataset, message):
    with pytest.raises(ValueError, match=message):
        build(dataset, per_device_train_batch_size=16, num_generations=4, selection="dots")


@pytest.mark.parametrize("fields", [{"selection": "dots"}, {"max_rollout_rounds": 3}, {"replay": "fill"}])
def test_a_trainer_that_only_evaluates_needs_no_prompts_for_a_batch(tmp_path, fields):
    datasets = {"train_dataset": plain_dataset(3), "eval_dataset": plain_dataset(4)}
    trainer = run(tmp_path, train=False, trainer=datasets, per_device_train_batch_size=16, **fields)
    assert "eval_reward" in trainer.evaluate()
    with pytest.raises(ValueError, match=r"\b3\b.*\b4\b.*`generation_batch_size` 16"):
        trainer.train()


@pytest.mark.parametrize(
    ("fields", "selector"),
    [({"max_rollout_rounds": 4}, None), ({"selection": "greso"}, None), ({}, UniformSelector())],
)
def test_streams_and_environments_cannot_be_selected_from(fields, selector):
    with pytest.raises(ValueError, match="IterableDataset"):
        build(plain_dataset().to_iterable_dataset(), selector, **fields, max_steps=2)
    with pytest.raises(ValueError, match="NoneType"):
        check_dataset(config(**fields), None, object, selector)
    check_dataset(config(), None, object)


@pytest.mark.parametrize(
    ("fields", "selector", "error", "message"),
    [
        ({"selection": "dost"}, None, ValueError, "`dots`"),
        ({"selection": "greso", "selector_args": {"p_init": 2}}, None, ValueError, "`p_init`"),
        ({"selection": "dots", "selector_args": {"sharpness": -1}}, None, ValueError, "`sharpness`"),
        ({"selection": "dots", "selector_args": {"predictor": "logistics"}}, None, ValueError, "`logistic`"),
        ({"selection": "dots", "success_rate_column": "solved"}, None, ValueError, "`success_rate_column`"),
        ({"selection": "dots", "stratify_by": "kind"}, None, ValueError, "`stratify_by`"),
        ({"stratify_by": "kind"}, DotsSelector(), ValueError, "`stratify_by`"),
        ({"selector_args": {"sharpness": 4}}, None, ValueError, r"`sharpness` is an argument of 'dots'"),
        ({"selection": "greso"}, UniformSelector(), ValueError, "'greso'"),
        ({"selector_args": {"shuffle": False}}, UniformSelector(), ValueError, "`selector_args="),
        ({}, GresoSelector, TypeError, "GresoSelector"),
        ({}, "uniform", TypeError, "'uniform'"),
    ],
)
def test_a_selector_that_cannot_be_made_is_found_before_the_model_is_loaded(fields, selector, error, message):
    with pytest.raises(error, match=message):
        build(plain_dataset(), selector, **fields)


def test_groups_that_processes_share_are_rejected():
    own = config(per_device_train_batch_size=12, num_generations=4)
    for world_size in (1, 3):
        check_whole_groups(own, world_size)
    with pytest.raises(UserError, match=r"\b2\b.*\b6\b.*\b4\b"):
        check_whole_groups(own, 2)


def test_fields_that_change_after_the_trainer_was_made_are_named():
    made_with = {"replay": "fill", "selection": "dots"}
    check_unchanged(made_with, config(**made_with))
    check_unchanged(made_with, GRPOConfig("out", use_cpu=True, bf16=False))
    with pytest.raises(UserError, match="`replay='off'` would have no effect: the trainer was made with 'fill'"):
        check_unchanged(made_with, config(selection="dots"))


def test_dots_as_published_needs_embeddings():
    for given, selector in (({"selection": "dots_paper"}, None), ({}, PaperDotsSelector())):
        with pytest.raises(ValueError, match="`prompt_embedding` is None"):
            resolve_selector(config(prompt_embedding=None, **given), selector)


def test_reference_rollouts_that_cannot_be_generated():
    published = config(selection="dots_paper")
    assert uses_references(resolve_selector(published))
    reason = unsupported_reason(plain_dataset(), False, has_tool_images=True)
    with pytest.raises(ValueError, match="PaperDotsSelector"):
        resolve_selector(published, None, reason)
    with pytest.raises(ValueError, match=r"\b256\b.*\b257\b"):
        resolve_selector(published, world_size=257)


@pytest.mark.parametrize(
    ("accumulated", "steps", "iterations", "works"),
    [(2, 3, 1, 2), (3, 2, 1, 6), (4, 3, 1, 4), (6, 4, 1, 6), (4, 1, 2, None), (4, 2, 1, None), (2, 4, 1, None)],
)
def test_an_optimizer_step_takes_whole_generation_batches_or_lies_in_one(accumulated, steps, iterations, works):
    """8 generations in micro-batches of 4, except where a generation batch is one micro-batch."""
    rows = 8 if steps % 2 else 4
    fields = {"gradient_accumulation_steps": accumulated, "steps_per_generation": steps, "num_iterations": iterations}
    own = config(**fields, per_device_train_batch_size=rows, num_generations=8)
    own.generation_batch_size *= 4  # as on four processes, each of which trains on whole groups
    check_steps(own, trains_on_other_groups=False, max_rounds=1)
    for replays, rounds in ((True, 1), (False, 2)):
        if works is None:
            check_steps(own, replays, rounds)
            continue
        with pytest.raises(ValueError, match=f"`gradient_accumulation_steps={accumulated}`.*n={works}`"):
            check_steps(own, replays, rounds)
        fields["steps_per_generation"] = works
        check_steps(config(**fields, per_device_train_batch_size=rows, num_generations=8), replays, rounds)


def test_a_trainer_checks_its_steps(tmp_path):
    fields = {"steps_per_generation": 2, "gradient_accumulation_steps": 3}
    make_trainer(tmp_path, "off", **fields, selection="greso")
    with pytest.raises(ValueError, match="`gradient_accumulation_steps=3`"):
        make_trainer(tmp_path, "fill", **fields)


def judge(completions, anwser, **kwargs):
    return [0.0] * len(completions)


@pytest.mark.parametrize(
    ("function", "named"),
    [(judge, "'anwser'"), (lambda prompt, completions, **kwargs: [], "'prompt'"), (lambda completions: [], "keyword")],
)
def test_arguments_of_a_reward_function_are_checked_before_anything_is_generated(tmp_path, function, named):
    with pytest.raises(ValueError, match=rf"`{function.__name__}`.*{named}.*`answer`"):
        make_trainer(tmp_path, "off", rewards=function, selection="dots")
    make_trainer(tmp_path, "off", rewards=function)  # TRL's own error comes once it calls the function
    dataset = plain_dataset().map(lambda row: {"completions": "a"})
    with pytest.raises(ValueError, match="two values for `completions`"):
        make_trainer(tmp_path, "off", selection="dots", trainer={"train_dataset": dataset})


def test_arguments_that_trl_passes_that_have_defaults_or_are_made_by_a_transform_are_no_mistake(tmp_path):
    def passed(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, answer, level=0):
        return [0.0] * len(completions)

    train_briefly(tmp_path, "off", selection="dots", rewards=passed, max_steps=1)
    dataset = plain_dataset().with_transform(lambda rows: {**rows, "anwser": rows["answer"]})
    train_briefly(tmp_path, "off", selection="dots", rewards=judge, max_steps=1, trainer={"train_dataset": dataset})


def test_a_decorated_reward_function_may_take_more_than_the_one_that_it_wraps(tmp_path):
    def inner(completion_ids):
        return [float(len(ids)) for ids in completion_ids]

    @functools.wraps(inner)
    def outer(**kwargs):
        return inner(kwargs["completion_ids"])

    train_briefly(tmp_path, "off", selection="dots", rewards=outer, max_steps=1)


def test_a_stream_is_trained_on_without_replay_and_that_is_said(tmp_path, caplog_transformers):
    """It is TRL's own run then."""
    options = {"max_steps": 3, "replay": "fill"}
    streams = [{"train_dataset": plain_dataset().to_iterable_dataset()} for _ in range(2)]
    reference = run(tmp_path / "a", GRPOTrainer, trainer=streams[0], max_steps=3)
    ours = run(tmp_path / "b", trainer=streams[1], **options)
    assert (ours.collector, ours.selector) == (None, None)
    assert_identical(reference, ours, least=50)
    assert len(messages(caplog_transformers, "streaming")) == 1


def with_dropout(p):
    return {**FILL, "trainer": {"peft_config": LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=p)}}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({**FILL, "selection": "dots", "per_device_train_batch_size": 32}, ["DOTS"]),
        ({"selection": "dots", "shuffle_dataset": False}, ["DOTS", "`selection='uniform'`", "2 groups"]),
        ({**FILL, **DYNAMIC}, ["4 rounds"]),
        ({"replay": "share"}, ["1 places"]),
        ({"replay": "share", "replay_fraction": 0.1}, ["`replay_fraction=0.1`"]),
        ({"replay_fraction": 0.3}, ["`replay='share'`"]),
        ({"replay_max_age": None, "replay_clip": "proximal"}, ["`replay_max_age=None`", "`replay_clip='proximal'`"]),
        ({**DYNAMIC, "replay_clip": "proximal", "replay_capacity": 9}, ["`replay_capacity=9`", "4 rounds"]),
        ({"prompt_embedding": "some/model"}, ["`selection='dots'`"]),
        ({"prompt_embedding": "some/model", "trainer": {"selector": DotsSelector()}}, ["DOTS", "2 groups"]),
        ({"success_rate_column": "rate"}, ["`selection='dots'`"]),
        ({**FILL, "selection": "greso", "stratify_by": "kind"}, ["`selection='dots'`", "GRESO", "2 groups"]),
        ({"max_unscored_completions": 9}, ["`max_unscored_completions=9`"]),
        ({"rollout_margin": 2.0}, ["`max_rollout_rounds`"]),
        (with_dropout(0.5), ["fill", "dropout"]),
        ({**with_dropout(0.5), "disable_dropout": True}, ["fill"]),
        (with_dropout(0.0), ["fill"]),
        ({**with_dropout(0.5), "replay": "off"}, []),
        ({}, []),
    ],
)
def test_what_is_on_and_what_has_no_effect(tmp_path, caplog_transformers, fields, said):
    arguments = {"train_dataset": chat_dataset(), **fields.get("trainer", {})}
    make_trainer(tmp_path, "off", **{**fields, "trainer": arguments})
    shown = messages(caplog_transformers)
    assert len(shown) == len(said)
    assert all(named in text for text, named in zip(shown, said))


#: Ends of turns that are no end of a completion, as in the tokenizer of a base model
TEMPLATE_OF_A_BASE_MODEL = CHAT_TEMPLATE.replace("<eos>", "<|tool|>")


def chat_of(text):
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize(
    ("template", "shape", "warns"),
    [
        (CHAT_TEMPLATE, str, True),
        (CHAT_TEMPLATE.replace("<eos>", "{{ eos_token }}"), str, True),
        (CHAT_TEMPLATE, chat_of, False),
        (CHAT_TEMPLATE, "<|user|>{}<eos><|assistant|>".format, False),  # as a script may have applied it
        (TEMPLATE_OF_A_BASE_MODEL, str, False),
        (None, str, False),
    ],
    ids=["instruct", "eos", "chat", "applied", "base", "none"],
)
@pytest.mark.parametrize("fields", [{}, {"selection": "dots", **FILL}], ids=["off", "on"])
def test_an_instruct_model_that_gets_plain_text_is_warned_of(
    tmp_path, caplog_transformers, fields, template, shape, warns
):
    dataset = Dataset.from_dict({"prompt": [shape(prompt) for prompt in plain_dataset()["prompt"]]})
    trainer = {"processing_class": tiny_tokenizer(chat_template=template), "train_dataset": dataset}
    make_trainer(tmp_path, "off", **fields, trainer=trainer)
    assert len(messages(caplog_transformers, "chat template")) == warns


@pytest.mark.parametrize(
    ("fraction", "places", "processes", "expected"),
    [
        (0.5, 16, 1, 8),
        (0.25, 16, 1, 4),
        (0.5, 3, 1, 2),
        (0.5, 1, 1, 0),
        (0.9, 2, 1, 1),
        (0.5, 8, 4, 4),
        (0.3, 8, 4, 4),
        (0.2, 8, 4, 0),
        (0.01, 8, 1, 0),
    ],
)
def test_places_of_a_share_by_hand(fraction, places, processes, expected):
    fields = {"per_device_train_batch_size": 2 * places, "num_generations": 2, "replay_fraction": fraction}
    assert reserved_places(config(**fields, replay="share"), processes) == expected
    assert reserved_places(config(**fields, replay="fill"), processes) == 0


@pytest.mark.parametrize(("rows", "said"), [(8, "2 groups"), (4, "1 group"), (32, None)])
def test_batches_of_few_groups_are_said_where_prompts_are_selected(tmp_path, caplog_transformers, rows, said):
    run(tmp_path, train=False, selection="greso", per_device_train_batch_size=rows)
    found = messages(caplog_transformers, "little choice")
    assert len(found) == (said is not None)
    assert said is None or found[0].startswith(f"{said} a batch")
    caplog_transformers.clear()
    run(tmp_path, train=False, per_device_train_batch_size=rows)
    assert not messages(caplog_transformers, "little choice"), "nothing is selected"


@pytest.mark.parametrize(
    ("fields", "is_said"),
    [
        ({}, True),
        ({"epsilon": 0.2, "epsilon_high": 4e-4}, True),
        ({"epsilon": 0.2}, False),
        ({"replay": "share"}, True),
        ({"replay": "off"}, False),
        ({"replay_clip": "proximal"}, False),
        ({"importance_sampling_level": "token"}, False),
        ({"loss_type": "cispo"}, False),
    ],
)
def test_replay_with_a_narrow_clip_of_sequences_is_advised_against(tmp_path, caplog_transformers, fields, is_said):
    options = {"importance_sampling_level": "sequence", "epsilon": 3e-4, "replay": "fill", **fields}
    run(tmp_path, train=False, **options)
    assert bool(messages(caplog_transformers, "set `replay='off'`")) == is_said
