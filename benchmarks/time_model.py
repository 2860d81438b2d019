"""
A model of training time on a GPU, from measured steps and rollouts. It measures nothing itself.

    python -m benchmarks.time_model                                     # six typical set-ups
    python -m benchmarks.time_model --generation 4000 --update 30000 --prompt 150 --completion 600 --groups 32

The hours of a run are its steps times the time of a step:

    rollouts generated * completion / generation throughput + rows with a gradient * (prompt + completion) / update throughput

Steps, rollouts and rows with a gradient come from the committed runs of the synthetic benchmark's study `methods`, as shares of those of
`GRPOTrainer` (`uniform`): what a method needs to reach the accuracy that `uniform` ends with. So the model answers what these savings would be
worth on a GPU, if another task gave the same. Throughputs of the set-ups come from peak rates and the model's size, see [`Setup`].
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks import tables
from benchmarks.curves import geometric_mean
from benchmarks.lab.ratios import BASELINE, Curve, ratios
from benchmarks.proof import study


UTILISATION = 0.35  # of peak compute, in an update
BANDWIDTH_USED = 0.6  # of peak bandwidth, in generation
FULL = {200: 0.8, 2000: 0.6}  # share of these that are still running, on average: the batch waits for its longest
STEPS = 500  # of GRPOTrainer


@dataclass(frozen=True)
class GPU:
    """Peak rates, dense bfloat16 operations and bytes of memory per second; and how many sequences are generated together."""

    flops: float
    bandwidth: float
    at_once: int


@dataclass(frozen=True)
class Model:
    """Parameters, and bytes of the key-value cache of a token, in bfloat16."""

    parameters: float
    cache: float


GPUS = {"RTX 4090": GPU(165e12, 1.01e12, 64), "H100": GPU(989e12, 3.35e12, 256)}
MODELS = {"1.5B": Model(1.54e9, 28_672), "7B": Model(7.6e9, 57_344)}  # Qwen2.5


@dataclass(frozen=True)
class Setup:
    """
    Tokens of a prompt and of a completion, groups of a step and completions of a group; and the throughputs of a set-up, in tokens
    a second.
    """

    name: str
    prompt: int
    completion: int
    generation: float
    update: float
    groups: int = 32
    group_size: int = 8

    @classmethod
    def typical(cls, gpu: str, model: str, completion: int, prompt: int = 150) -> Setup:
        """
        Throughputs from peak rates. Generation reads all weights and the caches of all sequences for each token. An update with LoRA
        and gradient checkpointing takes eight operations per parameter and token: TRL's pass for old log-probs (with vLLM), two
        passes forward and the gradient of activations. Rows without a gradient skip all of them.
        """
        card, size = GPUS[gpu], MODELS[model]
        running = card.at_once * FULL[completion]
        read = 2 * size.parameters + running * (prompt + completion / 2) * size.cache
        generation = running * BANDWIDTH_USED * card.bandwidth / read
        update = UTILISATION * card.flops / (8 * size.parameters)
        return cls(f"{model}, {gpu}, {completion:,} tokens", prompt, completion, generation, update)

    def seconds(self, rollouts: float, rows: float) -> float:
        """A step that generates so many rollouts and trains on so many rows, both as shares of a step of `GRPOTrainer`."""
        places = self.groups * self.group_size
        generated = rollouts * self.completion / self.generation
        return places * (generated + rows * (self.prompt + self.completion) / self.update)


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
    """What a method needs, as shares of what `uniform` needs: steps, rollouts of a step, and rows of a step that go through the pass."""

    steps: float
    rollouts: float
    rows: float

    def hours(self, setup: Setup) -> float:
        return STEPS * self.steps * setup.seconds(self.rollouts, self.rows) / 3600


def measured(method: str, curves: Sequence[Curve]) -> Needs:
    """Means over the seeds of a method. Rows without a gradient skip the pass."""
    own = [curve for curve in curves if curve.method == method]
    base = [curve for curve in curves if curve.method == BASELINE]
    steps, rollouts = (geometric_mean(ratios(own, base, x))[0] for x in ("step", "rollouts"))
    rows = [c.column("effective_groups_trained").sum() / c.column("groups_trained").sum() for c in own]
    return Needs(steps, rollouts / steps, float(np.mean(rows)))


def methods(curves: Sequence[Curve]) -> dict[str, Needs]:
    """The methods of the table. `GRPOTrainer` passes all rows."""
    found = {name: measured(name, curves) for name in (BASELINE, "selection", "default", "share")}
    return {BASELINE: Needs(1.0, 1.0, 1.0), "skip": found.pop(BASELINE), **found}


def where_faster(one: Needs, other: Needs) -> str:
    """Where the needs `one` take less time than `other`: at which shares of generation in the time of a step of `GRPOTrainer`."""
    update, generation = (
        one.steps * a - other.steps * b for a, b in ((one.rows, other.rows), (one.rollouts, other.rollouts))
    )
    if update * generation >= 0:
        return "everywhere" if min(update, generation) < 0 else "nowhere"
    return f"{'above' if generation < 0 else 'below'} {update / (update - generation):.0%}"


def table(setups: Sequence[Setup]) -> str:
    """Hours of `GRPOTrainer`, and the other methods' as shares of these; and which is faster where."""
    needs = methods(study("methods"))
    base = needs.pop(BASELINE)
    rows = []
    for setup in setups:
        hours, generating = base.hours(setup), setup.seconds(1.0, 0.0) / setup.seconds(1.0, 1.0)
        shares = [need.hours(setup) / hours for need in needs.values()]
        rows.append([setup.name, f"{generating:.0%}", f"{hours:.1f}", *(f"{share:.2f}" for share in shares)])
    header = ["set-up", "share of generation", "plain GRPO, hours", *map(tables.title, needs)]
    default = needs.pop("default")
    faster = ", ".join(f"{where_faster(default, need)} ({tables.title(name)})" for name, need in needs.items())
    return (
        f"{tables.markdown(header, rows)}\n\nBy this model, the shares of generation at which the default takes less time than another "
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
    chosen = parser().parse_args(arguments)
    if (chosen.generation is None) != (chosen.update is None):
        raise SystemExit("--generation and --update belong together: both are throughputs of your machine.")
    print(table(TYPICAL if chosen.generation is None else [Setup("yours", **vars(chosen))]))


if __name__ == "__main__":
    main()
