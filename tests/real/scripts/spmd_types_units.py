"""Plain parameters that spmd_types annotates on the data-parallel axes of a mesh. No change for a CPU."""

import sys

import spmd_types as spmd
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import DataParallelMeshDims, fully_shard

import report

dist.init_process_group("gloo")
if sys.argv[2] == "fsdp":
    mesh, dims = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), DataParallelMeshDims(shard="dp")
else:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    dims = DataParallelMeshDims(shard="shard", replicate="replicate")
axes = {spmd.MeshAxis.of(mesh.get_group(name)): spmd.R for name in mesh.mesh_dim_names}
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6))
with spmd.set_current_mesh(frozenset(axes)):
    for param in model.parameters():
        spmd.assert_type(param, axes)
for module in (model[0], model[2], model):
    fully_shard(module, mesh=mesh, dp_mesh_dims=dims)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
values = []
for step in range(4):
    torch.manual_seed(10 * step + dist.get_rank())
    loss = model(torch.randn(4, 6)).square().mean()
    loss.backward()
    values += [loss.item(), *(param.grad.full_tensor().sum().item() for param in model.parameters())]
    optimizer.step()
    optimizer.zero_grad()
report.write(values, model)
dist.destroy_process_group()
