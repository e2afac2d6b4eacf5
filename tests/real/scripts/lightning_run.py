"""Lightning's Trainer or Fabric with ModelParallelStrategy, whose configure_model calls fully_shard. No CPU change.

The Trainer also runs with precision ``bf16-true``, and with a model on the meta device. Lightning gives that model
memory and calls ``reset_parameters``. It also resumes from a sharded checkpoint with the same numbers.
"""

import sys
from pathlib import Path

import lightning as L
import torch
from lightning.fabric.strategies import ModelParallelStrategy as FabricStrategy
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard

import report

how = sys.argv[2]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    with torch.device("meta" if how == "meta" else "cpu"):
        return nn.Sequential(*(nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12)) for _ in range(2)))


def shard(model, mesh):
    for block in model:
        fully_shard(block, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


data = torch.utils.data.TensorDataset(torch.randn(32, 12, generator=torch.Generator().manual_seed(1)))
values = []


class Module(L.LightningModule):
    def configure_model(self):
        if not hasattr(self, "net"):
            self.net = shard(net(), self.device_mesh)

    def training_step(self, batch, index):
        loss = (self.net(batch[0]) - batch[0].roll(1, 1)).float().square().mean()
        values.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def train(max_epochs: int, checkpoint: Path | None = None) -> tuple[L.Trainer, nn.Module]:
    L.seed_everything(3, verbose=False)
    module = Module()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        precision="bf16-true" if how == "bf16" else "32-true",
        max_epochs=max_epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        use_distributed_sampler=True,
    )
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4), ckpt_path=checkpoint, weights_only=False)
    return trainer, module.net


if how == "resume":
    trainer, _ = train(2)
    trainer.save_checkpoint(Path(sys.argv[1] + ".checkpoint"))
    _, model = train(3, Path(sys.argv[1] + ".checkpoint"))
    resumed = values[:]
    values.clear()
    train(3)
    assert resumed == values, "resumed with other numbers"
elif how != "fabric":
    _, model = train(2)
else:
    fabric = L.Fabric(
        accelerator="cpu", devices=2, strategy=FabricStrategy(shard, data_parallel_size=2, tensor_parallel_size=1)
    )
    fabric.launch()
    model = fabric.setup_module(net())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    batches = fabric.setup_dataloaders(torch.utils.data.DataLoader(data, batch_size=4))
    for index, (x,) in enumerate(batch for _ in range(3) for batch in batches):
        with fabric.no_backward_sync(model, enabled=index % 2 == 0):
            loss = (model(x) - x.roll(1, 1)).square().mean()
            fabric.backward(loss)
        values.append(loss.item())
        if index % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
assert len(values) >= 4
report.write([*values, *(param.full_tensor().sum().item() for param in model.parameters())], model)
