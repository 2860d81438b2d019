"""`DataEfficientOptions`: the fields that this package adds to TRL's `GRPOConfig`.

Apart from [`DataEfficientGRPOConfig`], which has both, so that the command's help imports neither torch nor transformers.
What is deliberately not here: the values that the fields take (see `fields.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass
class DataEfficientOptions:
    r"""
    The fields of [`DataEfficientGRPOConfig`] that are not [`~trl.GRPOConfig`]'s.

    Notation: B is the number of groups trained on per generation batch (`generation_batch_size / num_generations`), G is
    `num_generations`. A *group* is the G completions of one prompt; it is *zero-variance* if all of its scorable
    rewards are equal, else *effective*.
    """

    # Parameters that control which prompts are rolled out
    selection: str = field(
        default="auto",
        metadata={
            "help": "How prompts are selected: 'uniform' (shuffled passes, as `GRPOTrainer`), 'dots' (prompts whose groups "
            "are likely to carry a gradient, arXiv 2506.05316), 'greso' (skip prompts with repeated zero-variance groups, "
            "arXiv 2506.02177), 'dots+greso', the name of a registered selector, or 'auto': 'dots'; 'uniform' "
            "for a stream or prompts from an environment, 'greso' for a policy whose shards cannot embed prompts."
        },
    )
    selector_args: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Keyword arguments of the selector that `selection` names, for arguments that have no field of their "
            "own."
        },
    )
    dynamic_sampling: bool = field(
        default=False,
        metadata={
            "help": "Drop zero-variance groups once they are scored, and refill the batch with further rounds of "
            "rollouts, which saves optimizer steps at the price of more rollouts per step (DAPO, arXiv 2503.14476)."
        },
    )
    max_rollout_rounds: int = field(
        default=4,
        metadata={
            "help": "With `dynamic_sampling`: maximum number of rounds of rollouts per batch; a batch that is still short "
            "afterwards is completed by replay, then with zero-variance groups."
        },
    )
    rollout_margin: float = field(
        default=1.0,
        metadata={
            "help": "With `dynamic_sampling`: oversampling factor of a round, which rolls out ceil(margin * missing / "
            "(1 - z)) groups, where z is the running share of zero-variance groups (GRESO paper: 1.25)."
        },
    )
    rollout_round_min: float = field(
        default=0.25,
        metadata={"help": "With `dynamic_sampling`: smallest round, as a share of the B groups of a batch."},
    )
    rollout_round_max: float = field(
        default=1.5,
        metadata={
            "help": "With `dynamic_sampling`: largest round, as a share of the B groups of a batch; a round is "
            "generated in one call, so lower it to 1.0 if generation runs out of memory."
        },
    )
    sequential_rollouts: bool = field(
        default=False,
        metadata={
            "help": "Generate half of each group first, and the rest only if the group is mixed or its next completions are as "
            "likely to make it so as rollouts of other prompts (arXiv 2605.26606)."
        },
    )
    reward_range: list[float] | None = field(
        default=None,
        metadata={
            "help": "Lowest and highest total reward, which map to success rates 0 and 1; if unset, the lowest and "
            "highest seen so far."
        },
    )
    exploration: float = field(
        default=0.05,
        metadata={
            "help": "With 'dots': smallest share of each round that is drawn uniformly, in [0, 1]; the share is larger "
            "until selection is seen to raise the effective share by a factor of 1.25, and 0 switches exploration off."
        },
    )

    # Parameters that control advantages
    advantage_baseline: Literal["group", "tracked"] = field(
        default="group",
        metadata={
            "help": "What a reward is compared with: 'group', the group's mean, as in TRL, or 'tracked', the prediction made "
            "before the rollout joined with the other completions' rewards, so that zero-variance groups have a gradient too "
            "(not with `dynamic_sampling`)."
        },
    )
    baseline_strength: float | None = field(
        default=None,
        metadata={
            "help": "With `advantage_baseline='tracked'`: completions that each prediction is worth; `None` (`null` in a "
            "recipe) uses the selector's own uncertainty, or `history_prior` where it has none."
        },
    )

    # Parameters that control fault tolerance, each off by default
    save_on_signal: bool = field(
        default=False,
        metadata={
            "help": "On SIGTERM or Ctrl-C, finish the present step, save a checkpoint, and end training with SystemExit(143) "
            "or KeyboardInterrupt."
        },
    )
    skip_nonfinite_steps: bool = field(
        default=False,
        metadata={"help": "Skip optimizer steps whose gradient is not finite; ten in a row end the run."},
    )
    vllm_reconnect: bool = field(
        default=False,
        metadata={
            "help": "With `vllm_mode='server'`: wait up to `vllm_server_timeout` for a server that was restarted, send it "
            "the present weights, and continue."
        },
    )
    reward_timeout: float | None = field(
        default=None,
        metadata={
            "help": "Time limit for one call of a reward function, in seconds; completions whose reward is late or "
            "non-numeric get no score, and training continues; no limit if unset."
        },
    )

    # Parameters that control rollout replay
    replay_fraction: float = field(
        default=0.5,
        metadata={
            "help": "Share of each batch's groups that is replayed from recent rollouts, in [0, 1), as soon as a group "
            "is stored; 0 switches replay off."
        },
    )
    fresh_groups: Literal["fixed", "adaptive"] = field(
        default="fixed",
        metadata={
            "help": "How many groups of a batch are generated: 'fixed' (all but `replay_fraction`), or 'adaptive' (as many as "
            "`effective_target` takes and more where the replay buffer cannot fill the batch; `replay_fraction` then only "
            "switches replay on)."
        },
    )
    effective_target: float = field(
        default=0.25,
        metadata={
            "help": "With `fresh_groups='adaptive'`: expected number of effective groups among those generated for a batch, "
            "as a share of its groups."
        },
    )
    replay_max_uses: int | None = field(
        default=None,
        metadata={"help": "How many batches may replay a stored group; `None` (`null` in a recipe) sets no limit."},
    )
    replay_weight: float | None = field(
        default=None,
        metadata={
            "help": "Factor on the advantages of replayed groups; `None` (`null` in a recipe) uses the running share of "
            "effective groups, so that steps become smaller as the policy learns, as with plain GRPO; 1 is the "
            "paper's value."
        },
    )
    replay_capacity: int = field(
        default=512,
        metadata={
            "help": "Maximum number of groups in the replay buffer, which holds the newest group of each prompt if it "
            "is effective."
        },
    )
    replay_order: Literal["newest", "random"] = field(
        default="newest",
        metadata={
            "help": "Which stored groups are replayed: 'newest' (the closest to the policy) or 'random' (as in the "
            "paper)."
        },
    )
    replay_max_age: int | None = field(
        default=5,
        metadata={
            "help": "Optimizer steps after which a stored group is no longer replayed, except those of the last batch; "
            "`None` (`null` in a recipe) sets no limit other than `replay_capacity`."
        },
    )
    replay_max_movement: float | None = field(
        default=None,
        metadata={
            "help": "Movement of the policy, as the mean |log-prob change| of a token since it was sampled, after which a stored "
            "group is no longer replayed, except those of the last batch; set `replay_max_age` to `None` (`null` in a recipe) to "
            "limit age by movement alone."
        },
    )
    replay_min_ess: float = field(
        default=0.0,
        metadata={
            "help": "Effective sample size of a group's tokens, as a share in [0, 1], below which the group is not replayed "
            "again; 0 sets no limit."
        },
    )
    replay_min_unclipped: float = field(
        default=0.0,
        metadata={
            "help": "Share of a group's tokens whose gradient the clip leaves, in [0, 1], below which the group is not replayed "
            "again; 0 sets no limit."
        },
    )
    replay_pause_ess: float = field(
        default=0.9,
        metadata={
            "help": "Effective sample size of recently replayed tokens, as a share in [0, 1], below which replay pauses: the "
            "policy moves so fast that fresh groups are worth more. As many groups as there are processes are still replayed, "
            "to measure when that ends. 0: replay never pauses."
        },
    )
    replay_clip: Literal["proximal", "behavior"] = field(
        default="behavior",
        metadata={
            "help": "Where the clip of groups from an earlier policy is centred: 'proximal', on the policy at the start of "
            "the generation batch (pi_old), or 'behavior', on the policy that sampled them (arXiv 2506.05316)."
        },
    )
    replay_ratio_cap: float = field(
        default=2.0,
        metadata={
            "help": "Bound on the ratio of a replayed token: with 'behavior', a token with a negative advantage has no "
            "gradient beyond it (dual clip, arXiv 1912.09729; not for `loss_type='vespo'`, whose weight "
            "vanishes by itself); with 'proximal', pi_old / pi_behavior is truncated at it."
        },
    )

    # Parameters that control DOTS
    dots_objective: Literal["effective", "target"] = field(
        default="effective",
        metadata={
            "help": "Weight of a prompt: 'effective' rises with the probability of an effective group, P = 1 - p^G - (1-p)^G, as "
            "P^s / (P^s + threshold^s) with s the sharpness; 'target' is exp(-|p - target| / temperature), as in the paper."
        },
    )
    dots_sharpness: float = field(
        default=4.0,
        metadata={
            "help": "How steeply the 'effective' weight falls below the threshold. Without a threshold, a higher value concentrates "
            "selection on success rates near one half, and on fewer kinds of prompts."
        },
    )
    dots_threshold: float | None = field(
        default=0.6,
        metadata={
            "help": "Probability of an effective group at which the 'effective' weight is 1/2, in (0, 1]. Prompts well above "
            "it are drawn alike. None: the weight is that probability to the power of the sharpness."
        },
    )
    dots_coverage: float = field(
        default=0.7,
        metadata={
            "help": "Share of the weight of all prompts that is drawn before a prompt may be selected again, in [0, 1]; 0 allows "
            "the same prompt in every batch."
        },
    )
    dots_target: float = field(default=0.5, metadata={"help": "Success rate that the 'target' weight prefers."})
    dots_temperature: float = field(default=1e-3, metadata={"help": "Temperature of the 'target' weight."})
    dots_predictor: str = field(
        default="logistic",
        metadata={
            "help": "'logistic', 'attention', the name of a registered predictor, or the path of a saved or published one."
        },
    )
    dots_predictor_args: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Keyword arguments of the predictor that `dots_predictor` names."}
    )
    dots_embedding: str = field(
        default="policy",
        metadata={
            "help": "Model that embeds the prompts: 'policy' (mean of the policy's last hidden states), or the id or "
            "path of another model, which needs the extra `embeddings`."
        },
    )
    dots_reference: Literal["rolling", "paper"] = field(
        default="rolling",
        metadata={"help": "'rolling' (every recent group is a reference), or 'paper' (a random set each refresh)."},
    )
    dots_reference_size: int = field(default=256, metadata={"help": "Size of the reference set of 'paper'."})
    dots_refresh_batches: int = field(
        default=1,
        metadata={
            "help": "Generation batches between two refreshes of the predictions; with `dots_reference='paper'` the "
            "prompts of all these batches are drawn at once."
        },
    )
    history_prior: float = field(
        default=4.0,
        metadata={"help": "Strength of the predictor's prior relative to a prompt's own history, in completions."},
    )
    history_from: str | None = field(
        default=None,
        metadata={
            "help": "Table `dataeff/groups.parquet`, or output directory, of an earlier run on the same dataset, whose success "
            "rates are this run's first predictions; its own groups outweigh them."
        },
    )
    history_half_lives: list[float] | None = field(
        default=None,
        metadata={
            "help": "Competing half-lives of evidence, in generation batches; those that predicted the latest groups "
            "best get the most weight; `None` (`null` in a recipe) is 1, 3, 9 and 27."
        },
    )

    # Parameters that control GRESO
    greso_p_init: float = field(
        default=0.5, metadata={"help": "Initial keep probability per zero-variance group of a streak."}
    )
    greso_p_step: float = field(default=0.01, metadata={"help": "Change of a keep probability per generation batch."})
    greso_p_min: float = field(default=0.05, metadata={"help": "Lower bound of the keep probabilities."})
    greso_p_max: float = field(default=0.95, metadata={"help": "Upper bound of the keep probabilities."})
    greso_target_zero_variance: float = field(
        default=0.25, metadata={"help": "Share of zero-variance groups that the controller aims at."}
    )
    greso_easy_share: float = field(
        default=1 / 3, metadata={"help": "Share of `greso_target_zero_variance` that is allotted to easy groups."}
    )
    greso_streak_half_life: float | None = field(
        default=None,
        metadata={
            "help": "Generation batches after which a group of a streak counts half, or `inf` for streaks that do not "
            "fade; by default 100 with 'dots+greso', and `inf` with 'greso', as published."
        },
    )
