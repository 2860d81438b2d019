"""Helpers shared by the tests: models, datasets, groups and runs, made in code; nothing is downloaded."""

from tests.factories.comparison import (
    OFF,
    all_finite,
    assert_identical,
    assert_same_end,
    checkpoint_names,
    groups_since,
    history,
    messages,
)
from tests.factories.configurations import (
    CONFIGURATIONS,
    DYNAMIC,
    FILL,
    SHARE,
    STEPS,
    make_trainer,
    train,
    train_briefly,
)
from tests.factories.difficulty import difficulty_problem, generator
from tests.factories.groups import classified, make_group, visit
from tests.factories.selectors import LeastSolved, WithReferences
from tests.factories.tiny import (
    CHAT_TEMPLATE,
    chat_dataset,
    even_length_reward,
    letter_share_reward,
    logged,
    plain_dataset,
    run,
    save_tiny,
    text_of,
    tiny_model,
    tiny_tokenizer,
)
from tests.factories.tools import add, scripted_tool_calls, tool_arguments, tool_dataset, tool_tokenizer
from tests.factories.training import (
    Checked,
    CountedRows,
    Watched,
    dynamic,
    logp_differences,
    mixed_reward,
    number,
    partly_learnable_reward,
)
