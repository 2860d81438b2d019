"""The plugin that runs TRL's own tests (see `upstream_plugin.py`), on a small test file written like TRL's."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


_FOLDER = Path(__file__).parent
_TESTS = """
import pytest
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.grpo_config import GRPOConfig as PlainConfig


def train(tmp_path, model="trl-internal-testing/tiny-Qwen2ForCausalLM-2.5", config=GRPOConfig):
    args = config(
        str(tmp_path), per_device_train_batch_size=3, num_generations=3, max_completion_length=8, max_steps=1,
        report_to="none", use_cpu=True, bf16=False,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **kwargs: [float(len(completion)) for completion in completions],
        args=args,
        train_dataset=load_dataset("trl-internal-testing/zen", "standard_prompt_only", split="train"),
    )
    trainer.train()
    return trainer


class TestGRPOTrainer:
    @pytest.mark.parametrize("config", [GRPOConfig, PlainConfig], ids=["public", "plain"])
    def test_train(self, tmp_path, config):
        trainer = train(tmp_path, config=config)
        assert trainer.state.global_step == 1
        classes, args = [c.__name__ for c in type(trainer).__mro__], trainer.args
        print("trained with", classes[1], args.selection, args.replay, args.skip_zero_advantage)

    def test_train_without_stand_in(self, tmp_path):
        train(tmp_path, model="trl-internal-testing/tiny-Unknown")

    def test_train_with_a_mistake(self, tmp_path):
        assert not hasattr(train(tmp_path).args, "selection")
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The finished process, the outcomes it wrote and the summary, with a baseline in which every test passes."""
    # A package `tests` as in TRL's repository, which must not be mistaken for this one
    folder = tmp_path_factory.mktemp("trl")
    (folder / "tests").mkdir()
    (folder / "tests" / "__init__.py").touch()
    (folder / "tests" / "test_grpo_trainer.py").write_text(_TESTS)
    (folder / "pytest.ini").write_text("[pytest]\n")
    names = ("train[public]", "train[plain]", "train_without_stand_in", "train_with_a_mistake")
    baseline = {f"tests/test_grpo_trainer.py::TestGRPOTrainer::test_{name}": {"outcome": "passed"} for name in names}
    (folder / "baseline.json").write_text(json.dumps(baseline))
    command = [sys.executable, "-m", "pytest", "-p", "upstream_plugin", "-rP", str(folder / "tests")]
    command += [f"--upstream-{name}={folder / name}.json" for name in ("baseline", "results")]
    command += [f"--upstream-summary={folder / 'summary.md'}"]
    result = subprocess.run(
        command,
        cwd=_FOLDER.parents[1],
        env={**os.environ, "PYTHONPATH": str(_FOLDER)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (folder / "results.json").exists(), result.stdout + result.stderr
    results = json.loads((folder / "results.json").read_text())
    outcomes = {test.rpartition("::test_")[2]: result for test, result in results.items()}
    return result, outcomes, (folder / "summary.md").read_text()


def test_trains_our_class_with_everything_off(run):
    result, outcomes, _ = run
    assert [outcomes[f"train[{config}]"]["outcome"] for config in ("public", "plain")] == ["passed", "passed"]
    trained = [line for line in result.stdout.splitlines() if line.startswith("trained with")]
    assert trained == ["trained with DataEfficientGRPOTrainer uniform off False"] * 2


def test_skips_an_id_without_a_stand_in(run):
    _, outcomes, summary = run
    expected = {"outcome": "skipped", "reason": "no local stand-in for trl-internal-testing/tiny-Unknown"}
    assert outcomes["train_without_stand_in"] == expected
    assert "Skipped for want of a stand-in: 1\n- `trl-internal-testing/tiny-Unknown`" in summary


def test_fails_for_what_passes_with_trl_s_class(run):
    result, outcomes, summary = run
    assert outcomes["train_with_a_mistake"]["outcome"] == "failed"
    assert result.returncode == pytest.ExitCode.TESTS_FAILED
    assert "Pass with TRL's class and fail with ours: 1\n" in summary
    assert "test_train_with_a_mistake`: AssertionError" in summary
