"""Run by `torch.distributed.run`: embeds on each process and reports what it saw. See `test_embedding.py`."""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType


sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.factories import plain_dataset, tiny_model, tiny_tokenizer
from trl_dataeff.difficulty.embedding import EmbeddingError, embed_dataset


def main() -> None:
    torch.set_num_threads(1)
    accelerator, tokenizer, passes = Accelerator(cpu=True), tiny_tokenizer(), []
    policy = accelerator.prepare(tiny_model(tokenizer))
    assert isinstance(policy, torch.nn.parallel.DistributedDataParallel)
    policy.module.register_forward_pre_hook(lambda *args: passes.append(args))
    options = {"accelerator": accelerator, "batch_tokens": 50, "progress": False}
    embeddings = embed_dataset(plain_dataset(23), policy, tokenizer, **options)
    report = {"embeddings": embeddings.tolist(), "forwards": len(passes)}
    accelerator.state.distributed_type = DistributedType.FSDP
    try:
        embed_dataset(plain_dataset(5), policy, tokenizer, **options)
    except EmbeddingError as error:
        report["sharded"] = str(error)
    Path(sys.argv[1], f"rank-{accelerator.process_index}.json").write_text(json.dumps(report))
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()
    torch.distributed.destroy_process_group()
