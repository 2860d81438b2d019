"""Golden runs: whether seeded trainings do the same to the last bit as with an earlier commit.

    python -m benchmarks.golden COMMIT              every case
    python -m benchmarks.golden COMMIT --case NAME  one of them

Each case trains a very small model with the package of COMMIT and with that of the working tree, in a process of its own
with one thread, on this machine (bits differ between machines). It compares the prompts that the reward function sees,
the losses, gradient norms and entropies of every step, and the final weights. Ends with status 1 if any differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import string
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parent.parent
OFF = {"selection": "uniform", "replay": "off", "skip_zero_advantage": False}
PUBLISHED_DOTS = {
    **{"selection": "dots_paper", "selector_args": {"reference_size": 8}, "skip_zero_advantage": False},
    **{"replay": "share", "replay_order": "random", "replay_max_age": None, "replay_ratio_cap": None},
}
DYNAMIC = {"selection": "greso", "max_rollout_rounds": 4, "replay": "off", "skip_zero_advantage": False}
ACCUMULATION = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 8, "steps_per_generation": 4}
CASES: dict[str, dict[str, Any]] = {
    "off": OFF,
    "defaults": {},
    "accumulation": ACCUMULATION,
    "graded rewards": {"graded": True, "reward_range": [0.0, 1.0]},
    "one group a batch": {"per_device_train_batch_size": 4},
    "selection alone": {"replay": "off", "skip_zero_advantage": False},
    "selection and skipped rows": {"replay": "off"},
    "skipped rows alone": {"selection": "uniform", "replay": "off"},
    "replay alone": {"selection": "uniform", "scale_rewards": "batch"},
    "proximal clip": {"replay_clip": "proximal"},
    "greso": {"selection": "greso", "replay": "off", "skip_zero_advantage": False},
    "dynamic sampling": {**DYNAMIC, "rollout_margin": 1.25},
    "dynamic sampling and replay": {"max_rollout_rounds": 4},
    "published DOTS": PUBLISHED_DOTS,
    "resume of the defaults": {"resume": 5, "steps_per_generation": 2},
    "resume of accumulation": {"resume": 5, **ACCUMULATION},
    "resume of dynamic sampling": {**DYNAMIC, "resume": 7, "steps_per_generation": 2},
    "resume of published DOTS": {**PUBLISHED_DOTS, "resume": 5, "steps_per_generation": 2},
}
STEPS = 14
COMPARED = ("loss", "grad_norm", "entropy", "learning_rate")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="The commit to compare with.")
    parser.add_argument("--case", choices=CASES, action="append", help="A case; by default all of them.")
    options = parser.parse_args()
    different = 0
    with tempfile.TemporaryDirectory() as folder:
        earlier = Path(folder) / "earlier"
        earlier.mkdir()
        archive = subprocess.run(["git", "archive", options.commit, "trl_dataeff"], cwd=ROOT, stdout=-1, check=True)
        subprocess.run(["tar", "-x"], cwd=earlier, input=archive.stdout, check=True)
        for name in options.case or CASES:
            base, present = trained(name, earlier, folder), trained(name, ROOT, folder)
            difference = first_difference(base, present)
            different += difference is not None
            print(f"{name:<30}{difference or 'equal'}", flush=True)
    sys.exit(1 if different else 0)


def trained(name: str, tree: Path, folder: str) -> dict[str, list]:
    """What a process recorded that ran the case `name` with the package in `tree`."""
    with tempfile.TemporaryDirectory(dir=folder) as output:
        command = [sys.executable, "-P", __file__, name, output]
        environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        run = subprocess.run(command, env=environment, capture_output=True, text=True)
        if run.returncode:
            sys.exit(f"'{name}' failed with the package in {tree}:\n{run.stderr[-2000:]}")
        return json.loads((Path(output) / "recorded.json").read_text(encoding="utf-8"))


def first_difference(base: dict[str, list], present: dict[str, list]) -> str | None:
    for part, values in base.items():
        if len(values) != len(present[part]):
            return f"DIFFERENT: {len(values)} instead of {len(present[part])} of '{part}'"
        for i, (a, b) in enumerate(zip(values, present[part], strict=True)):
            if a != b:
                return f"DIFFERENT: '{part}' {i}: {a} before, {b} now"
    return None


def run_case(name: str, output: Path) -> None:
    """In the child: train as the case says, and write what it did."""
    case = dict(CASES[name])
    resume, graded = case.pop("resume", None), case.pop("graded", False)
    seen: list[list[str]] = []
    if resume:
        train(case, graded, output, [], save_strategy="steps", save_steps=1)
    checkpoint = str(output / f"checkpoint-{resume}") if resume else None
    trainer = train(case, graded, output, seen, resume_from=checkpoint, save_strategy="no")
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert len(logs) == STEPS
    weights = hashlib.sha256()
    for _, tensor in sorted(trainer.model.state_dict().items()):
        weights.update(tensor.detach().cpu().numpy().tobytes())
    recorded = {
        "prompts": seen,
        **{key: [float(log[key]).hex() for log in logs if key in log] for key in COMPARED},
        "weights": [weights.hexdigest()],
    }
    (output / "recorded.json").write_text(json.dumps(recorded), encoding="utf-8")


def train(case: dict, graded: bool, output: Path, seen: list, resume_from: str | None = None, **fields: Any) -> Any:
    import torch
    from datasets import Dataset

    from trl_dataeff import DataEfficientGRPOConfig, DataEfficientGRPOTrainer

    torch.set_num_threads(1)

    def reward(prompts: list[str], completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        """A third of the prompts are too hard, a third are easy, and the others are solved about half of the time."""
        seen.append(list(prompts))
        totals = []
        for prompt, ids in zip(prompts, completion_ids, strict=True):
            kind, number = int(prompt[:2]) % 3, sum(ids)
            share = [0.0, (number % 5) / 4 if graded else float(number % 2), float(number % 7 > 0)][kind]
            totals.append(share)
        return totals

    settings = {
        **{"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "seed": 3, "max_steps": STEPS},
        **{"per_device_train_batch_size": 16, "num_generations": 4, "max_completion_length": 6},
        **{"learning_rate": 3e-3, "logging_steps": 1, "report_to": "none", "disable_tqdm": True},
        **case,
        **fields,
    }
    tokenizer = character_tokenizer()
    trainer = DataEfficientGRPOTrainer(
        small_model(tokenizer),
        reward,
        args=DataEfficientGRPOConfig(str(output), **settings),
        train_dataset=Dataset.from_dict({"prompt": [f"{i:02d}:{i % 7}+{i % 5}=" for i in range(36)]}),
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=resume_from)
    return trainer


def character_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *string.printable])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def small_model(tokenizer: Any) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
        **shape,
        **tokens,
    )
    return LlamaForCausalLM(config)


if __name__ == "__main__":
    if "-P" in sys.orig_argv:
        run_case(sys.argv[1], Path(sys.argv[2]))
    else:
        main()
