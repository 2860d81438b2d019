"""The plugin that runs TRL's own tests (see `upstream_plugin.py`), on a small test file written like TRL's."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


_TESTS = """
import pytest
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer


@pytest.mark.parametrize("model", ["trl-internal-testing/tiny-Qwen2ForCausalLM-2.5", "trl-internal-testing/tiny-Unknown"])
@pytest.mark.parametrize("mistaken", [False, True])
def test_train(tmp_path, model, mistaken):
    args = GRPOConfig(
        str(tmp_path), per_device_train_batch_size=3, num_generations=3, max_completion_length=8, max_steps=1,
        report_to="none",
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **kwargs: [float(len(completion)) for completion in completions],
        args=args,
        train_dataset=load_dataset("trl-internal-testing/zen", "standard_prompt_only", split="train"),
    )
    trainer.train()
    assert type(trainer).__mro__[1].__name__ == "DataEfficientGRPOTrainer"
    assert (trainer.args.selection, trainer.args.replay, trainer.args.skip_zero_advantage) == ("uniform", "off", False)
    assert not mistaken
"""


def test_a_test_that_passes_with_trls_class_alone_fails_and_an_unknown_model_skips(tmp_path):
    # A package `tests` as in TRL's repository, which must not be mistaken for this one
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").touch()
    (tmp_path / "tests" / "test_grpo_trainer.py").write_text(_TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    tests = [f"tests/test_grpo_trainer.py::test_train[{mistaken}-{model}]" for mistaken in (False, True)
             for model in ("trl-internal-testing/tiny-Qwen2ForCausalLM-2.5", "trl-internal-testing/tiny-Unknown")]  # fmt: skip
    (tmp_path / "baseline.json").write_text(json.dumps(dict.fromkeys(tests, "passed")))
    command = [sys.executable, "-m", "pytest", "-p", "upstream_plugin", str(tmp_path / "tests")]
    command += [f"--upstream-{name}={tmp_path / name}.json" for name in ("baseline", "results")]
    command += [f"--upstream-summary={tmp_path / 'summary.md'}"]
    folder = Path(__file__).parent
    own = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(folder.parents[1])])}
    done = subprocess.run(command, cwd=folder.parents[1], env=own, capture_output=True, text=True, check=False)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    outcomes = json.loads((tmp_path / "results.json").read_text())
    assert [outcomes[test] for test in tests] == ["passed", "skipped", "failed", "skipped"]
    summary = (tmp_path / "summary.md").read_text()
    assert f"Pass with TRL's class and fail with ours: 1\n- `{tests[2]}`: " in summary
    assert "Skipped for want of a stand-in: 2\n" in summary
