"""A test double of TRL's vLLM backend."""

from types import SimpleNamespace

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
from trl.generation.vllm_generation import VLLMGeneration


class ModelCopyGeneration(VLLMGeneration):
    """Samples from a copy of the model that `sync_weights` alone updates, and reports the copy's log-probs."""

    def _init_vllm(self):
        base = self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model
        with torch.random.fork_rng(devices=[]):
            self.copy = AutoModelForCausalLM.from_config(base.config).eval()
        limit = self.max_model_length or base.config.max_position_embeddings
        self.llm = SimpleNamespace(
            llm_engine=SimpleNamespace(model_config=SimpleNamespace(max_model_len=limit), engine_core=self)
        )
        self._load()  # vLLM loads the original weights from their folder

    def sync_weights(self):
        self._load()

    def _load(self):
        with torch.no_grad():
            own = dict(self.copy.named_parameters())
            for name, parameter in self._iter_named_params():
                own.pop(name).copy_(parameter)
        assert not own, f"not synchronized: {sorted(own)}"

    @torch.no_grad()
    def generate(self, prompts, images, num_generations, profiler=None):
        limit = self.llm.llm_engine.model_config.max_model_len
        if max(map(len, prompts)) > limit:
            raise ValueError(f"The decoder prompt is longer than the maximum model length of {limit}.")
        tokenizer, width = self.processing_class, max(map(len, prompts))
        ids = torch.tensor([[tokenizer.pad_token_id] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        output = self.copy.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=min(self.max_completion_length, limit - width),
            do_sample=True,
            top_k=0,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            output_logits=True,
            use_cache=True,
            return_dict_in_generate=True,
        )
        sampled = output.sequences[:, width:]
        logps = torch.stack(output.logits, dim=1).log_softmax(-1).gather(2, sampled.unsqueeze(2)).squeeze(2)
        ended = sampled == tokenizer.eos_token_id
        lengths = torch.where(ended.any(1), ended.int().argmax(1) + 1, sampled.size(1)).tolist()
        completions = [row[:n] for row, n in zip(sampled.tolist(), lengths)]
        logprobs = [[[value] for value in row[:n]] for row, n in zip(logps.tolist(), lengths)]
        return prompts, completions, logprobs, [[[token] for token in row] for row in completions]

    def shutdown(self):
        """As vLLM's engine core."""
