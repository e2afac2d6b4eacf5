#!/usr/bin/env python3
"""The shortest whole program: torchrun --nproc_per_node=2 examples/minimal_fsdp2.py (GPUs when there are, else CPU)."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fsdp2x import MixedPrecisionPolicy, fully_shard

VOCAB, HIDDEN, LAYERS = 1000, 128, 4


class SimpleTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(HIDDEN, nhead=8, dim_feedforward=4 * HIDDEN, batch_first=True)
            for _ in range(LAYERS)
        )
        self.lm_head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, input_ids):
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def main() -> None:
    # 1. Processes. LOCAL_RANK, not the global rank, chooses the GPU: on a second host they differ.
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device_type, int(os.environ["LOCAL_RANK"])) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    # 2. Mesh.
    mesh = init_device_mesh(device_type, mesh_shape=(world,), mesh_dim_names=("dp",))

    # 3. The same model on every rank, 4. one unit per layer and one for the rest: fp32 shards, bf16 compute.
    torch.manual_seed(0)
    model = SimpleTransformer().to(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)

    # 5. Any torch code: each token is to be answered by its successor modulo the vocabulary.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    input_ids = torch.randint(0, VOCAB, (512, 32))
    dataset = TensorDataset(input_ids, (input_ids + 1) % VOCAB)
    sampler = DistributedSampler(dataset, num_replicas=world, rank=rank, shuffle=True)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for step, (tokens, labels) in enumerate(DataLoader(dataset, batch_size=8, sampler=sampler)):
            logits = model(tokens.to(device))
            loss = nn.functional.cross_entropy(logits.view(-1, VOCAB).float(), labels.to(device).view(-1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0 and step % 10 == 0:
                print(f"Epoch {epoch}, Step {step}, Loss: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
