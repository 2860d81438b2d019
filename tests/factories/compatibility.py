"""What of TRL is run with this package, how, and by which test: the list from which docs/compatibility.md is written."""

from __future__ import annotations


WORKS, DOUBLE, PASSED, SINGLE, REJECTED = "works", "works (test double)", "passed on", "one round", "rejected"
STATES = {
    WORKS: "run on a tiny model by the named tests.",
    DOUBLE: "as above, with a test double in place of the real server.",
    SINGLE: "trains with one round for each batch: groups are neither replayed nor replaced, and a warning says so.",
    PASSED: "handed to TRL unchanged, and not tested here.",
    REJECTED: "an error when the trainer is made or when training begins, because it is known not to work.",
}

_IDENTITY, _REPLAY, _DYNAMIC = (
    "tests/test_identity.py",
    "tests/replay/test_training.py",
    "tests/collector/test_dynamic_sampling.py",
)
_IMAGES = "tests/rollouts/test_images.py"
_ENGINE, _ENGINE_REPLAY = "tests/engines/test_engine.py", "tests/engines/test_replay.py"
_SERVER = "tests/engines/test_server.py"
_SEQUENTIAL = "tests/collector/test_sequential_training.py"
_TWO, _SAME = "tests/distributed/test_two_processes.py", "tests/distributed/test_same_batch.py"
_SHARDED = "tests/distributed/test_sharded.py"
_OFF = f"{_IDENTITY}::test_off_is_grpo"
_SETTINGS = f"{_REPLAY}::test_settings_train_and_replay"
_LEFTOVER = f"{_DYNAMIC}::test_settings_train_also_on_their_leftover_groups"
_LOGPS = f"{_ENGINE}::test_log_probs_of_sampler_and_training_agree_after_updates"

