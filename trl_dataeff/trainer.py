"""`DataEfficientGRPOTrainer`: the wiring between TRL's `GRPOTrainer` and this package. No method of TRL is copied."""

from __future__ import annotations

import inspect
import time
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers.integrations import is_deepspeed_zero3_enabled
from trl import GRPOTrainer

from trl_dataeff.callback import SelectionCallback
from trl_dataeff.checkpoint.state import FOLDER
from trl_dataeff.difficulty.embedding import embed_dataset
from trl_dataeff.ledger import RolloutLedger
from trl_dataeff.reliability.trainer import ReliableGRPOTrainer
from trl_dataeff.replay.logprobs import BehaviorRecorder
from trl_dataeff.replay.trainer import CorrectedGRPOTrainer
from trl_dataeff.rollouts.capture import Collection, Playback, Recording, row_value, split_rollouts, tool_dicts
from trl_dataeff.rollouts.distributed import assign, hand_over
from trl_dataeff.rollouts.group import RolloutGroup
from trl_dataeff.selection import make_selector
from trl_dataeff.selection.pool import PromptPool
from trl_dataeff.tracking.group_log import GroupLog
from trl_dataeff.tracking.metrics import of_fresh_groups, record, replace_last, rounds_left_out
from trl_dataeff.validation import (
    check_dataset,
    check_no_images,
    resolve_config,
    resolve_selection,
    rounds_obstacle,
    warn_of_idle_options,
)


