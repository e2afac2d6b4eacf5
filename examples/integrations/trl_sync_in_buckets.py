"""TRL: weights on their way to vLLM are gathered in buckets instead of by one collective for each parameter.

trainer = GRPOTrainer(..., args=GRPOConfig(use_vllm=True))
sync_in_buckets(trainer.vllm_generation)
"""

import fsdp2x


def sync_in_buckets(generation) -> None:
    one_by_one = generation._iter_fsdp2_params

    def in_buckets(module):
        if hasattr(module, "peft_config"):  # adapters keep TRL's way
            yield from one_by_one(module)
            return
        for name, whole in fsdp2x.full_tensors(module, device=generation.accelerator.device):
            yield generation._fix_param_name_to_vllm(name, extra_prefixes=["modules_to_save.default."]), whole

    generation._iter_fsdp2_params = in_buckets
