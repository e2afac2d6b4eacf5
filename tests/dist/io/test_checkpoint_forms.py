"""The three forms: what is saved loads at other world sizes, into fresh optimizers, in stock, and in the trainer."""

import json
import zlib

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import fsdp2x
from checkpoints import FORMS, OPTIMIZERS, Mixed, Training, on_first, shared_folder
from fsdp2x import checkpoint
from fsdp2x.base.failures import CheckpointError
from fsdp2x.convert import convert_checkpoint
from fsdp2x.io.checkpoint.trees import nest
from harness import dist_run, distributed
from training import losses as logged
from training import run, settings
from training import shared_folder as text_folder


def train_and_save(ctx, folder, cells):
    """Saves after 3 steps in the forms of each optimizer; returns the losses of the next 3."""
    losses = {}
    for optimizer in OPTIMIZERS:
        training = Training(optimizer)
        training.steps(3)
        for form in [form for other, form in cells if other == optimizer]:
            training.save(folder / optimizer / form, form=form)
        losses[optimizer] = training.steps(3)
    return losses


def resume(ctx, folder, cells):
    losses = {}
    for optimizer, form in cells:
        training = Training(optimizer)
        loaded = training.load(folder / optimizer / form)
        assert loaded.world_size == 2 and loaded.step == 3 and not loaded.missing
        losses[optimizer, form] = training.steps(3)
    return losses


def load_per_rank(ctx, path, optimizer):
    training = Training(optimizer)
    with pytest.raises(Exception) as error:
        training.load(path)
    return str(error.value)


@pytest.mark.parametrize(("worlds", "num"), [((1, 3), 1), pytest.param((1, 3, 4), 3, marks=pytest.mark.full)])
def test_other_world_sizes_continue_the_run(tmp_path, worlds, num):
    """`num` of the forms for each optimizer, as they were saved and converted to another one."""
    cells = [(name, FORMS[-(number + k) % 3]) for number, name in enumerate(OPTIMIZERS) for k in range(num)]
    whole = dist_run(train_and_save, 2, tmp_path, cells, fresh=False)[0].value
    converted = []
    for number, (optimizer, form) in enumerate(cells):
        to = ("full", "sharded")[number % 2]
        if (optimizer, to) not in converted:
            converted.append((optimizer, to))
            convert_checkpoint(tmp_path / optimizer / form, tmp_path / "converted" / optimizer / to, form=to)
    for folder, saved in ((tmp_path, cells), (tmp_path / "converted", converted)):
        same = dist_run(resume, 2, folder, saved, fresh=False)[0].value
        for (optimizer, form), losses in same.items():
            assert losses == whole[optimizer], (folder, optimizer, form)
        for world in worlds:
            loadable = [cell for cell in saved if cell[1] != "per_rank"]
            other = dist_run(resume, world, folder, loadable, fresh=False)[0].value
            for (optimizer, form), losses in other.items():
                # Sums over other numbers of ranks round otherwise; the bfloat16 weight amplifies it.
                assert losses == pytest.approx(whole[optimizer], rel=2e-3), (world, folder, optimizer, form)
                assert losses[:2] == pytest.approx(whole[optimizer][:2], rel=3e-4), (world, folder, optimizer, form)
    optimizer = next(name for name, form in cells if form == "per_rank")
    said = dist_run(load_per_rank, 3, tmp_path / optimizer / "per_rank", optimizer, fresh=False)
    for outcome in said:
        assert "a per-rank checkpoint of 2 ranks cannot be loaded by 3 ranks. Use as many ranks" in outcome.value


@distributed
@pytest.mark.parametrize("form", FORMS)
def test_conversions_that_fail_leave_what_is_there(ctx, form):
    with shared_folder() as folder:
        Training().save(folder / "saved", form=form)

        def convert():
            convert_checkpoint(folder / "saved", folder / "out", form="full")
            with pytest.raises(FileExistsError):
                convert_checkpoint(folder / "saved", folder / "out", form="full")
            (lost,) = folder.glob("saved/step-*/__1_0.distcp" if form == "per_rank" else "saved/step-*/manifest.json")
            lost.unlink()
            said = "__1_0.distcp: missing" if form == "per_rank" else "no such|manifest"
            with pytest.raises(CheckpointError, match=said):
                convert_checkpoint(folder / "saved", folder / "out", form="full", force=True)
            assert sorted(path.name for path in folder.iterdir()) == ["out", "saved"]

        on_first(convert)


