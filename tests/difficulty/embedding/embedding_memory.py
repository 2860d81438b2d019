"""Embeds 100,000 prompts of about 200 tokens and prints what it took. See `test_embedding.py`."""

import json
import resource
import sys
import time

import numpy as np
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from tests.factories import tiny_tokenizer
from trl_dataeff.difficulty.embedding import embed_dataset
from trl_dataeff.utils import hash_prompts


N = 100_000


def peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main(folder: str) -> None:
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    texts = (f"{i}: " + "ab " * int(rng.integers(50, 81)) for i in range(N))
    Dataset.from_dict({"prompt": list(texts)}).save_to_disk(f"{folder}/data")
    dataset = Dataset.load_from_disk(f"{folder}/data")
    tokenizer = tiny_tokenizer()
    width = {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 384}
    # No layers: what is measured is all around the model
    policy = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), num_hidden_layers=0, **width))
    embed_dataset(dataset.select(range(50)), policy=policy, tokenizer=tokenizer, cache_dir=f"{folder}/warm")
    report, before = {"before": peak_bytes()}, time.perf_counter()
    hash_prompts(dataset)
    report["fingerprint_s"] = time.perf_counter() - before
    for name in ("first", "second"):
        before = time.perf_counter()
        embeddings = embed_dataset(
            dataset, policy=policy, tokenizer=tokenizer, cache_dir=folder, batch_tokens=8192, progress=False
        )
        report[f"{name}_s"] = time.perf_counter() - before
        report[f"{name}_grown"] = peak_bytes() - report["before"]
    report["map"] = embeddings.nbytes
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
