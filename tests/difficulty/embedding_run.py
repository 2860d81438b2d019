"""Run by `torch.distributed.run`: embeds on each process and reports what it saw. See `test_embedding.py`."""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType


sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.factories import plain_dataset, tiny_model, tiny_tokenizer
from trl_dataeff.difficulty.embedding import Embedder, EmbeddingError, embed_dataset


torch.set_num_threads(1)
FOLDER = Path(sys.argv[1])
forwards = 0


def counted(self, prompts, forward=Embedder.embed):
    global forwards
    forwards += 1
    return forward(self, prompts)


def main() -> None:
    global forwards
    Embedder.embed = counted
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    tokenizer = tiny_tokenizer()
    policy = accelerator.prepare(tiny_model(tokenizer))
    assert isinstance(policy, torch.nn.parallel.DistributedDataParallel)
    options = {"policy": policy, "tokenizer": tokenizer, "accelerator": accelerator, "batch_tokens": 50}
    options |= {"progress": False}
    report = {}

    np.save(FOLDER / f"rank-{rank}.npy", embed_dataset(plain_dataset(23), **options))
    report["forwards"] = forwards
    accelerator.state.distributed_type = DistributedType.FSDP
    try:
        embed_dataset(plain_dataset(5), **options)
    except EmbeddingError as error:
        report["sharded"] = str(error)
    (FOLDER / f"rank-{rank}.json").write_text(json.dumps(report))
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()
    torch.distributed.destroy_process_group()