@distributed(world_sizes=(2, 3))
def test_a_full_checkpoint_needs_safetensors_and_torch_alone(ctx):
    with shared_folder() as folder:
        training = Training("adamw")
        training.steps(2)
        path = training.save(folder, form="full", extra={"note": "hi"}).path
        state = training.model.state_dict()
        whole = {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in state.items()}
        file, parts = load_file(path / "checkpoint.safetensors"), torch.load(path / "trainer.pt", weights_only=True)
        model = {name.removeprefix("model."): tensor for name, tensor in file.items() if name.startswith("model.")}
        assert whole.keys() - model.keys() == {"head.weight"}  # a tied weight is there once
        for name, tensor in model.items():
            assert torch.equal(tensor, whole[name]), name
        for name, param in training.model.named_parameters():
            if param in training.optimizer.state:
                moment = training.optimizer.state[param]["exp_avg"].full_tensor()
                assert torch.equal(file[f"optimizer.state.{name}.exp_avg"], moment), name
        assert parts["values"]["optimizer.param_groups.0.lr"] == training.optimizer.param_groups[0]["lr"]
        assert (parts["step"], parts["extra"], len(parts["rng"])) == (2, {"note": "hi"}, ctx.world)
        Mixed().load_state_dict({**model, "head.weight": model["embed.weight"]})


@distributed
def test_files_of_torch_save_are_read_but_no_longer_written(ctx):
    with shared_folder() as folder:
        training = Training("adamw")
        training.steps(2)
        with pytest.raises(ValueError, match="a checkpoint is a folder. Pass a folder and form='full'"):
            training.save(folder / "one.pt", form="full")
        options = StateDictOptions(full_state_dict=True)
        model, optimizer = get_state_dict(training.model, training.optimizer, options=options)
        parts = {"scheduler": training.schedule.state_dict(), "step": 2}
        on_first(lambda: torch.save({"model": model, "optimizer": optimizer, **parts}, folder / "one.pt"))
        fresh = Training("adamw")
        loaded = checkpoint.load(folder / "one.pt", fresh.model, fresh.optimizer, scheduler=fresh.schedule)
        assert (loaded.step, loaded.form, loaded.world_size) == (2, "full", None)
        fresh.number = 2
        assert fresh.steps(2) == training.steps(2)


def make_old(path, form):
    """Turns a checkpoint into one of format 3: checksums of files instead of chunks, generators in JSON."""
    parts = torch.load(path / "trainer.pt", weights_only=True)
    rngs, values = parts.pop("rng"), parts.pop("values")
    manifest = json.loads((path / "manifest.json").read_text())
    paths = {name: entry["path"] for name, entry in manifest["tensors"].items()} | manifest["values"]
    manifest = {key: one for key, one in manifest.items() if key not in ("tensors", "values", "files", "crc32")}
    manifest |= {"format": 3, "entries": {}, "num_entries": []}
    if form == "full":
        leaves = {**load_file(path / "checkpoint.safetensors"), **values}
        tree = {**nest(paths, leaves), **parts, "rng": rngs, "manifest": manifest}
        torch.save(tree, path / "checkpoint.pt")
        (path / "checkpoint.safetensors").unlink()
        (path / "trainer.pt").unlink()
    else:
        torch.save(parts, path / "trainer.pt")
        for rank, state in enumerate(rngs):
            (path / f"rng-{rank:05d}.json").write_text(json.dumps({**state, "rank": rank, "step": parts["step"]}))
    names = [one.name for one in path.iterdir() if one.name != "manifest.json"]
    contents = {name: (path / name).read_bytes() for name in names}
    files = {name: {"bytes": len(one), "crc32": zlib.crc32(one)} for name, one in contents.items()}
    (path / "manifest.json").write_text(json.dumps({**manifest, "files": files}))


