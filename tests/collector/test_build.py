"""The collector of a configuration."""

import numpy as np
from datasets import Dataset
from PIL import Image

from tests.factories import chat_dataset, plain_dataset
from trl_dataeff import DataEfficientGRPOConfig
from trl_dataeff.collector import make_collector


def dataset_hash(dataset: Dataset) -> str:
    """By which a checkpoint knows its dataset."""
    config = DataEfficientGRPOConfig("out", use_cpu=True, bf16=False)
    arguments = {"reward_names": ["r"], "reward_weights": np.ones(1), "refills": False, "replays": False}
    collector = make_collector(config, selector=None, dataset=dataset, **arguments)
    assert collector.num_prompts == len(dataset)
    return collector.dataset_hash


def test_the_datasets_hash_does_not_run_transforms_or_read_addresses():
    """The stored bytes count: an image has another address each time it is decoded."""
    picture = Image.new("RGB", (4, 4), "red")
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": "x"}], "image": picture}] * 3)
    assert dataset_hash(rows) == dataset_hash(Dataset.from_list(rows.to_list(), features=rows.features))
    made = Dataset.from_dict({"question": ["a", "b"]})
    made.set_transform(lambda batch: {"prompt": [object() for _ in batch["question"]]})
    other = Dataset.from_dict({"question": ["a", "c"]})
    assert dataset_hash(made) == dataset_hash(made)
    assert dataset_hash(made) != dataset_hash(other)


def test_the_datasets_hash_knows_prompts_order_and_length():
    base = dataset_hash(plain_dataset(20))
    assert base == dataset_hash(Dataset.from_list(plain_dataset(20).to_list()))
    assert base == dataset_hash(plain_dataset(20).remove_columns("answer"))
    different = [plain_dataset(21), plain_dataset(20).shuffle(seed=1), chat_dataset(20), plain_dataset(20).select([0])]
    assert len({base, *map(dataset_hash, different)}) == 5
