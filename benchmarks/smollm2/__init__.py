"""
A pretrained model: SmolLM2-135M-Instruct with LoRA, on questions of many kinds.

    python -m benchmarks.smollm2 study    # the runs of the tables that are not finished; stop it and go on at will
    python -m benchmarks.smollm2 run --methods default,replay=off --seeds 100    # runs of your own choice
    python -m benchmarks.smollm2 pools    # initial success rates of the pools
    python -m benchmarks.proof            # the tables of the pages

A finished run is a line of `benchmarks/results/pretrained.jsonl`, so a study grows over days and machines. On a CPU a
run takes one core for ten minutes. The learning rate falls linearly to 0, so runs are compared at their ends. With a
CUDA GPU, `run --prompts 32` takes more groups a step.
"""

from pathlib import Path


RESULTS = Path(__file__).resolve().parents[1] / "results"
#: The runs of the study
RUNS = RESULTS / "pretrained.jsonl"
