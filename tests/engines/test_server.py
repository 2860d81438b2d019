"""Training with `vllm_mode="server"` on a real vLLM server on the CPU. NCCL needs a GPU, so weights reach it through
files: the folder that it loaded them from.
"""

import shutil

import pytest
from peft import LoraConfig
from safetensors.torch import save_file
from trl.generation.vllm_client import VLLMClient

from tests.engines.server import served
from tests.factories.configurations import FILL
from tests.factories.tiny import logged, run, tiny_tokenizer
from tests.factories.training import Watched, logp_differences


pytestmark = pytest.mark.vllm
KINDS = {
    "default": {},
    "lora": {"trainer": {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])}},
}


def alternating_reward(completions, trainer_state, **kwargs):
    """
    Decides what carries a gradient, whatever is sampled: each group of the first batch, and every second one later.
    """
    return [float(i % 2 and (trainer_state.global_step == 0 or i // 4 % 2)) for i in range(len(completions))]


@pytest.fixture(scope="module")
def server(model_folder, tmp_path_factory):
    """The address of a server, and the folder that it reloads its weights from."""
    folder = tmp_path_factory.mktemp("server")
    model = folder / "model"
    shutil.copytree(model_folder(tiny_tokenizer(), "vllm"), model)
    with served(model, folder / "log.txt") as url:
        yield url, model


@pytest.fixture
def train(server, model_folder, tmp_path, monkeypatch):
    """Two steps with default selection and replay. The server reloads its weights the first `reloads` times."""
    url, model = server

    def train(*, reloads=None, trainer=None, **fields):
        syncs = []

        def through_files(client, metadata, named_params):
            weights = {name: tensor.detach().clone() for name, tensor in named_params}
            assert list(weights) == [name for name, _, _ in metadata]
            save_file(weights, model / "model.safetensors", {"format": "pt"})
            if reloads is None or len(syncs) < reloads:
                client._post(f"{client.base_url}/collective_rpc", json={"method": "reload_weights"})
            syncs.append(len(weights))

        monkeypatch.setattr(VLLMClient, "init_communicator", lambda client, device: None)
        monkeypatch.setattr(VLLMClient, "update_named_params", through_files)
        tokenizer = tiny_tokenizer()
        arguments = {"processing_class": tokenizer, "model": model_folder(tokenizer, "vllm"), **(trainer or {})}
        options = {
            **{"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url},
            **{"selection": "dots", **FILL, "per_device_train_batch_size": 32, "max_steps": 2},
            **{"rewards": alternating_reward, "model_init_kwargs": {"dtype": "float32"}},
            # The compact update leaves out TRL's pass for the log-probs that are compared here with the sampler's
            "compact_update": False,
        }
        instance = run(tmp_path, Watched, trainer=arguments, **{**options, **fields})
        assert len(syncs) == 2
        return instance

    return train


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_of_sampler_and_training_agree_after_an_update(kind, train):
    trainer = train(**KINDS[kind])
    assert max(logp_differences(trainer)) < 1e-3
    assert trainer.state.log_history[0]["grad_norm"] > 0
    assert trainer.batches[1].replayed
    assert trainer.generated == trainer._dataeff_observer.counters["rollouts_generated"]


def test_without_the_reload_they_do_not(train):
    before, after = logp_differences(train(reloads=1))
    assert before < 1e-3
    assert after > 1e-2


def test_compact_update_has_the_samplers_log_probs(train):
    trainer = train(compact_update=True)
    assert trainer.state.log_history[0]["grad_norm"] > 0
    assert trainer.batches[1].replayed
    assert all("old_per_token_logps" not in tensors for tensors in trainer.tensors)
    (difference,) = logged(trainer, "sampling/sampling_logp_difference/max")[0]
    assert 0 < difference < 1e-3
