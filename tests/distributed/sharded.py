"""
Run by `torch.distributed.run`: the runs of `same_batch.py` with weights sharded by FSDP2. See `test_sharded.py`.

accelerate shards on accelerators alone: on the CPU it leaves `fsdp` without effect. That one decision is replaced here; all
else, from the wrapping of layers to the gathering of weights, is accelerate's and torch's own.
"""

import json
import os
import sys
from pathlib import Path

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.distributed.same_batch import make, seen
from tests.factories import Watched
from trl_dataeff.difficulty.embedding.model import Embedder


torch.set_num_threads(1)
FOLDER = Path(sys.argv[1]) if __name__ == "__main__" else Path()
RUNS = ("dots, replay", "greso, dynamic, lora")


def shard_on_the_cpu() -> None:
    plain = AcceleratorState.__init__

    def init(self, *args, fsdp_plugin=None, **kwargs):
        plain(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.fsdp_plugin = fsdp_plugin
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = init


class Sharded(Watched):
    """Notes which parameters are sharded while it trains, and how many forward passes embed prompts."""

    def _compute_loss(self, model, inputs):
        self.sharded = {name: isinstance(p, DTensor) for name, p in self.model.named_parameters()}
        self.units = sum(isinstance(module, FSDPModule) for module in self.model.modules())
        return super()._compute_loss(model, inputs)


def main() -> None:
    shard_on_the_cpu()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    passes, plain = [], Embedder.embed
    Embedder.embed = lambda self, prompts: (passes.append(len(prompts)), plain(self, prompts))[1]
    report = {}
    for name in RUNS:
        passes.clear()
        trainer = make(name, world_size, Sharded, folder=FOLDER, train=True, fsdp=True)
        report[name] = seen(trainer) | {
            "whole": [name for name, sharded in trainer.sharded.items() if not sharded],
            "units": trainer.units,
            "selector": type(trainer.selector).__name__,
            "embedding_passes": len(passes),
        }
    (FOLDER / f"rank-{rank}.json").write_text(json.dumps(report))
    trainer.accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()
    torch.distributed.destroy_process_group()
