"""The command from end to end: help, recipes, training here, and what goes to `accelerate launch`."""

import json
import os
import signal
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

import trl_dataeff
from trl_dataeff import DataEfficientGRPOConfig
from trl_dataeff.cli import grpo as launching
from trl_dataeff.cli.grpo import make_trainer, parse
from trl_dataeff.cli.main import main, shipped_recipes
from trl_dataeff.tracking.files import GROUPS_FILE, METRICS_FILE, SCHEMA
from trl_dataeff.tracking.metrics import MetricsLog


def test_training_from_a_recipe(recipe, tmp_path, capsys):
    assert main(["grpo", "--config", recipe, "--seed", "7"]) == 0
    out = tmp_path / "out"
    printed = capsys.readouterr().out
    assert "Training completed" in printed
    assert "trl-dataeff report out" in printed
    assert main(["report", "out"]) == 0
    weights = load_file(out / "adapter_model.safetensors")
    moved = [name for name, weight in weights.items() if "lora_B" in name and weight.abs().sum() > 0]
    assert len(moved) == sum("lora_B" in name for name in weights) == 4  # two layers, two modules each
    state = json.loads((out / "checkpoint-2" / "trainer_state.json").read_text())
    log = state["log_history"][-1]
    assert log["dataeff/rollouts_trained"] == 16
    assert {"rewards/numeric_answer_reward/mean", "rewards/letter_share_reward/mean"} <= log.keys()
    args = torch.load(out / "training_args.bin", weights_only=False)
    assert isinstance(args, DataEfficientGRPOConfig)
    assert (args.seed, args.max_rollout_rounds, args.learning_rate) == (7, 4, 1e-2)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_run_that_is_stopped_ends_with_the_signals_code(recipe, tmp_path, monkeypatch, capsys, number, code):
    folder = tmp_path / "out"
    trainer_class = trl_dataeff.DataEfficientGRPOTrainer
    original = trainer_class.training_step

    def training_step(self, *args, **kwargs):
        signal.raise_signal(number)
        return original(self, *args, **kwargs)

    monkeypatch.delattr("transformers.Trainer.end", raising=False)  # which Transformers below 5.18 lack
    with monkeypatch.context() as patch:
        patch.setattr(trainer_class, "training_step", training_step)
        command = ["grpo", "--config", recipe, "--max_steps", "3", "--save_on_signal", "true"]
        with pytest.raises(SystemExit) as stopped:
            raise SystemExit(main(command))  # as the installed command does
    assert stopped.value.code == code
    assert "Training completed" not in capsys.readouterr().out
    assert not (folder / "adapter_model.safetensors").exists()
    assert main(["grpo", "--config", recipe, "--max_steps", "3", "--resume_from_checkpoint", "last"]) == 0
    states = [json.loads((folder / f"checkpoint-{step}" / "trainer_state.json").read_text()) for step in (1, 3)]
    first, resumed = (state["log_history"][0] for state in states)
    assert resumed == first, "seconds too: a run that started anew would log its own"


@pytest.mark.parametrize(
    ("save_steps", "part"), [(1, "--resume_from_checkpoint out/checkpoint-1"), (5, "no checkpoint")]
)
def test_a_run_that_ctrl_c_ends_at_once_says_how_to_resume(recipe, monkeypatch, capsys, save_steps, part):
    trainer_class = trl_dataeff.DataEfficientGRPOTrainer
    original = trainer_class.compute_loss

    def compute_loss(self, *args, **kwargs):
        if self.state.global_step == 1:
            raise KeyboardInterrupt
        return original(self, *args, **kwargs)

    monkeypatch.setattr(trainer_class, "compute_loss", compute_loss)
    options = ["--max_steps", "3", "--save_strategy", "steps", "--save_steps", str(save_steps)]
    assert main(["grpo", "--config", recipe, *options]) == 130
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("trl-dataeff: stopped")]
    assert len(lines) == 1
    assert "after step 1" in lines[0]
    assert part in lines[0]
    assert "cause" not in lines[0]


def test_model_is_loaded_as_the_fields_say(recipe, capsys):
    options = ["--dtype", "bfloat16", "--attn_implementation", "eager", "--lora_r", "2", "--lora_alpha", "6"]
    options += ["--model_init_kwargs", '{"tie_word_embeddings": true}']
    trainer = make_trainer(parse(["--config", recipe, *options]))
    model = trainer.model
    assert model.peft_config["default"].r == 2
    assert model.peft_config["default"].lora_alpha == 6
    assert model.config._attn_implementation == "eager"
    assert model.config.tie_word_embeddings is True  # the tiny model's own value is False
    assert next(p for name, p in model.named_parameters() if "base_layer" in name).dtype == torch.bfloat16
    assert main(["grpo", "--config", recipe, "--lora_target_modules", "nothing_like_this"]) == 2
    assert "nothing_like_this" in capsys.readouterr().err


