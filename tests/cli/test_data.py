"""Datasets of every kind become prompts and answers, and rewards functions. The rest is refused with a reason."""

import sys
from functools import partial

import pytest
from datasets import Dataset, DatasetDict, IterableDataset

from trl_dataeff.cli.data import check_columns, load_data, load_reward
from trl_dataeff.cli.grpo import parse
from trl_dataeff.cli.main import main
from trl_dataeff.utils import UserError


ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(6)]


def load(*args: str):
    arguments = parse(["--use_cpu", "--bf16", "false", *args])
    return load_data(arguments.script, arguments.dataset, arguments.training.eval_strategy != "no")


def jsonl(path, rows=ROWS):
    Dataset.from_list(rows).to_json(path)
    return str(path)


@pytest.mark.parametrize(
    ("name", "save"),
    [
        ("data.jsonl", Dataset.to_json),
        ("data.json", partial(Dataset.to_json, lines=False)),
        ("data.csv", Dataset.to_csv),
        ("data.parquet", Dataset.to_parquet),
        ("folder", lambda dataset, path: dataset.to_parquet(path / "train.parquet")),
        ("disk", Dataset.save_to_disk),
        ("dict", lambda rows, path: DatasetDict({"train": rows, "test": rows.select([1])}).save_to_disk(path)),
    ],
)
def test_local_datasets(name, save, tmp_path):
    path = tmp_path / name
    (tmp_path / "folder").mkdir()
    save(Dataset.from_list([ROWS[5], *ROWS]).select(range(1, 7)), path)  # the rows that were chosen, not all
    train, evaluation = load("--dataset_name", str(path))
    assert train["prompt"][:] == [row["prompt"] for row in ROWS]
    assert [str(answer) for answer in train["answer"]] == [row["answer"] for row in ROWS]
    assert evaluation is None


@pytest.mark.parametrize("name", [".", "./", "../here", "sub/.."])
def test_the_current_folder_is_a_dataset(name, tmp_path, monkeypatch):
    folder = tmp_path / "here"
    (folder / "sub").mkdir(parents=True)
    jsonl(folder / "train.jsonl")
    monkeypatch.chdir(folder)
    train, _ = load("--dataset_name", name)
    assert train["prompt"][:] == [row["prompt"] for row in ROWS]