class DataEfficientGRPOTrainer(ReliableGRPOTrainer, CorrectedGRPOTrainer):
    """
    [`~trl.GRPOTrainer`] that spends its rollouts where they teach. Takes the same arguments.

    Overridden methods, and why:

    - `_generate_and_score_completions`: a window's prompts come from the selector, not from the dataloader, and with
      `dynamic_sampling` from as many rounds of rollouts as it takes.
    - `_generate`, `_calculate_rewards`: note what is rolled out; give back what was rolled out before.
    - `train`, `_save_state`, `_load_optimizer_and_scheduler`: start, write and read the selection state.

    What makes runs survive is in the base class [`ReliableGRPOTrainer`].
    The loss of groups from an earlier window is in the base class [`CorrectedGRPOTrainer`].

    Args:
        model, reward_funcs, args, train_dataset, ...: see [`~trl.GRPOTrainer`]. `args` may be a
            [`DataEfficientGRPOConfig`] or a [`~trl.GRPOConfig`], which gets the defaults of the former.

    Example:

    ```python
    from datasets import load_dataset
    from trl_dataeff import DataEfficientGRPOConfig, DataEfficientGRPOTrainer
    from trl.rewards import accuracy_reward

    trainer = DataEfficientGRPOTrainer(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        reward_funcs=accuracy_reward,
        args=DataEfficientGRPOConfig("Qwen2.5-0.5B-GRPO", dynamic_sampling=True),
        train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
    )
    trainer.train()
    ```
    """

    ledger: RolloutLedger  # from `train` on
    tools: list
    rollout_func: Any
    _tag_names = ["trl", "grpo", "trl-dataeff"]  # noqa: RUF012

    def __init__(self, *args, **kwargs):
        call = inspect.signature(GRPOTrainer.__init__).bind(self, *args, **kwargs)
        given = call.arguments
        given["args"] = resolve_config(given.get("args"), given["model"])
        check_dataset(given["args"], given.get("train_dataset"), given.get("environment_factory"))

        self._recording: Recording | None = None  # while a round is rolled out
        self._playback: Playback | None = None  # while what was rolled out goes through TRL's one pass
        super().__init__(*call.args[1:], **call.kwargs)

        self._prompts_are_made_up = given.get("train_dataset") is None  # by an environment; TRL sets placeholders
        obstacle = rounds_obstacle(
            self.train_dataset,
            environments=self.environment_factories is not None,
            tool_images=self._is_vlm and bool(self.tools),
        )
        sharded = self.is_fsdp_enabled or is_deepspeed_zero3_enabled()
        self.selection = resolve_selection(
            self.args, obstacle, sharded=sharded, processes=self.accelerator.num_processes
        )
        self._refills = self.args.dynamic_sampling and obstacle is None
        self._replays = self.args.replay_fraction > 0 and obstacle is None
        refers = "dots" in self.selection and self.args.dots_reference == "paper"
        self._collects = self._refills or self._replays or refers
        warn_of_idle_options(self.args, obstacle)
        self._seconds: defaultdict[str, float] = defaultdict(float)  # since the last optimizer step
        self._selection_callback = SelectionCallback(self)
        self.add_callback(self._selection_callback)

    __init__.__signature__ = inspect.signature(GRPOTrainer.__init__)  # type: ignore[attr-defined]

    def train(self, *args, **kwargs):
        self._recorder = BehaviorRecorder()
        self.ledger = self._make_ledger()  # as in TRL, a second call starts anew, with the dataset that there is then
        return super().train(*args, **kwargs)

    def _make_ledger(self) -> RolloutLedger:
        selects = isinstance(self.train_dataset, Dataset) and not self._prompts_are_made_up
        if selects:
            check_dataset(self.args, self.train_dataset, self.environment_factories)
        self._rows_dataset = self.train_dataset
        if selects and self.args.remove_unused_columns:
            self._rows_dataset = self._remove_unused_columns(self.train_dataset, description="training")
        path = Path(self.args.output_dir) / FOLDER / "groups.parquet"
        pool = PromptPool.from_dataset(self.train_dataset) if selects else None
        return RolloutLedger(
            self.args,
            pool=pool,
            selector=make_selector(self.selection, pool, self.args, self._embed) if pool is not None else None,
            reward_names=self.reward_func_names,
            reward_weights=self.reward_weights.numpy(),
            group_log=GroupLog(path) if self.accelerator.is_main_process else None,
            rank=self.accelerator.process_index,
            world_size=self.accelerator.num_processes,
            refills=self._refills,
            replays=self._replays,
        )

    def _embed(self) -> np.ndarray:
        """Every prompt as a vector, by the policy as it is before training, or by `dots_embedding`."""
        return embed_dataset(
            self.train_dataset,
            self.args.dots_embedding,
            policy=self.model,
            tokenizer=self.processing_class,
            accelerator=self.accelerator,
            progress=not self.args.disable_tqdm,
            chat_template=self.chat_template,
            tools=self.tools or None,
            chat_template_kwargs=self.chat_template_kwargs,
        )

    # Rolling out

    def _generate_and_score_completions(self, inputs):
        if not self.model.training:
            return super()._generate_and_score_completions(inputs)
        if self._collects:
            return self._collect_window()
        return self._single_round_window(inputs)

    def _single_round_window(self, inputs):
        """All groups of a window are rolled out within TRL's one pass and trained on."""
        with self._timed_selection():
            ids = self.ledger.propose(self.ledger.batch_groups)
            if self.ledger.selector is not None:
                inputs = self._rows(self._local(ids))
        with self._recorded() as recording:
            batch = super()._generate_and_score_completions(inputs)
        with self._timed_selection():
            groups = self._enter_round(ids, recording, round_index=0)
            self._enter_window(Collection(trained=groups, fresh=groups, rounds=1))
        return batch

    def _collect_window(self):
        """Groups are rolled out in rounds; those that are kept go through TRL's one pass as if they came from it."""
        ledger, rank, world_size = self.ledger, self.accelerator.process_index, self.accelerator.num_processes
        with self._timed_selection(), rounds_left_out(self._metrics["train"], self.state):
            collection = ledger.collect(self._roll_out, self.state.global_step)
            destinations = assign([group.owner for group in collection.trained], world_size)
            hand_over(collection.trained, destinations, rank)
            trained = [collection.trained[i] for i in np.argsort(destinations, kind="stable")]
            mine = [group for group in trained if group.owner == rank]
            self._playback = Playback(mine, np.concatenate([group.rewards for group in trained]))
            rows = self._rows(np.array([group.prompt_id for group in mine]))
        try:
            for column, values in self._playback.logged.items():
                self._log_completion_extra(column, values)
            batch = super()._generate_and_score_completions(rows)
        finally:
            self._playback = None
        self._prepare_correction(batch, mine, collection, stores=ledger.buffer is not None)
        with self._timed_selection():
            self._enter_window(collection)
        return batch

    def _roll_out(self, ids: np.ndarray, round_index: int, reference: bool) -> list[RolloutGroup]:
        """Generate and score prompts, each process an equal part of them, outside of TRL's one pass."""
        rows = self._rows(self._local(ids))
        prompts = [row["prompt"] for row in rows]
        if self.tools:  # TRL prepares these for the rows of its one pass
            self._sync_tool_dicts, self._async_tool_dicts = tool_dicts(self._standalone_tools, len(rows))
        with self._recorded() as recording:
            prompt_ids, completion_ids, tool_mask, completions, logprobs, extra, *images = self._generate(prompts)
            check_no_images(*images)
            for i, row in enumerate(rows):
                row.update({name: row_value(values, i) for name, values in extra.items()})
            self._calculate_rewards(rows, prompts, completions, completion_ids)
        logged = dict(self._pending_extra_logs)
        self._pending_extra_logs.clear()
        rollouts = split_rollouts(
            self.num_generations, prompt_ids, completion_ids, tool_mask, completions, logprobs, logged
        )
        return self._enter_round(ids, recording, round_index, rollouts, reference)

    def _generate(self, prompts: list):
        if self._playback is not None:
            return self._play_back(self._playback)
        if self._recording is None:
            return super()._generate(prompts)
        started = time.perf_counter()
        generated = super()._generate(prompts)
        prompt_ids, completion_ids, tool_mask, *_ = generated
        self._recording.note(completion_ids, tool_mask, ends={*self.eos_token_ids, self._tokenizer.pad_token_id})
        self._recording.overlong = self._without_room(prompt_ids)
        self._recording.seconds += time.perf_counter() - started
        return generated

    def _play_back(self, playback: Playback):
        """TRL's own `_generate` on completions that are there already: they enter through its `rollout_func` slot."""
        # Nothing is generated: no tool is called, and vLLM needs no new weights
        present = {"rollout_func": playback.rollout_func, "tools": []}
        present |= {"_last_loaded_step": self.state.global_step} if self.use_vllm else {}
        former = {name: getattr(self, name) for name in present}
        self.__dict__.update(present)
        try:
            # The prompts are tokenized already. As plain text they spare TRL parsing messages that are parsed already
            generated = super()._generate([""] * len(playback.completions))
        finally:
            self.__dict__.update(former)
        prompt_ids, completion_ids, tool_mask, _, *rest = generated
        return prompt_ids, completion_ids, tool_mask, playback.completions, *rest

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        if self._playback is not None:
            return torch.from_numpy(self._playback.rewards).to(self.accelerator.device)
        if self._recording is None:
            return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        started = time.perf_counter()
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self._recording.rewards = rewards
        self._recording.seconds += time.perf_counter() - started
        return rewards

    # Bookkeeping

    def _local(self, ids: np.ndarray) -> np.ndarray:
        """The part of a round's prompts that this process rolls out."""
        share = len(ids) // self.accelerator.num_processes
        return ids[self.accelerator.process_index * share :][:share]

    def _rows(self, ids: np.ndarray) -> list[dict[str, Any]]:
        """The dataset's rows, G in a row for each prompt, as TRL's dataloader would deliver them."""
        self._rows_in_hand = ids.tolist()
        return self._rows_dataset.__getitems__(np.repeat(ids, self.num_generations).tolist())

    @contextmanager
    def _recorded(self):
        self._recording = recording = Recording()
        try:
            yield recording
        finally:
            self._recording = None
        self._seconds["time/generation_s"] += recording.seconds

    @contextmanager
    def _timed_selection(self):
        """Times what is done in it, but for the rollouts."""
        started = time.perf_counter() - self._seconds["time/generation_s"]
        yield
        self._seconds["time/selection_s"] += time.perf_counter() - self._seconds["time/generation_s"] - started

    def _enter_round(
        self, ids, recording: Recording, round_index: int, rollouts=(), reference=False
    ) -> list[RolloutGroup]:
        assert recording.rewards is not None
        faults = [self._reward_guard.faults, *[0] * (len(recording.lengths) - 1)]  # a sum is all that is wanted
        per_completion = torch.tensor(
            [recording.lengths, recording.truncated, recording.overlong, faults], device=self.accelerator.device
        )
        gathered = self.accelerator.gather(per_completion.T.contiguous()).cpu().numpy().T
        lengths, truncated, overlong, faults = gathered
        self._count_fault(overlong_prompts=overlong.sum(), reward_faults=faults.sum())
        return self.ledger.enter_round(
            ids,
            recording.rewards.cpu().numpy(),
            lengths,
            truncated,
            step=self.state.global_step,
            round_index=round_index,
            seconds=recording.seconds,
            rollouts=rollouts,
            reference=reference,
        )

    def _enter_window(self, collection: Collection) -> None:
        if collection.stale:  # TRL has logged rewards and lengths of all that is trained on
            fresh = of_fresh_groups(collection.fresh_trained, self.reward_func_names, self.reward_weights.numpy())
            replace_last(self._metrics["train"], fresh)
        record(self._metrics["train"], self.ledger.enter_window(collection, self.state.global_step))

    def record_step_time(self, seconds: float) -> None:
        """Log how an optimizer step of `seconds` was spent. Called by `SelectionCallback`."""
        spent = {name: self._seconds.pop(name, 0.0) for name in ("time/selection_s", "time/generation_s")}
        record(self._metrics["train"], spent | {"time/training_s": seconds - sum(spent.values())})

    # Checkpoints

    def _save_state(self, checkpoint):
        self._selection_callback.save(checkpoint)

    def _keep_what_can_be_kept(self):
        ledger = getattr(self, "ledger", None)  # there is none yet if the prompts could not be embedded
        if ledger is not None and ledger.group_log is not None:
            ledger.group_log.flush(force=True)

    def _count_fault(self, **amounts):
        self.ledger.counters.add(**amounts)

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self._selection_callback.load(Path(checkpoint))
