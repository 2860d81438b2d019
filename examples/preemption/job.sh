#!/bin/bash
# Train on a machine that may be taken away: run the same command until it is done.
#
#   bash examples/preemption/job.sh recipe.yaml [further arguments of `trl-dataeff grpo`]
#   sbatch examples/preemption/job.sh recipe.yaml
#
# With `--resume_from_checkpoint last` each attempt continues from the latest complete checkpoint, and the first one, which
# finds none, starts from step 0. On SIGTERM the run finishes its step, saves, and ends with code 143. A run that is killed
# (137) loses the steps since its last checkpoint: set `save_steps` to what you can afford to lose.
#
#SBATCH --job-name=grpo
#SBATCH --gres=gpu:1
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
# SIGTERM to the training process five minutes before the end, time for a step and a checkpoint:
#SBATCH --signal=TERM@300

recipe=${1:?"usage: job.sh RECIPE [ARGUMENT ...]"}
shift
srun=${SLURM_JOB_ID:+srun} # a job step of Slurm's, so that Slurm's signals reach it

for attempt in $(seq $((${MAX_ATTEMPTS:-20} - ${SLURM_RESTART_COUNT:-0}))); do
    echo "attempt $attempt"
    $srun trl-dataeff grpo --config "$recipe" --resume_from_checkpoint last --save_on_signal true "$@"
    code=$?
    case $code in
        0) exit 0 ;;
        137 | 143) [ -n "$SLURM_JOB_ID" ] && exec scontrol requeue "$SLURM_JOB_ID" ;;
        *) exit "$code" ;; # a mistake or a fault: another attempt would end in the same way
    esac
done
exit "${code:-1}" # 1: Slurm has restarted the job so often