def test_output_whose_reader_stops_ends_without_a_traceback():
    command = [sys.executable, "-m", "trl_dataeff.cli.main", "recipes", "list"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()  # as `head` does
        assert process.stderr.read() == ""
    assert process.returncode == -signal.SIGPIPE


def test_mistake_in_a_program_keeps_its_traceback(recipe, monkeypatch):
    def broken(completions, **kwargs):
        raise KeyError("a mistake in the reward")

    monkeypatch.setattr("tests.factories.tiny.letter_share_reward", broken)
    with pytest.raises(KeyError, match="a mistake in the reward"):
        main(["grpo", "--config", recipe])


def test_only_the_first_process_says_what_is_wrong(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    assert main(["recipes", "show", "nowhere"]) == 2
    assert capsys.readouterr().err == ""


def test_launch_options_go_to_accelerate(recipe, monkeypatch):
    launched = []
    monkeypatch.setattr("accelerate.commands.launch.launch_command", launched.append)
    options = ["--num_processes", "2", "--seed", "3", "--accelerate_config", "fsdp2"]
    assert main(["grpo", "--config", recipe, *options]) == 0
    (args,) = launched
    assert args.num_processes == 2
    assert args.config_file.endswith("accelerate_configs/fsdp2.yaml")
    assert args.module is True
    assert args.training_script == "trl_dataeff.cli.grpo"
    assert args.training_script_args == ["--config", recipe, *options]
    assert parse(args.training_script_args).training.seed == 3


@pytest.mark.parametrize(("options", "warns"), [(["--num_processes", "4"], True), (["--num_processes", "1"], False)])
def test_processes_that_do_not_start_are_said(options, warns, recipe, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    replaced = []
    monkeypatch.setattr(os, "execvpe", lambda *command: replaced.append(command))
    assert main(["grpo", "--config", recipe, *options]) == 0
    assert len(replaced) == 1
    assert ("warning: `num_processes` is 4" in capsys.readouterr().err) is warns


@pytest.mark.parametrize(
    ("launch_args", "devices", "use_cpu", "config", "expected"),
    [
        ([], 1, False, "/nowhere", False),
        ([], 2, False, "/nowhere", True),  # accelerate launch uses all GPUs, so do we
        ([], 2, True, "/nowhere", False),
        (["--num_processes", "1"], 0, False, "/nowhere", True),
        ([], 0, True, __file__, True),  # accelerate is configured on this machine
    ],
)
def test_when_training_is_launched(launch_args, devices, use_cpu, config, expected, monkeypatch):
    monkeypatch.setattr("torch.accelerator.device_count", lambda: devices)
    monkeypatch.setattr("accelerate.commands.config.default_config_file", config)
    assert launching.needs_launch(launch_args, use_cpu) is expected


def test_a_launched_process_trains_with_its_recipe_as_it_is(recipe, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(launching, "parse", lambda argv: argv)
    trained = []
    monkeypatch.setattr(launching, "train", trained.append)
    command = ["--config", recipe, "--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "1"]
    assert (launching.run(command), trained) == (0, [command])


def test_the_command_and_python_have_the_same_defaults():
    arguments = parse(["--reward_funcs", "a.b", "--use_cpu", "true", "--output_dir", "out", "--bf16", "false"])
    plain = DataEfficientGRPOConfig("out", use_cpu=True, bf16=False)
    differ = {n: v for n, v in arguments.training.to_dict().items() if v != plain.to_dict()[n] and "dir" not in n}
    assert differ == {}


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """In the current folder, completions in a table, and a run of this package."""
    monkeypatch.chdir(tmp_path)
    rows = {"prompt": ["a", "a"], "reward": [0, 1], "step": [1, 1]}
    pq.write_table(pa.table(rows), "rows.parquet")
    logs = MetricsLog(tmp_path / "out" / METRICS_FILE)
    logs.add({"reward": 0.5, "loss": 0.0}, step=1, rollouts=8, tokens=80)
    group = {"step": 0, "success_rate": 0.5, "kind": "effective", "completions": 4}
    pq.write_table(pa.Table.from_pylist([group], schema=SCHEMA), tmp_path / "out" / GROUPS_FILE)


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["--help"], 0),
        (["--version"], 0),
        (["adit"], 2),
        (["validate"], 2),
        (["grpo"], 2),
        (["audit", "--help"], 0),
        (["audit", "rows.parquet", "--figre"], 2),
        (["recipes", "list"], 0),
        (["recipes", "list", "gpt2"], 2),
        (["recipes", "--help"], 0),
        (["audit", "rows.parquet"], 0),
        (["audit", "out"], 0),
        (["audit", "rows.parqet"], 2),
        (["report", "out", "--figure", "out.svg"], 0),
        (["report", "uot"], 2),
    ],
)
def test_what_only_reads_and_prints_imports_no_torch(command, code, recorded):
    program = (
        "import sys, trl_dataeff\n"
        "from trl_dataeff.cli.main import main\n"
        "dir(trl_dataeff)\n"
        "try:\n"
        f"    code = main({command})\n"
        "except SystemExit as ended:\n"
        "    code = ended.code\n"
        "heavy = {'torch', 'transformers', 'trl', 'peft', 'datasets', 'accelerate'} & set(sys.modules)\n"
        "print(code, *heavy)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == [str(code)], done.stderr


def test_versions_for_a_bug_report_in_a_console_that_knows_only_ascii():
    code = "from trl_dataeff.cli.main import main\nmain(['env'])\nprint('✅')"
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
    assert f"- trl-dataeff version: {trl_dataeff.__version__}\n" in done.stdout
    assert done.stdout.endswith("?\n")


@pytest.mark.parametrize(
    ("command", "code", "part"),
    [
        ([], 0, "gsm8k/uniform"),
        (["--version"], 0, f"trl-dataeff {trl_dataeff.__version__}\n"),
        (["audit", "--help"], 0, "--reward_column"),
        (["grpo", "--help"], 0, "  --selector_args "),
    ],
)
def test_help_version_and_unknown_commands(command, code, part, capsys):
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == code
    assert part in "".join(capsys.readouterr())


@pytest.mark.parametrize("command", [["audit", "--help"], ["report", "--help"], ["--help"], ["recipes", "list"]])
def test_what_is_printed_fits_a_narrow_terminal(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "72")
    with pytest.raises(SystemExit):
        raise SystemExit(main(command))
    lines = capsys.readouterr().out.splitlines()
    prose = [line for line in lines if not line.startswith("  trl-dataeff ")]
    assert max(map(len, prose)) <= 72
    assert not any(line.startswith("  trl-dataeff ") and len(line) > 80 for line in lines)


@pytest.mark.parametrize(
    ("command", "meant"),
    [("adit", "audit"), ("recipe", "recipes"), ("validate", "recipes validate"), ("list", "recipes list")],
)
def test_an_unknown_command_is_answered_with_the_one_that_was_meant(command, meant, capsys):
    assert main([command, "r.yaml"]) == 2
    said = capsys.readouterr().err
    assert f"Did you mean `{meant}`?" in said
    assert "`env`" in said


def test_recipes_are_listed_by_a_part_of_their_names(capsys):
    def listed(*words: str) -> list[str]:
        assert main(["recipes", "list", *words]) == 0
        return [line for line in capsys.readouterr().out.splitlines() if line.endswith(names_end)]

    names_end = tuple(f"/{name.split('/')[-1]}" for name in shipped_recipes())
    assert listed() == list(shipped_recipes())
    of_model = listed("qwen2.5-0.5b")
    assert of_model == [name for name in shipped_recipes() if name.startswith("Qwen2.5-0.5B-Instruct/")]
    assert of_model
    assert listed("/gsm8k/") == [name for name in shipped_recipes() if name.split("/")[1] == "gsm8k"]
    assert main(["recipes", "list", "Qwen2.5-0.5B-Instrct"]) == 2
    assert "Did you mean `Qwen2.5-0.5B-Instruct`" in capsys.readouterr().err


def test_recipes_list_show_copy_validate(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["recipes", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    name = "Qwen2.5-0.5B-Instruct/gsm8k/uniform"
    assert name in lines
    assert main(["recipes", "show", name]) == 0
    text = capsys.readouterr().out
    assert main(["recipes", "copy", name]) == 0
    assert (tmp_path / "gsm8k-uniform.yaml").read_text() == text
    assert main(["recipes", "copy", name]) == 2
    assert main(["recipes", "copy", name, "--force"]) == 0
    for dest, file in [("new", "new/gsm8k-uniform.yaml"), ("new/mine.yaml", "new/mine.yaml")]:
        assert main(["recipes", "copy", name, dest, "--force"]) == 0
        assert (tmp_path / file).is_file()
    assert main(["recipes", "validate", "gsm8k-uniform.yaml", name]) == 0
