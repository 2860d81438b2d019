"""
Runs with `use_vllm=True`, each test on a test double, and with `make test-vllm` on a real vLLM engine on the CPU too.
"""

import os

import pytest
import torch

from tests.engines.double import ModelCopyGeneration
from tests.engines.server import SETTINGS
from tests.factories.tiny import run, tiny_model, tiny_tokenizer
from trl_dataeff import DataEfficientGRPOTrainer


_DISTRIBUTED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # which TRL sets for vLLM
ENGINES = ["double", pytest.param("vllm", marks=pytest.mark.vllm)]


@pytest.fixture(params=ENGINES)
def engine(request, monkeypatch):
    from trl.trainer import grpo_trainer

    if request.param == "double":
        monkeypatch.setattr(grpo_trainer, "VLLMGeneration", ModelCopyGeneration)
    else:
        _patch_vllm(monkeypatch)
    return request.param


def _patch_vllm(monkeypatch):
    """vLLM on the CPU packs the weights of linear layers when it loads them, and then rejects those of TRL's sync.
    Here they stay as they are, in float32 as the policy's.
    """
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    from trl.generation import vllm_generation
    from vllm import LLM
    from vllm.model_executor.layers import utils

    def plain_linear(layer, remove_weight):
        layer.cpu_linear = torch.nn.functional.linear

    def float32_llm(**options):
        return LLM(**options, dtype="float32", enforce_eager=True)

    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", plain_linear)
    monkeypatch.setattr(vllm_generation, "LLM", float32_llm)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """The folder of a model with this tokenizer; for vLLM its heads have size 32, the smallest that it takes."""
    folders = {}

    def get(tokenizer, engine):
        key = len(tokenizer), engine
        if key not in folders:
            folders[key] = str(tmp_path_factory.mktemp("model"))
            tiny_model(tokenizer, hidden=128 if engine == "vllm" else 32).save_pretrained(folders[key])
            tokenizer.save_pretrained(folders[key])
        return folders[key]

    return get


@pytest.fixture
def with_engine(engine, model_folder):
    """`factories.run` with `use_vllm=True`. The engine is closed when training has ended."""

    def with_engine(output_dir, trainer_class=DataEfficientGRPOTrainer, *, trainer=None, resume=None, **fields):
        arguments = dict(trainer or {})
        tokenizer = arguments.setdefault("processing_class", tiny_tokenizer())
        arguments.setdefault("model", model_folder(tokenizer, engine))
        defaults = {
            **{"use_vllm": True, "vllm_max_model_length": 64, "vllm_gpu_memory_utilization": 0.3},
            **{"learning_rate": 1e-3, "max_steps": 6, "model_init_kwargs": {"dtype": "float32"}},
        }
        options = {**defaults, **fields}
        instance = None
        try:
            instance = run(output_dir, trainer_class, trainer=arguments, train=False, **options)
            instance.train(resume_from_checkpoint=resume)
        finally:
            if instance is not None:
                instance.vllm_generation.llm.llm_engine.engine_core.shutdown()
            for name in _DISTRIBUTED:
                os.environ.pop(name, None)
        return instance

    return with_engine
