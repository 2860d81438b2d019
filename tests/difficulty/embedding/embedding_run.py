"""Run by `torch.distributed.run`: embeds on each process and reports what it saw. See `test_embedding.py`."""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType


sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.factories import plain_dataset, tiny_model, tiny_tokenizer
from trl_dataeff.difficulty.embedding import EmbeddingError, embed_dataset
from trl_dataeff.difficulty.embedding.model import Embedder


torch.set_num_threads(1)
FOLDER = Path(sys.argv[1])
forwards = 0


class OwnNode:
    """An accelerator whose process is the only one of its node."""

    is_local_main_process = True

    def __init__(self, accelerator):
        self.accelerator = accelerator

    def __getattr__(self, name):
        return getattr(self.accelerator, name)


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

    np.save(FOLDER / f"rank-{rank}.npy", embed_dataset(plain_dataset(23), cache_dir=FOLDER / "both", **options))
    report["forwards"], forwards = forwards, 0
    embed_dataset(plain_dataset(23), cache_dir=FOLDER / "both", **options)
    report["again"], forwards = forwards, 0

    # As on two nodes of which one has lost its cache
    folder = FOLDER / "both" if rank == 0 else FOLDER / "lost"
    again = embed_dataset(plain_dataset(23), cache_dir=folder, **{**options, "accelerator": OwnNode(accelerator)})
    assert (again == np.load(FOLDER / f"rank-{rank}.npy")).all()
    assert len(list((FOLDER / "lost").glob("*.safetensors"))) == 1
    report["lost"] = forwards
    for key, dataset in (("different", plain_dataset(23 + rank)), ("sharded", plain_dataset(5))):
        if key == "sharded":
            accelerator.state.distributed_type = DistributedType.FSDP
        try:
            embed_dataset(dataset, cache_dir=FOLDER / "both", **options)
        except EmbeddingError as error:
            report[key] = str(error)
    (FOLDER / f"rank-{rank}.json").write_text(json.dumps(report))
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()
    torch.distributed.destroy_process_group()
