"""
[`CompactGRPOTrainer`]: the faster update alone. It imports TRL and the libraries below it, and nothing else of this
package but `utils`.

    trainer.py         what is overridden
    update.py          the state of the update: when a generation batch is compacted, and when it is computed TRL's way
    present_batch.py   the generation batch that is trained on: TRL's micro-batches, and what is computed instead
    micro_batches.py   rows out, dealt, cut; factors of the loss; weights of metrics
    exact.py           what may be left out for this loss and this model
    check.py           whether the model computes the same without it; rounding.py: what counts as the same
    dealing.py         which rows share a micro-batch
    padding.py         rows at their own width; passes without gradient, by length
    prompts.py         a group's prompt, computed once
    loss_inputs.py     what depends on the loss's log-probs; sampler.py: vLLM's ratio, computed in the loss
"""

from trl_dataeff.compact.trainer import CompactGRPOTrainer


__all__ = ["CompactGRPOTrainer"]
