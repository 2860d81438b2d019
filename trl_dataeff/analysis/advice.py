"""What a recorded run says that its owner should act on."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trl_dataeff.tracking import summaries
from trl_dataeff.tracking.recorded import RecordedRun


class Advice(NamedTuple):
    """`what` was seen, with its numbers, and what to `do` about it."""

    what: str
    do: str


def advice_of(run: RecordedRun) -> list[Advice]:
    """Everything to act on, the most important first."""
    found = [*_faults(run), *_replay(run), *_predictions(run), *_groups(run), *_neglected(run), *_lengths(run)]
    if run.lines and run.held_out is None:
        found.append(
            Advice(
                "The run has no evaluation. The reward in training is that of selected prompts: it does not say what was learned.",
                "Give an `eval_dataset` and `eval_strategy: steps`.",
            )
        )
    return found


def _late(run: RecordedRun, name: str) -> float:
    """Mean of a metric of this package over the last third of its logs; NaN without any."""
    values = run.own(name)[1]
    return float(values[-max(1, len(values) // 3) :].mean()) if len(values) else float("nan")


def _faults(run: RecordedRun) -> list[Advice]:
    found = []
    texts = {
        "reward_faults": ("{:,.0f} rewards were non-numeric, infinite or late.", "Look at the reward function."),
        "overlong_prompts": ("{:,.0f} completions had no room in the model's context.", "Filter the longest prompts."),
        "steps_skipped": (
            "{:,.0f} optimizer steps were skipped because the gradient was not finite.",
            "Lower `learning_rate`, or train in bf16 instead of fp16.",
        ),
        "server_returns": ("The vLLM server was restarted {:,.0f} times.", "Look at the server's own log."),
    }
    for name, (what, do) in texts.items():
        value = run.last(f"dataeff/{name}")
        if value > 0:
            found.append(Advice(what.format(value), do))
    unscorable = _late(run, "unscorable_ratio")
    if unscorable > 0.05:
        found.append(
            Advice(
                f"{unscorable:.0%} of the completions got no score.",
                "A reward function returns None: check its input.",
            )
        )
    return found


def _replay(run: RecordedRun) -> list[Advice]:
    if not run.argument("replay_fraction"):
        return []
    found = []
    replayed = run.last("dataeff/rollouts_replayed")
    if replayed == 0:
        rows = (run.argument("per_device_train_batch_size") or 0) * (run.argument("steps_per_generation") or 0)
        groups = rows // run.group_size if run.group_size else 0
        if groups == 1:
            found.append(
                Advice(
                    "Replay had no effect: each process trains on one group per generation batch, and half a group cannot be replayed.",
                    "Raise `per_device_train_batch_size` or `steps_per_generation`, or lower `num_generations`.",
                )
            )
        else:
            found.append(
                Advice(
                    "Replay had no effect: no stored group was replayed.",
                    "Effective groups are too rare, or too old: raise `replay_max_age`, or set `replay_fraction: 0`.",
                )
            )
        return found
    ess, clipped, capped = (_late(run, f"replay/{name}") for name in ("ess", "clipped_share", "capped_share"))
    older = "Lower `replay_max_age` or `learning_rate`: the policy moves fast for the age of the stored rollouts."
    if ess < 0.5:
        found.append(
            Advice(f"A few replayed tokens dominate: the effective sample size is {ess:.0%} at the end.", older)
        )
    if clipped > 0.3:
        found.append(
            Advice(
                f"{clipped:.0%} of the replayed tokens have no gradient at the end, because they were clipped.", older
            )
        )
    if capped > 0.05:
        found.append(Advice(f"{capped:.0%} of the replayed tokens were held at `replay_ratio_cap`.", older))
    return found


def _predictions(run: RecordedRun) -> list[Advice]:
    table = summaries.calibration(run)
    if table is None:
        return []
    found = []
    if table.explored and np.isfinite(table.bias_half_width) and abs(table.bias) > max(0.08, table.bias_half_width):
        side = "higher" if table.bias > 0 else "lower"
        found.append(
            Advice(
                f"Predictions lag behind the policy: in the last third observed success rates are {abs(table.bias):.0%} "
                f"(±{table.bias_half_width:.0%}) {side} than predicted.",
                "Lower `learning_rate`, shorten `history_half_lives`, or raise `exploration`.",
            )
        )
    if table.explored and table.groups.sum() >= 100 and table.correlation < 0.1:
        found.append(
            Advice(
                f"Predictions say nothing: their correlation with what was observed is {table.correlation:.2f}.",
                "Try another `dots_embedding`, or `selection: greso`, which needs none.",
            )
        )
    return found


def _groups(run: RecordedRun) -> list[Advice]:
    found = []
    steps, shares = summaries.kind_shares(run)
    if len(steps) >= 3:
        effective, easy, hard = shares[:, -max(1, len(steps) // 3) :].mean(axis=1)
        if effective < 0.25 and easy >= hard:
            found.append(
                Advice(
                    f"Only {effective:.0%} of the groups are effective at the end, and {easy:.0%} are solved by every completion.",
                    "The data is used up: stop here, or add harder prompts.",
                )
            )
        elif effective < 0.25:
            found.append(
                Advice(
                    f"Only {effective:.0%} of the groups are effective at the end, and {hard:.0%} are solved by no completion.",
                    "Add easier prompts, raise `num_generations`, or check the reward function on a right answer.",
                )
            )
    padded = _late(run, "padded_groups")
    if padded > 0.5:
        found.append(
            Advice(
                f"Rounds of dynamic sampling ran out: {padded:.1f} zero-variance groups completed a generation batch.",
                "Raise `max_rollout_rounds`, or add prompts that can be learned.",
            )
        )
    return found


def _neglected(run: RecordedRun) -> list[Advice]:
    """Values of a column that were rolled out at first and hardly are now, though they are not solved."""
    found = []
    for column in summaries.columns_of(run)[:6]:
        table = summaries.by_column(run, column, most_bins=3)
        if table.groups.shape[1] < 3 or len(table.rows) > summaries.MOST_ROWS - 1:
            continue
        share = table.groups / np.maximum(table.groups.sum(axis=0), 1)
        for row, name in enumerate(table.rows):
            known = table.values[row][np.isfinite(table.values[row])]
            unsolved = len(known) and 0.02 < known[-1] < 0.9
            if unsolved and share[row, 0] > 0.02 and share[row, -1] < share[row, 0] / 4:
                found.append(
                    Advice(
                        f"Prompts with {column} = {name} are neglected: {share[row, 0]:.0%} of the groups in the first third, "
                        f"{share[row, -1]:.0%} in the last, with a success rate of {known[-1]:.0%}.",
                        "Lower `dots_threshold`, or raise `dots_coverage` or `exploration`.",
                    )
                )
    return found


def _lengths(run: RecordedRun) -> list[Advice]:
    values = run.series("completions/clipped_ratio")[1]
    if not len(values):
        return []
    cut = float(values[-max(1, len(values) // 3) :].mean())
    if cut <= 0.3:
        return []
    return [
        Advice(
            f"{cut:.0%} of the completions are cut off at `max_completion_length` at the end.",
            "Raise `max_completion_length`, or reward shorter answers.",
        )
    ]