@distributed
@pytest.mark.parametrize("form", ["sharded", "full", "file"])
def test_checkpoints_of_the_format_before_are_read(ctx, form):
    with shared_folder() as folder:
        training = Training()
        training.steps(2)
        path = training.save(folder, form="full" if form == "file" else form).path
        drawn = torch.rand(3)
        on_first(lambda: make_old(path, "full" if form == "file" else form))
        fresh = Training()
        loaded = fresh.load(path / "checkpoint.pt" if form == "file" else folder)
        assert (loaded.step, loaded.world_size) == (2, ctx.world) and torch.equal(torch.rand(3), drawn)
        assert fresh.steps(2) == training.steps(2)
        if form == "sharded":
            from fsdp2x.convert import convert_checkpoint

            on_first(lambda: convert_checkpoint(folder, folder / "new", form="full"))
            assert Training().load(folder / "new").step == 2
        (file,) = path.glob("__1_0.distcp" if form == "sharded" else "checkpoint.pt")
        on_first(lambda: file.write_bytes(file.read_bytes()[:-3000] + bytes(3000)))
        with pytest.raises(checkpoint.CheckpointError, match=f"{file.name}: damaged"):
            fresh.load(path / "checkpoint.pt" if form == "file" else folder)


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("form", FORMS)
def test_what_differs_by_rank_and_what_is_not_there_yet(ctx, form):
    """Each rank restores its own generators and data position, and an optimizer without steps stays without state."""
    with shared_folder() as folder:
        training = Training()
        torch.manual_seed(100 + ctx.rank)
        data = {"next": 0, "mine": torch.tensor([ctx.rank])}
        training.save(folder, form=form, data=data)
        drawn = torch.rand(3)
        torch.manual_seed(5)
        fresh = Training()
        assert fresh.load(folder).data["mine"].item() == ctx.rank
        assert torch.equal(torch.rand(3), drawn)
        assert not training.optimizer.state and not fresh.optimizer.state
        assert fresh.steps(2) == training.steps(2)


@distributed(world_sizes=(2,))
def test_what_is_missing_is_named(ctx):
    with shared_folder() as folder:
        training = Training()
        training.steps(1)
        for form in FORMS:
            path = folder / form
            checkpoint.save(path, training.model, step=1, form=form)
            fresh = Training()
            with pytest.raises(checkpoint.CheckpointError, match=r"lacks optimizer, scheduler.*strict=False"):
                checkpoint.load(path, fresh.model, fresh.optimizer, scheduler=fresh.schedule)
            loaded = checkpoint.load(path, fresh.model, fresh.optimizer, scheduler=fresh.schedule, strict=False)
            assert loaded.missing == ["optimizer", "scheduler"]
            assert not fresh.optimizer.state
            assert torch.equal(fresh.model.frozen.full_tensor(), training.model.frozen.full_tensor())
        fresh.model.count2 = torch.nn.Parameter(torch.zeros(2))
        with pytest.raises(checkpoint.CheckpointError, match=r"it lacks count2"):
            checkpoint.load(path, fresh.model)
        assert checkpoint.load(path, fresh.model, strict=False).missing == ["count2"]
        other = Mixed()
        other.adapter = nn.Linear(6, 7, bias=False)
        said = r"another model: adapter.weight .* \[6, 6\] there, but \[7, 6\] in"
        with pytest.raises(checkpoint.CheckpointError, match=said):
            checkpoint.load(folder / "sharded", Training(model=other).model)


@distributed(world_sizes=(2,))
def test_nothing_is_executed_unless_told(ctx):
    with shared_folder() as folder:
        training = Training()
        strange = {"set": {1, 2}, "path": folder}
        with pytest.raises(checkpoint.CheckpointError, match="extra .* trusted=True"):
            training.save(folder, extra=strange)
        assert list(folder.iterdir()) == []
        for form in FORMS:
            training.save(folder / form, form=form, extra=strange, trusted=True)
            with pytest.raises(checkpoint.CheckpointError, match="trusted=True"):
                training.load(folder / form)
            assert training.load(folder / form, trusted=True).extra == strange


@distributed(world_sizes=(2,))
def test_marked_ones_stay(ctx):
    with shared_folder() as folder:
        training = Training()
        for step in range(1, 6):
            training.save(folder, step=step, keep=1, marked=step == 2)
        on_first(lambda: checkpoint.mark(folder / "step-000005"))
        training.save(folder, step=6, keep=1)
        names = sorted(path.name for path in folder.iterdir())
        assert names == ["latest", "step-000002", "step-000005", "step-000006"]
        on_first(lambda: checkpoint.mark(folder / "step-000002", False))
        training.save(folder, step=7, keep=1)
        assert not (folder / "step-000002").exists()
        assert training.load(folder / "step-000005").step == 5