#: By section: name, state with everything off, state with replay and dynamic sampling, tests
FEATURES: dict[str, list[tuple[str, str, str, tuple[str, ...]]]] = {
    "Prompts": [
        ("plain and conversational prompts", WORKS, WORKS, (_OFF, _SETTINGS, _LEFTOVER)),
        (
            "tools, several turns",
            *(WORKS, WORKS),
            (
                f"{_IDENTITY}::test_off_is_grpo_with_tools",
                f"{_DYNAMIC}::test_tools_are_called_in_rounds_and_not_again",
                f"{_REPLAY}::test_tools_are_replayed_with_their_masks",
            ),
        ),
        (
            "`rollout_func`",
            *(WORKS, WORKS),
            (
                f"{_IDENTITY}::test_off_is_grpo_with_a_rollout_func",
                f"{_DYNAMIC}::test_rollout_func_fields_reach_the_rewards",
                f"{_REPLAY}::test_the_samplers_log_probs_need_no_forward_pass",
            ),
        ),
        (
            "prompts with images",
            *(WORKS, WORKS),
            (f"{_IMAGES}::test_off_is_grpo", f"{_IMAGES}::test_groups_are_trained_on_with_the_images_of_their_rows"),
        ),
        (
            "tools of a vision-language model, which may answer with images",
            *(PASSED, SINGLE),
            ("tests/test_notice.py::test_tools_with_images_are_told_that_prompts_can_be_selected",),
        ),
        (
            "environments with `environment_factory`",
            WORKS,
            SINGLE,
            (f"{_IDENTITY}::test_prompts_owned_by_an_environment",),
        ),
        (
            "prompts made by an environment, with `dynamic_sampling`",
            "-",
            REJECTED,
            ("tests/test_validation.py::test_prompts_of_an_environment_cannot_be_chosen",),
        ),
        (
            "streaming datasets",
            WORKS,
            SINGLE,
            (_OFF, f"{_REPLAY}::test_a_stream_is_not_replayed_and_the_trainer_says_so"),
        ),
        (
            "streaming with `dynamic_sampling`",
            "-",
            REJECTED,
            ("tests/test_validation.py::test_streaming_with_dynamic_sampling",),
        ),
    ],
    "Models and losses": [
        ("LoRA", WORKS, WORKS, (_OFF, _SETTINGS)),
        ("QLoRA, 8 bit", PASSED, PASSED, ()),
        ("every loss type", WORKS, WORKS, (_SETTINGS,)),
        (
            "reference model (`beta`)",
            WORKS,
            WORKS,
            (f"{_IDENTITY}::test_off_is_grpo_with_a_reference_model", _SETTINGS),
        ),
        (
            "mixture of experts, with its auxiliary loss",
            WORKS,
            WORKS,
            ("tests/test_compatibility.py::test_mixture_of_experts",),
        ),
        ("gradient checkpointing", PASSED, WORKS, (_SETTINGS,)),
        (
            "`num_generations_eval`",
            WORKS,
            WORKS,
            (_OFF, "tests/test_trainer.py::test_evaluation_touches_neither_selection_nor_counters"),
        ),
        ("`torch_compile`, `use_liger_kernel`", PASSED, PASSED, ()),
    ],
    "Options of this package": [
        (
            "`sequential_rollouts`, with replay, dynamic sampling, tools and images",
            "-",
            WORKS,
            (
                f"{_SEQUENTIAL}::test_settings_train",
                f"{_SEQUENTIAL}::test_tools_are_called_in_both_parts",
                f"{_IMAGES}::test_groups_are_trained_on_with_the_images_of_their_rows",
            ),
        ),
        (
            "`sequential_rollouts` with vLLM, and on two processes",
            "-",
            WORKS,
            (_LOGPS, f"{_TWO}::test_both_processes_stop_the_same_groups"),
        ),
        (
            "`sequential_rollouts` with tools that answer with images, and with environments",
            *("-", SINGLE),
            ("tests/test_notice.py::test_sequential_rollouts_are_named_with_the_size_of_the_first_half",),
        ),
        (
            "`sequential_rollouts` with streaming, and with a tracked baseline",
            *("-", REJECTED),
            (
                "tests/test_validation.py::test_streaming_with_sequential_rollouts",
                "tests/test_tracked_baseline.py::test_what_cannot_be_combined_is_refused_before_a_model_is_loaded",
            ),
        ),
        (
            '`advantage_baseline="tracked"`, on two processes too',
            *("-", WORKS),
            (
                "tests/test_tracked_baseline.py::test_training_takes_the_tracked_advantages",
                f"{_TWO}::test_a_tracked_baseline_on_two_processes",
            ),
        ),
        (
            '`fresh_groups="adaptive"`, on 1, 2 and 3 processes',
            *("-", WORKS),
            (
                "tests/collector/test_fresh.py::test_batches_are_full_and_have_as_many_effective_fresh_groups_as_asked_for",
                f"{_SAME}::test_an_adaptive_number_of_fresh_groups_is_one_for_all_processes",
            ),
        ),
        (
            "`history_from`",
            *("-", WORKS),
            (
                "tests/collector/test_earlier_run.py::test_a_run_begins_with_the_earlier_ones_rates_and_resumes_without_the_file",
            ),
        ),
    ],
    "Generation": [
        ("transformers", WORKS, WORKS, (_OFF, _SETTINGS)),
        (
            "vLLM, colocated, on the CPU (`make test-vllm`)",
            *(WORKS, WORKS),
            (
                f"{_ENGINE}::test_off_is_grpo",
                _LOGPS,
                f"{_ENGINE_REPLAY}::test_trls_correction_and_ours_never_both_apply_to_a_row",
            ),
        ),
        ("vLLM with LoRA, `num_iterations`, `steps_per_generation`", WORKS, WORKS, (_LOGPS,)),
        (
            "vLLM with tools",
            *(WORKS, WORKS),
            (
                f"{_ENGINE}::test_off_is_grpo_with_tools",
                f"{_ENGINE}::test_tools_are_replayed_with_the_samplers_log_probs",
            ),
        ),
        (
            "a vLLM server on the CPU, weights through files instead of NCCL (`make test-vllm`)",
            *(PASSED, WORKS),
            (f"{_SERVER}::test_log_probs_of_sampler_and_training_agree_after_an_update",),
        ),
        (
            "a vLLM server that is restarted (`vllm_reconnect`)",
            *(PASSED, DOUBLE),
            (
                "tests/fault_tolerance/test_reconnect.py::test_a_server_that_is_restarted_unnoticed_gets_the_present_weights",
            ),
        ),
        ("vLLM on a GPU: weights to a server by NCCL, sleep mode, tensor parallelism", PASSED, PASSED, ()),
    ],
    "Processes": [
        (
            "2 processes (DDP on gloo)",
            WORKS,
            WORKS,
            (f"{_TWO}::test_off_is_grpo_on_two_processes", f"{_TWO}::test_replay_on_two_processes"),
        ),
        (
            "1, 2 and 3 processes train on the same batches",
            WORKS,
            WORKS,
            (f"{_SAME}::test_the_number_of_processes_changes_nothing",),
        ),
        (
            "FSDP2 (2 processes on gloo), with LoRA, policy embeddings for DOTS",
            *(PASSED, WORKS),
            (
                f"{_SHARDED}::test_they_train_as_if_they_were_whole",
                f"{_SHARDED}::test_a_sharded_policy_embeds_the_prompts_in_lockstep",
            ),
        ),
        (
            "generation by transformers, checkpoints and resume with FSDP2, with LoRA too",
            *(PASSED, WORKS),
            (f"{_SHARDED}::test_they_generate_and_a_resumed_run_goes_on_as_if_it_had_not_been_stopped",),
        ),
        ("DeepSpeed ZeRO-2 and ZeRO-3 (run by hand: see `scaling.md`), FSDP of version 1", PASSED, PASSED, ()),
        (
            "a prompt that is too long for vLLM on one process: the same error on all",
            *(WORKS, WORKS),
            (f"{_SAME}::test_a_prompt_that_is_too_long_for_vllm_on_one_process_stops_both",),
        ),
        (
            "datasets that differ between processes",
            *(REJECTED, REJECTED),
            (f"{_SAME}::test_processes_with_other_prompts_are_rejected_at_the_start",),
        ),
    ],
}
