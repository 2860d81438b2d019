"""
A model of training time on a GPU, from measured steps and rollouts. It measures nothing itself.

    python -m benchmarks.time_model                                     # six typical set-ups
    python -m benchmarks.time_model --generation 4000 --update 30000 --prompt 150 --completion 600 --groups 32

The hours of a run are its steps times the time of a step:

    rollouts generated * completion / generation throughput + rows with a gradient * (prompt + completion) / update
    throughput

Steps, rollouts and rows with a gradient come from the committed runs of the synthetic benchmark's study `methods`, as
shares of those of `GRPOTrainer` (`uniform`): what a method needs to reach the accuracy that `uniform` ends with. So
the model answers what these savings would be worth on a GPU, if another task gave the same. Throughputs of the set-ups
come from peak rates and the model's size, see [`Setup`].
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks import tables
from benchmarks.curves import geometric_mean
from benchmarks.lab.ratios import BASELINE, Curve, ratios
from benchmarks.lab.studies import runs_of_study


UTILISATION = 0.35  # of peak compute, in an update
BANDWIDTH_USED = 0.6  # of peak bandwidth, in generation
#: Share of the sequences that are still running, on average, by tokens of a completion: a batch waits for its longest
RUNNING = {200: 0.8, 2000: 0.6}
STEPS = 500  # of GRPOTrainer
BYTES_OF_A_PARAMETER = 2  # bfloat16
OPERATIONS_OF_AN_UPDATE = 8  # per parameter and token, see `Setup.typical`


@dataclass(frozen=True)
class GPU:
    """A graphics card."""

    flops: float  # dense bfloat16 operations a second, at the peak
    bandwidth: float  # bytes of memory a second, at the peak
    at_once: int  # sequences that are generated together


@dataclass(frozen=True)
class Model:
    """A language model, in bfloat16."""

    parameters: float
    cache: float  # bytes of the key-value cache of a token


GPUS = {
    "RTX 4090": GPU(flops=165e12, bandwidth=1.01e12, at_once=64),
    "H100": GPU(flops=989e12, bandwidth=3.35e12, at_once=256),
}
#: Qwen2.5
MODELS = {
    "1.5B": Model(parameters=1.54e9, cache=28_672),
    "7B": Model(parameters=7.6e9, cache=57_344),
}


@dataclass(frozen=True)
class Setup:
    """A model, a card and a task."""

    name: str
    prompt: int  # tokens
    completion: int  # tokens
    generation: float  # tokens a second
    update: float  # tokens a second
    groups: int = 32  # of a step
    group_size: int = 8  # completions

    @classmethod
    def typical(cls, gpu: str, model: str, completion: int, prompt: int = 150) -> Setup:
        """Make a set-up whose throughputs follow from peak rates.

        Generation reads all weights and the caches of all sequences for each token. An update with LoRA and gradient
        checkpointing takes eight operations per parameter and token: TRL's pass for old log-probs (with vLLM), two
        passes forward and the gradient of activations. Rows without a gradient skip all of them.

        Args:
            gpu (`str`): One of `GPUS`.
            model (`str`): One of `MODELS`.
            completion (`int`): Tokens of a completion; one of `RUNNING`.
            prompt (`int`, *optional*, defaults to `150`): Tokens of a prompt.
        """
        card = GPUS[gpu]
        size = MODELS[model]
        running = card.at_once * RUNNING[completion]
        weights = BYTES_OF_A_PARAMETER * size.parameters
        caches = running * (prompt + completion / 2) * size.cache
        generation = running * BANDWIDTH_USED * card.bandwidth / (weights + caches)
        update = UTILISATION * card.flops / (OPERATIONS_OF_AN_UPDATE * size.parameters)
        return cls(f"{model}, {gpu}, {completion:,} tokens", prompt, completion, generation, update)

    def seconds(self, rollouts: float, rows: float) -> float:
        """The time of a step.

        Args:
            rollouts (`float`): Rollouts that it generates, as a share of those of a step of `GRPOTrainer`.
            rows (`float`): Rows that it trains on, as such a share.
        """
        generation = rollouts * self.completion / self.generation
        update = rows * (self.prompt + self.completion) / self.update
        return self.groups * self.group_size * (generation + update)


#: Without 7B on an RTX 4090: with vLLM in the process the weights are in memory twice, and do not fit
TYPICAL = (
    Setup.typical("RTX 4090", "1.5B", 200),
    Setup.typical("RTX 4090", "1.5B", 2000),
    Setup.typical("H100", "1.5B", 200),
    Setup.typical("H100", "1.5B", 2000),
    Setup.typical("H100", "7B", 200),
    Setup.typical("H100", "7B", 2000),
)


@dataclass(frozen=True)
class Needs:
    """What a method needs, as shares of what `uniform` needs."""

    steps: float
    rollouts: float  # of a step
    rows: float  # of a step that go through the forward and backward pass

    def hours(self, setup: Setup) -> float:
        return STEPS * self.steps * setup.seconds(self.rollouts, self.rows) / 3600


def measured(method: str, curves: Sequence[Curve]) -> Needs:
    """Means over the seeds of a method. Rows without a gradient skip the pass."""
    own = [curve for curve in curves if curve.method == method]
    baseline = [curve for curve in curves if curve.method == BASELINE]
    steps, _, _ = geometric_mean(ratios(own, baseline, "step"))
    rollouts, _, _ = geometric_mean(ratios(own, baseline, "rollouts"))
    rows = []
    for curve in own:
        effective = curve.column("effective_groups_trained").sum()
        rows.append(effective / curve.column("groups_trained").sum())
    return Needs(steps, rollouts / steps, float(np.mean(rows)))


def needs_of_methods(curves: Sequence[Curve]) -> dict[str, Needs]:
    """The methods of the table.

    `GRPOTrainer` computes all rows; `skip` does the same without rows that have no gradient.
    """
    needs = {BASELINE: Needs(1.0, 1.0, 1.0)}
    needs["skip"] = measured(BASELINE, curves)
    for method in ("selection", "default", "share"):
        needs[method] = measured(method, curves)
    return needs


def where_faster(one: Needs, other: Needs) -> str:
    """
    At which shares of generation in the time of a step of `GRPOTrainer` the needs `one` take less time than `other`.
    """
    # By how much more the first one takes, if a step is all update or all generation; linear between the two
    update = one.steps * one.rows - other.steps * other.rows
    generation = one.steps * one.rollouts - other.steps * other.rollouts
    if update * generation >= 0:
        return "everywhere" if min(update, generation) < 0 else "nowhere"
    side = "above" if generation < 0 else "below"
    return f"{side} {update / (update - generation):.0%}"


def table(setups: Sequence[Setup]) -> str:
    """Hours of `GRPOTrainer`, and the other methods' as shares of these; and which is faster where."""
    others = needs_of_methods(runs_of_study("methods"))
    baseline = others.pop(BASELINE)
    rows = []
    for setup in setups:
        hours = baseline.hours(setup)
        generation_share = setup.seconds(1.0, 0.0) / setup.seconds(1.0, 1.0)
        shares = [f"{needs.hours(setup) / hours:.2f}" for needs in others.values()]
        rows.append([setup.name, f"{generation_share:.0%}", f"{hours:.1f}", *shares])
    titles = [tables.title(method) for method in others]
    header = ["set-up", "share of generation", "plain GRPO, hours", *titles]

    default = others.pop("default")
    faster = ", ".join(f"{where_faster(default, needs)} ({tables.title(name)})" for name, needs in others.items())
    return (
        f"{tables.markdown(header, rows)}\n\n"
        "By this model, the shares of generation at which the default takes less time than another "
        f"method: {faster}."
    )


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m benchmarks.time_model", description="Hours of training, by a model.")
    top.add_argument("--generation", type=float, help="tokens generated a second, of all sequences together")
    top.add_argument("--update", type=float, help="tokens a second through the forward and backward pass")
    top.add_argument("--prompt", type=int, default=150, help="tokens of a prompt (default: 150)")
    top.add_argument("--completion", type=int, default=600, help="mean tokens of a completion (default: 600)")
    top.add_argument("--groups", type=int, default=32, help="groups of a step (default: 32)")
    top.add_argument("--group-size", type=int, default=8, help="completions of a group (default: 8)")
    return top


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    if (options.generation is None) != (options.update is None):
        raise SystemExit("--generation and --update belong together: both are throughputs of your machine.")
    setups = TYPICAL if options.generation is None else [Setup("yours", **vars(options))]
    print(table(setups))


if __name__ == "__main__":
    main()
