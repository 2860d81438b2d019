"""The plugin that runs TRL's own tests (see `upstream_plugin.py`), on a small test file written like TRL's."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


_TESTS = """
import pytest
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer


@pytest.mark.parametrize("model", ["tiny-Qwen2ForCausalLM-2.5", "tiny-Unknown"])
@pytest.mark.parametrize("passes_with", ["both", "trl", "dataeff"])
def test_train(tmp_path, model, passes_with):
    args = GRPOConfig(
        str(tmp_path), per_device_train_batch_size=3, num_generations=3, max_completion_length=8, max_steps=1,
        report_to="none",
    )
    trainer = GRPOTrainer(
        model=f"trl-internal-testing/{model}",
        reward_funcs=lambda completions, **kwargs: [float(len(completion)) for completion in completions],
        args=args,
        train_dataset=load_dataset("trl-internal-testing/zen", "standard_prompt_only", split="train"),
    )
    trainer.train()
    if ours := type(trainer).__mro__[1].__name__ == "DataEfficientGRPOTrainer":
        args = trainer.args
        assert (args.selection, args.replay, args.compact_update) == ("uniform", "off", False)
    assert passes_with in ("both", "dataeff" if ours else "trl")
"""


def test_what_passes_with_trls_class_is_run_with_ours_and_an_unknown_model_skips(tmp_path):
    # A package `tests` as in TRL's repository, which must not be mistaken for this one
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").touch()
    (tmp_path / "tests" / "test_grpo_trainer.py").write_text(_TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    folder = Path(__file__).parent
    own = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(folder.parents[1])])}
    command = [sys.executable, "-m", "pytest", "-rfs", "-p", "upstream_plugin", str(tmp_path / "tests")]
    command += [f"--upstream-passed={tmp_path / 'passed.json'}"]

    def run(name: str) -> str:
        named = [*command, f"--upstream-class={name}"]
        done = subprocess.run(named, cwd=folder.parents[1], env=own, capture_output=True, text=True, check=False)
        assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
        return done.stdout

    output = run("trl")
    assert "1 failed, 2 passed, 3 skipped" in output
    assert "no local stand-in for trl-internal-testing/tiny-Unknown" in output
    output = run("dataeff")
    assert "1 failed, 1 passed, 4 deselected" in output
    assert re.search(r"FAILED \S+::test_train\[trl-tiny-Qwen2", output)
