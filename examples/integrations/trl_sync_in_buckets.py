"""TRL: weights on their way to vLLM are gathered in buckets instead of one collective for each parameter.

Call ``sync_in_buckets()`` before the trainer is built. Adapters keep TRL's way.
"""

from trl.generation.vllm_generation import VLLMGeneration, is_peft_model

import fsdp2x

one_by_one = VLLMGeneration._iter_fsdp2_params


def in_buckets(self, module):
    if is_peft_model(module):
        yield from one_by_one(self, module)
        return
    for name, whole in fsdp2x.full_tensors(module, device=self.accelerator.device):
        yield self._fix_param_name_to_vllm(name, extra_prefixes=["modules_to_save.default."]), whole


def sync_in_buckets() -> None:
    VLLMGeneration._iter_fsdp2_params = in_buckets
