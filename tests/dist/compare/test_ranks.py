"""`fsdp2x compare --b-nproc`: runs on several ranks and on fewer agree, except for faults of the number of ranks."""

import pytest

from harness import programs

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

how = sys.argv[1]
dist.init_process_group()
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank if how == "weights_by_rank" else 0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.dropout, self.down = nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(self.dropout(self.up(x).relu()))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(20, 8), nn.Embedding(16, 8)
        self.mix = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.BatchNorm1d(8) if how == "batch_norm_by_rank" else nn.Identity()
        self.head = nn.Linear(8, 20)
        self.register_buffer("rows", torch.zeros(()))

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]) + (rank if how == "positions_by_rank" else 0))
        x = x + self.mix(x, x, x, need_weights=False)[0]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        self.rows += len(ids) if how == "rows_by_rank" else 0
        return self.head(self.norm(x.transpose(1, 2)).transpose(1, 2))


model = Net()
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
data = torch.randint(0, 20, (64, 6), generator=torch.Generator().manual_seed(1))
if how == "padding_by_rank":
    data = data.where(torch.arange(6) < 1 + torch.arange(64).unsqueeze(1) % 6, 0)
if how == "shapes_by_rank":
    data = data[:, : 6 - rank]
alone = {"num_replicas": 1, "rank": 0} if how == "same_rows" else {}
sampler = DistributedSampler(data, **alone)
batches = DataLoader(data, batch_size=4 // world if how == "batch_by_rank" else 2, sampler=sampler)
if how == "split_by_hand":
    batches = [rows.chunk(world)[rank] for rows in data.split(4)]
if how == "drawn_by_rank":
    batches = data.split(2)[rank:]
rate = 1e-2 * (world if how == "rate_times_ranks" else 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
for ids in batches:
    labels = ids.roll(-1, 1).flatten()
    reduction = "sum" if how == "sum_of_losses" else "mean"
    ignored = 0 if how == "padding_by_rank" else -100
    loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), labels, reduction=reduction, ignore_index=ignored)
    (loss * (world if how == "loss_times_ranks" else 1)).backward()
    if how == "gradient_times_ranks":
        model.head.weight.grad.mul_(world)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1 * (world if how == "clipped_by_rank" else 1))
    optimizer.step()
    for _ in range(world if how == "schedule_by_rank" else 1):
        schedule.step()
    optimizer.zero_grad()
"""
# Ways to read the same rows on any number of ranks.
CLEAN = ("sampler", "batch_by_rank", "split_by_hand")
FAULTS = {
    "same_rows": "input of batches of loader 1, pass 1, step 0",
    "drawn_by_rank": "input of [0], step 0",
    "weights_by_rank": "initial weight of tokens.weight, step 0",
    "positions_by_rank": "forward output of positions, step 0",
    "batch_norm_by_rank": "forward output of norm, step 0",
    "loss_times_ranks": "loss, step 0",
    "sum_of_losses": "loss, step 0",
    "padding_by_rank": "loss, step 1",
    "gradient_times_ranks": "gradient after reduction of head.weight, step 0",
    "clipped_by_rank": "gradient after clipping of tokens.weight, step 0",
    "rate_times_ranks": "weight after optimizer step of tokens.weight, step 0",
    "rows_by_rank": "buffer after optimizer step of rows, step 0",
    "schedule_by_rank": "weight after optimizer step of tokens.weight, step 1",
}
QUICK = ("sampler", "same_rows")


def on_fewer(folder, how, *words):
    (folder / "train.py").write_text(SCRIPT)
    words = words or ("--nproc", "2", "--b-nproc", "1")
    return programs.run("-m", "fsdp2x", "compare", "--steps", "2", *words, "train.py", how, cwd=folder, timeout=240)


def some(names):
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in names]


@pytest.mark.parametrize("how", some(CLEAN))
def test_fewer_ranks_train_on_the_same_rows(tmp_path, how):
    done = on_fewer(tmp_path, how)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 and 1 rank(s), 2 step(s)" in done.stdout


@pytest.mark.full
@pytest.mark.parametrize("against", ["unsharded", "fsdp2x", "ddp"])
def test_four_ranks_and_two(tmp_path, against):
    done = on_fewer(tmp_path, "sampler", "--nproc", "4", "--b-nproc", "2", "--against", against)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("fault", some(FAULTS))
def test_faults_of_the_number_of_ranks(tmp_path, fault):
    done = on_fewer(tmp_path, fault)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"first difference: {FAULTS[fault]} (" in done.stdout
    if fault == "same_rows":
        assert "b's loader does not give 2 of the 4 rows that the ranks of a read. In a, 2 of these" in done.stdout
        assert "  1 of " in done.stdout  # the others agree, because b trains on the rows of a
    if fault == "drawn_by_rank":
        assert "give b the larger batch with --b" in done.stdout


@pytest.mark.full
def test_rows_that_cannot_be_joined(tmp_path):
    done = on_fewer(tmp_path, "shapes_by_rank")
    assert done.returncode == 2
    assert "Run a has tensors of the shapes [[2, 6], [2, 5]] on 2 ranks" in done.stderr