@distributed(world_sizes=(2, 3))
@pytest.mark.parametrize("async_save", [False, True])
def test_buffers_that_differ_are_those_of_rank_0(ctx, async_save):
    """Each rank's own in the files of each rank; in the others all of one rank, also next to what stays on a rank."""

    def make(value):
        model = nn.Sequential(nn.Linear(4, 4), *(nn.BatchNorm1d(4) for _ in range(3)))
        fsdp2x.fully_shard(model)
        for index, buffer in enumerate(model.buffers()):
            buffer.fill_(10 * value + index)
        return model

    with shared_folder() as folder:
        for form in FORMS:
            model = make(ctx.rank)
            saved = fsdp2x.checkpoint.save(folder / form, model, step=0, form=form, async_save=async_save)
            for buffer in model.buffers():
                buffer.fill_(-1)
            saved.wait()
            fresh = make(ctx.rank + 5)
            fsdp2x.checkpoint.load(folder / form, fresh)
            expected = make(ctx.rank if form == "per_rank" else 0)
            for mine, theirs in zip(fresh.buffers(), expected.buffers(), strict=True):
                assert mine.equal(theirs), form


@distributed
@pytest.mark.parametrize("form", FORMS)
def test_plain_states_of_no_known_cut_are_refused(ctx, form):
    model = fsdp2x.fully_shard(nn.Linear(6, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight]["rows"] = torch.zeros(model.weight.to_local().shape[0])
    with shared_folder() as folder:
        with pytest.raises(fsdp2x.checkpoint.CheckpointError, match="rows of weight is a plain tensor"):
            fsdp2x.checkpoint.save(folder, model, optimizer, step=1, form=form)
        tiny = fsdp2x.fully_shard(nn.Linear(1, 1, bias=False))
        optimizer = torch.optim.SGD(tiny.parameters(), lr=0.1)
        optimizer.state[tiny.weight]["whole"] = torch.zeros(1, 1)
        with pytest.raises(fsdp2x.checkpoint.CheckpointError, match="shard on rank 0"):
            fsdp2x.checkpoint.save(folder, tiny, optimizer, step=1, form=form)
        kept = torch.full_like(tiny.weight.to_local(), 3.0)  # empty on the second rank
        optimizer.state[tiny.weight] = {"moment": kept.clone()}
        fsdp2x.checkpoint.save(folder, tiny, optimizer, step=1, form=form)
        optimizer.state.clear()
        fsdp2x.checkpoint.load(folder, tiny, optimizer)
        assert torch.equal(optimizer.state[tiny.weight]["moment"], kept)


@distributed(world_sizes=(4,))
def test_a_mesh_with_replicas_writes_each_chunk_once(ctx):
    with shared_folder() as folder:
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        training = Training(mesh=mesh)
        training.steps(1)
        for form in FORMS:
            saved = training.save(folder / form, form=form)
            total = torch.tensor([saved.num_bytes])
            dist.all_reduce(total)
            whole = sum(t.numel() * t.element_size() for t in _tensors(training))
            assert int(total) == (2 if form == "per_rank" else 1) * whole or form == "per_rank"
        expected = training.steps(2)
        for form in FORMS:
            fresh = Training(mesh=mesh)
            fresh.load(folder / form)
            assert fresh.steps(2) == expected, form


def _tensors(training):
    seen = {}
    for name, tensor in training.model.state_dict().items():
        if name != "head.weight":
            seen[name] = tensor
    states = [value for state in training.optimizer.state.values() for value in state.values()]
    return [*seen.values(), *states]


@distributed
def test_groups_that_were_others_are_told(ctx):
    with shared_folder() as folder:
        training = Training()  # two groups, one without decay
        training.steps(1)
        training.save(folder)
        fresh = Training("sgd")
        one_group = torch.optim.AdamW(fresh.optimizer.param_groups[0]["params"], lr=0.5, weight_decay=0.3)
        with pytest.raises(fsdp2x.checkpoint.CheckpointError, match="mixes 2 saved groups with different settings"):
            fsdp2x.checkpoint.load(folder, fresh.model, one_group)
        assert not one_group.state
        fsdp2x.checkpoint.load(folder, fresh.model, one_group, strict=False)
        assert one_group.param_groups[0]["weight_decay"] == 0.3
        for mine, theirs in zip(fresh.model.parameters(), training.model.parameters(), strict=True):
            assert one_group.state.get(mine, {}).keys() == training.optimizer.state.get(theirs, {}).keys()


@distributed
def test_several_optimizers(ctx):
    def make():
        training = Training()
        whole, rest = (group["params"] for group in training.optimizer.param_groups)
        return training, [torch.optim.SGD(whole, lr=0.1, momentum=0.9), fsdp2x.optim.AdamW(rest, lr=0.1)]

    def step(training, optimizers):
        training.optimizer = optimizers[0]
        loss = training.model(torch.arange(8).view(2, 4) + training.number)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        training.number += 1
        return float(loss)

    with shared_folder() as folder:
        training, optimizers = make()
        for _ in range(2):
            step(training, optimizers)
        fsdp2x.checkpoint.save(folder, training.model, optimizers, step=2)
        expected = [training.number, step(training, optimizers), step(training, optimizers)]
        training, optimizers = make()
        fsdp2x.checkpoint.load(folder, training.model, optimizers)
        training.number = 2
        assert [training.number, step(training, optimizers), step(training, optimizers)] == expected


def stock_save(training, folder, **options):
    model, optimizer = get_state_dict(training.model, training.optimizer, options=StateDictOptions(**options))
    dcp.save({"app": {"model": model, "optim": optimizer}}, checkpoint_id=folder)


def stock_load(training, folder):
    model, optimizer = get_state_dict(training.model, training.optimizer)
    state = {"model": model, "optimizer": optimizer}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        training.model, training.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    training.number = 3


@distributed(world_sizes=(2, 3))
@pytest.mark.parametrize("optimizer", ["torch_adamw", "sgd"])
def test_stock_reads_ours(ctx, optimizer):
    with shared_folder() as folder:
        training = Training(optimizer)
        training.steps(3)
        path = training.save(folder, async_save=True).wait()
        on_first(lambda: dcp_to_torch_save(path, folder / "whole.pt"))
        whole = torch.load(folder / "whole.pt", weights_only=True)["model"]
        for name, param in training.model.named_parameters():
            assert torch.equal(param.full_tensor(), whole[name]), name
        stock = Training(optimizer, impl="torch")
        stock_load(stock, path)
        fresh = Training(optimizer, impl="torch")
        fresh.load(folder)  # our function on a model of stock FSDP2
        expected = training.steps(4)
        for other in (stock, fresh):
            other.schedule.last_epoch = 3
            # Over three ranks stock rounds the sums of the bfloat16 weight otherwise.
            assert other.steps(4) == pytest.approx(expected, rel=1e-5 if ctx.world == 2 else 5e-4)


@distributed(world_sizes=(2, 3))
@pytest.mark.parametrize("flat", [False, True])
def test_ours_reads_stock(ctx, flat):
    with shared_folder() as folder:
        stock = Training(impl="torch")
        stock.steps(3)
        stock_save(stock, folder, flatten_optimizer_state_dict=flat)
        training = Training()
        loaded = checkpoint.load(folder, training.model, training.optimizer)
        assert (loaded.step, loaded.form, loaded.world_size) == (None, "sharded", None)
        for (name, mine), theirs in zip(training.model.named_parameters(), stock.model.parameters(), strict=True):
            assert torch.equal(mine.full_tensor(), theirs.full_tensor()), name
            moments, other = training.optimizer.state.get(mine, {}), stock.optimizer.state.get(theirs, {})
            assert moments.keys() == other.keys()
            for key in moments:
                mine_, theirs_ = (
                    t.full_tensor() if hasattr(t, "full_tensor") else t for t in (moments[key], other[key])
                )
                assert torch.equal(mine_, theirs_), (name, key)
        training.number, training.schedule = 3, stock.schedule
        training.schedule.optimizer = training.optimizer
        assert training.optimizer.param_groups[1]["weight_decay"] == 0.0


@distributed
@pytest.mark.parametrize("form", [FORMS[0], *(pytest.param(form, marks=pytest.mark.full) for form in FORMS[1:])])
def test_a_run_that_saves_in_the_background_resumes_bit_for_bit(ctx, form):
    with text_folder(ctx) as folder:
        section = {"save_every": 1, "keep": 1, "keep_every": 3, "async_save": True, "form": form}
        run(settings(folder / "text", folder / "whole", checkpoint=section))
        # `keep_every` protects steps 3 and 6. Of the other checkpoints, `keep` leaves only the last one.
        names = sorted(path.name for path in (folder / "whole/checkpoints").iterdir())
        assert names == ["latest", "run.lock", "step-000003", "step-000005", "step-000006"]
        checkpoint = {"resume_from": str(folder / "whole/checkpoints/step-000003"), "save_every": 0}
        run(settings(folder / "text", folder / "resumed", checkpoint=checkpoint))
        dist.barrier()
        assert logged(folder / "resumed") == {step: logged(folder / "whole")[step] for step in (4, 5, 6)}