@pytest.mark.parametrize("args", [[], ["--prompt_as_chat"], ["--system_prompt", "s"]], ids=str)
@pytest.mark.parametrize("prompts", [[0, 1], [0.0, 1.5], [False, True], [1, None]], ids=str)
def test_prompts_that_are_no_text_are_called_so(prompts, args, tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": prompt} for prompt in prompts])
    with pytest.raises(UserError, match=rf"has prompts such as '{prompts[0]}\S*' \(\w+\)"):
        load("--dataset_name", path, *args)


def test_splits_and_evaluation(tmp_path):
    parts = DatasetDict({"mine": Dataset.from_list(ROWS), "dev": Dataset.from_list(ROWS[:2])})
    parts.save_to_disk(tmp_path / "d")
    splits = ["--dataset_train_split", "mine", "--dataset_test_split", "dev"]
    train, evaluation = load("--dataset_name", str(tmp_path / "d"), *splits, "--eval_strategy", "epoch")
    assert (len(train), len(evaluation)) == (6, 2)


@pytest.mark.parametrize(
    ("name", "prompts"),
    [("dev[:2]", ["0+1=", "1+1="]), ("dev[4:]", ["4+1=", "5+1="]), ("dev[:50%]", ["0+1=", "1+1=", "2+1="])],
)
def test_a_split_may_be_a_slice(name, prompts, tmp_path):
    DatasetDict({"train": Dataset.from_list(ROWS), "dev": Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "d")
    options = ["--dataset_test_split", name, "--eval_strategy", "epoch"]
    train, evaluation = load("--dataset_name", str(tmp_path / "d"), *options)
    assert len(train) == len(ROWS)
    assert evaluation["prompt"][:] == prompts


def test_a_slice_longer_than_its_split_is_the_split(tmp_path):
    DatasetDict({"train": Dataset.from_list(ROWS), "test": Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "d")
    options = ["--dataset_test_split", "test[:200]", "--eval_strategy", "epoch"]
    _, evaluation = load("--dataset_name", str(tmp_path / "d"), *options)
    assert len(evaluation) == len(ROWS)


def test_a_stream_has_no_slices(tmp_path):
    options = ["--dataset_streaming", "--dataset_train_split", "train[:2]"]
    with pytest.raises(UserError, match="not streamed"):
        load("--dataset_name", jsonl(tmp_path / "a.jsonl"), *options)


def test_a_file_that_is_to_be_evaluated_on_too_and_the_ways_out(tmp_path):
    path = jsonl(tmp_path / "mine.jsonl")
    evaluates = ["--eval_strategy", "epoch"]
    with pytest.raises(UserError) as error:
        load("--dataset_name", path, *evaluates)
    assert "as train.jsonl and test.jsonl" in str(error.value)
    assert f"`datasets: [{{path: {path}}}]` and `test_split_size: 0.1`" in str(error.value)
    (tmp_path / "folder").mkdir()
    jsonl(tmp_path / "folder" / "train.jsonl")
    jsonl(tmp_path / "folder" / "test.jsonl", ROWS[:2])
    assert [len(part) for part in load("--dataset_name", str(tmp_path / "folder"), *evaluates)] == [6, 2]
    (tmp_path / "r.yaml").write_text(f"dataset_name: {path}\ndatasets: [{{path: {path}}}]\ntest_split_size: 0.1\n")
    assert [len(part) for part in load("--config", str(tmp_path / "r.yaml"), *evaluates)] == [5, 1]
    (tmp_path / "r.yaml").write_text(f"datasets: [{{path: {path}}}]\n")
    with pytest.raises(UserError, match="`test_split_size`"):
        load("--config", str(tmp_path / "r.yaml"), *evaluates)


def test_streaming(tmp_path):
    train, _ = load("--dataset_name", jsonl(tmp_path / "a.jsonl"), "--dataset_streaming", "--prompt_as_chat")
    assert isinstance(train, IterableDataset)
    assert next(iter(train))["prompt"] == [{"role": "user", "content": "0+1="}]


def test_mixture_of_files_and_folders(tmp_path):
    jsonl(tmp_path / "a.jsonl")
    Dataset.from_list(ROWS[:2]).save_to_disk(tmp_path / "b")
    (tmp_path / "r.yaml").write_text(
        f"datasets:\n  - path: {tmp_path}/a.jsonl\n    columns: [prompt, answer]\n  - path: {tmp_path}/b\n"
    )
    train, _ = load("--config", str(tmp_path / "r.yaml"))
    assert sorted(train["prompt"][:]) == sorted([row["prompt"] for row in ROWS + ROWS[:2]])
    split = ["--test_split_size", "0.5", "--eval_strategy", "epoch"]
    assert [len(part) for part in load("--config", str(tmp_path / "r.yaml"), *split)] == [4, 4]
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\nnot json\n')
    with pytest.raises(UserError, match=r"a\.jsonl:2"):
        load("--config", str(tmp_path / "r.yaml"))


MESSAGES = [{"role": "user", "content": "hi"}]
SYSTEM = {"role": "system", "content": r"Answer in \boxed{}."}
GSM8K = {"question": "How many {eggs}?", "answer": "1+1=2\n#### 2"}


@pytest.mark.parametrize(
    ("row", "args", "expected"),
    [
        (
            GSM8K,
            ["--prompt_column", "question", "--system_prompt", SYSTEM["content"]],
            {"prompt": [SYSTEM, {"role": "user", "content": "How many {eggs}?"}], "answer": "1+1=2\n#### 2"},
        ),
        ({"prompt": MESSAGES}, ["--system_prompt", SYSTEM["content"]], {"prompt": [SYSTEM, *MESSAGES]}),
        ({"prompt": "p", "answer": "a", "final": "7"}, ["--answer_column", "final"], {"answer": "7", "solution": "7"}),
        ({"prompt": "p"}, ["--dataset_config", "main"], {"prompt": "p"}),  # a configuration's name is for the Hub
    ],
)
def test_columns_become_prompts_and_answers(row, args, expected, tmp_path):
    train, _ = load("--dataset_name", jsonl(tmp_path / "a.jsonl", [row]), *args)
    got = {name: train[0][name] for name in expected}
    if isinstance(got.get("prompt"), list):
        got["prompt"] = [{key: message[key] for key in ("role", "content")} for message in got["prompt"]]
    assert {name: value if name == "prompt" else str(value) for name, value in got.items()} == expected


@pytest.mark.parametrize("good", ["a", MESSAGES], ids=["text", "chat"])
@pytest.mark.parametrize("args", [["--prompt_as_chat", "true"], ["--system_prompt", "s"]], ids=lambda args: args[0])
def test_rows_without_a_prompt_are_named_whatever_shape_prompts_are_given(args, good, tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": prompt} for prompt in (good, None, good[:0], good)])
    with pytest.raises(UserError, match=r"2 rows without a prompt.*: 1, 2"):
        load("--dataset_name", path, *args)


@pytest.mark.parametrize("name", ["d[ab].jsonl", "dir with [x] */train.jsonl"])
def test_a_path_that_is_a_pattern_is_the_one_that_is_loaded(name, tmp_path):
    jsonl(tmp_path / "da.jsonl", [{"prompt": "wrong"}])
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    train, _ = load("--dataset_name", jsonl(path))
    assert train["prompt"][:] == [row["prompt"] for row in ROWS]


@pytest.mark.parametrize(
    ("name", "text", "args", "parts"),
    [
        ("a.jsonl", '{"prompt": "a"}\n{"prompt": b}\n', [], ["a.jsonl:2", "cannot be parsed"]),
        ("a.jsonl", '{"prompt": "a"}\n[1]\n', [], ["a.jsonl:2", "is not a JSON object"]),
        ("a.parquet", "nothing of the kind", [], ["'a.parquet' cannot be loaded", "not a parquet file"]),
        ("a.jsonl", "", [], ["'a.jsonl' cannot be loaded", "it is empty"]),
        ("a.csv", "prompt,answer\n", [], ["'a.csv' cannot be loaded", "no data"]),
        ("latin.jsonl", '{"prompt": "a"}\n' * 500 + '{"prompt": "ö"}\n', [], ["is not UTF-8 text"]),  # in any row
        ("a.txt", "hello", [], ["'a.txt'", "`.jsonl`"]),
        ("a.jsonl", '{"question": "a", "level": 1}', [], ["no column 'prompt'", "`question`, `level`"]),
        ("a.jsonl", '{"prompt": 7}', [], ["7", "A prompt is text"]),
        ("a.jsonl", '{"prompt": [{"role": "user"}]}', [], ["'role': 'user'", "messages with `role` and `content`"]),
        ("a.jsonl", '{"prompt": "a"}\n{"prompt": null}\n{"prompt": ""}', [], ["2 rows without a prompt", ": 1, 2."]),
        ("trian.jsonl", None, [], ["'trian.jsonl' does not exist", "Did you mean `train.jsonl`"]),
        ("./data", None, [], ["'./data' does not exist"]),
        ("empty", None, [], ["'empty' cannot be loaded", "doesn't contain any data files"]),
        ("train.jsonl", None, ["--dataset_train_split", "dev"], ["no split `dev`", "has `train`"]),
        ("train.jsonl", None, ["--eval_strategy", "epoch"], ["no split `test`", "`eval_strategy`"]),
        ("train.jsonl", None, ["--dataset_train_split", "dev[:2]"], ["no split `dev[:2]`", "has `train`"]),
        ("train.jsonl", None, ["--dataset_train_split", "train[:"], ["no split `train[:`", "has `train`"]),
        ("train.jsonl", None, ["--prompt_column", "promt"], ["'promt'. Did you mean `prompt`", "`prompt_column`"]),
        ("train.jsonl", None, ["--answer_column", "gold"], ["no column 'gold'", "`answer_column`"]),
    ],
    ids=lambda value: str(value)[:40],
)
def test_datasets_that_cannot_be_used(name, text, args, parts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    jsonl(tmp_path / "train.jsonl")
    (tmp_path / "empty").mkdir()
    if text is not None:
        (tmp_path / name).write_text(text, encoding="latin-1")
    with pytest.raises(UserError) as error:
        load("--dataset_name", name, *args)
    for part in parts:
        assert part in str(error.value)


def test_hub_that_does_not_answer(monkeypatch):
    def offline(*args, **kwargs):
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr("trl_dataeff.cli.data.load_dataset", offline)
    with pytest.raises(UserError, match=r"'some/data' cannot be loaded: ConnectionError"):
        load("--dataset_name", "some/data")


def test_overlong_punishment_has_the_values_that_the_help_names():
    punish = load_reward("get_soft_overlong_punishment")
    assert punish(completion_ids=[[0] * n for n in (1024, 1152, 1280, 1281)]) == [0.0, -0.5, -1.0, -1.0]


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("numeric_awnser_reward", ["unknown", "Did you mean `numeric_answer_reward`", "dotted path"]),
        ("nowhere_to_be_found.reward", ["no module 'nowhere_to_be_found'", "PYTHONPATH"]),
        ("os.path.sep", ["no function 'sep'"]),
        ("os.path.basenam", ["Did you mean `basename`"]),
        ("missing_import_for_a_test.reward", ["no module 'not_installed_at_all'"]),
    ],
)
def test_paths_that_lead_nowhere(name, parts, write, monkeypatch):
    monkeypatch.syspath_prepend(".")
    write("missing_import_for_a_test.py", "import not_installed_at_all\n")
    with pytest.raises(UserError) as error:
        load_reward(name)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize("name", ["math_verify_reward", "accuracy_reward"])
def test_missing_math_verify_is_said_at_once(name, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    assert main(["grpo", "--reward_funcs", name]) == 2
    assert "pip install math-verify" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "row", "part"),
    [
        ("exact_answer_reward", {"prompt": "p", "label": 1}, "`answer` or `solution`"),
        ("accuracy_reward", {"prompt": [], "answer": 1}, "`solution`"),
        ("accuracy_reward", {"prompt": "p", "solution": 1}, "`prompt_as_chat`"),
        ("think_format_reward", {"prompt": "p"}, "`prompt_as_chat`"),
    ],
)
def test_dataset_that_a_reward_cannot_read(name, row, part):
    with pytest.raises(UserError) as error:
        check_columns([name], row)
    assert part in str(error.value)


def test_a_dataset_config_that_a_dataset_lacks_is_named(tmp_path):
    """As one that a recipe for the Hub has, with data of one's own; the command line takes it back."""
    jsonl(tmp_path / "train.jsonl")
    given = ["--dataset_name", str(tmp_path), "--dataset_config"]
    with pytest.raises(UserError, match=r"BuilderConfig 'main' not found.*`dataset_config`.*null"):
        load(*given, "main")
    train, _ = load(*given, "null")
    assert len(train) == len(ROWS)
