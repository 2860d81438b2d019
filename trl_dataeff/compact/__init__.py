"""
[`CompactGRPOTrainer`]: the faster update alone. It imports TRL and the libraries below it, and nothing else of this
package but `utils`.

    trainer.py         what is overridden
    update.py          the state of the update: how micro-batches are computed, and what a run says of it
    present_batch.py   TRL's micro-batches of a generation batch, and which of them the loss gets
    micro_batches.py   rows out, dealt, cut; factors of the loss
    metrics.py         weights of TRL's metrics
    exact.py           what may be left out for this loss and this model
    check.py           whether the gradient is the same without it; trial.py: a few rows, computed both ways
    dealing.py         which rows share a micro-batch
    padding.py         rows at their own width; passes without gradient, by length
    prompts.py         a group's prompt, computed once; what reaches the model
    loss_inputs.py     what depends on the loss's log-probs; sampler.py: vLLM's ratio, computed in the loss
"""

from trl_dataeff.compact.trainer import CompactGRPOTrainer


__all__ = ["CompactGRPOTrainer"]
