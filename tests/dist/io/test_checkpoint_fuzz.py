"""Checkpoints with wrong files but valid checksums: all ranks refuse them alike, or load what the files say.

Each round damages one place of the checkpoint of step 2. It loads that checkpoint, or the folder that also has a
complete step 1. No load executes anything. Model, optimizer, schedule, and generators keep their state or take the
checkpoint's.
"""

import copy
import io
import json
import pickle
import random
import re
import shutil
import warnings
import zlib

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import damage
from checkpoints import FORMS, Training, on_first, shared_folder
from fsdp2x import checkpoint
from fsdp2x.io.checkpoint.optimizer import named_state
from fsdp2x.io.checkpoint.rng import rng_state
from fsdp2x.io.checkpoint.trees import flatten, nest
from harness import distributed

# The first seeds, and seeds that have found bugs.
ROUNDS = [pytest.param((*range(4), 261, 313), id="4")]
ROUNDS += [pytest.param(range(a, a + 100), id=f"{a}-{a + 100}", marks=pytest.mark.full) for a in (4, 104, 204)]
LAST = "step-000002"
# These errors do not make fsdp2x fall back to an older checkpoint: it does not fit the model or must be trusted.
NOT_DAMAGED = (
    " there, ",
    "trusted=True",
    "reads format",
    "strict=False",
    " has no ",
    ": expected ",
    "cannot be loaded by",
)


def snapshot(training):
    """Copies all that a load may change on this rank, by name. Copies only the local part of tensors."""
    tree = {
        "model": dict(training.model.state_dict()),
        "optimizer": named_state(training.model, [training.optimizer])[0],
        "scheduler": training.schedule.state_dict(),
        "rng": {str(dist.get_rank()): rng_state(torch.device("cpu"))},
    }
    flat, _ = flatten(tree)
    return {name: _copied(value) for name, value in flat.items()}


def _copied(value):
    value = value.to_local() if hasattr(value, "to_local") else value
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def differences(one, other):
    """Names whose values are not bit for bit the same."""
    return [name for name in {**one, **other} if _bits(one.get(name)) != _bits(other.get(name))]


def _bits(value):
    if isinstance(value, torch.Tensor):
        return (value.dtype, value.shape, value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return repr(value)


class Subject:
    """A training run after one step. Each round loads into it and then restores it."""

    def __init__(self):
        self.training = Training()
        torch.manual_seed(3 + dist.get_rank())
        with torch.no_grad():
            for param in self.training.model.parameters():
                param.mul_(1.5)
        self.training.steps(1)
        self.tensors = [*self.training.model.parameters(), *self.training.model.buffers()]
        self.kept = [tensor.detach().clone() for tensor in self.tensors]
        self.optimizer = copy.deepcopy(self.training.optimizer.state_dict())
        self.schedule = copy.deepcopy(self.training.schedule.state_dict())
        self.generators = [
            (torch.set_rng_state, torch.get_rng_state()),
            (random.setstate, random.getstate()),
            (numpy.random.set_state, numpy.random.get_state()),
        ]
        self.before = snapshot(self.training)

    def restore(self):
        with torch.no_grad():
            for tensor, kept in zip(self.tensors, self.kept, strict=True):
                tensor.copy_(kept)
        self.training.optimizer.load_state_dict(copy.deepcopy(self.optimizer))
        schedule = self.training.schedule
        schedule.__dict__ = {"optimizer": schedule.optimizer, **copy.deepcopy(self.schedule)}
        for give_back, state in self.generators:
            give_back(state)

    def judge(self, path, of_root, form, states, change):
        """Loads a damaged checkpoint and returns what goes wrong, if anything. Restores the training state."""
        training, error, loaded = self.training, None, None
        schedule = training.schedule if form != "stock" else None
        try:
            loaded = checkpoint.load(path, training.model, training.optimizer, scheduler=schedule)
        except Exception as refusal:
            error = refusal
        after = snapshot(training)
        if differences(self.before, after):
            self.restore()
        if wrong := damage.unlike(error, checkpoint.CheckpointError):
            return wrong
        if error is not None:
            if changed := differences(self.before, after):
                return f"partly applied, {changed[:5]}: {error}"
            needless = of_root and not any(text in str(error) for text in NOT_DAMAGED)
            return f"the older one is not taken: {error}" if needless else None
        is_older = of_root and loaded.step == 1
        expected, change = (states[1], damage.Change("")) if is_older else (states[2], change)
        odd = [name for name in differences(expected, after) if not explained(name, after, expected, change)]
        held = {"stock": ("model", "optimizer"), "file": ("model", "optimizer", "scheduler")}.get(form, "")
        # A file has no table of what is in it, so it may lack state of the optimizer.
        odd = [name for name in odd if name.startswith(held) and (form != "file" or name in after)]
        is_step = form == "file" or loaded.step in (None, 1, 2)  # only the file itself has its step
        return f"{odd[:5]} of step {loaded.step}" if odd or not is_step else None


def hurt(rng, path, form, other):
    """Damages the checkpoint at `path`; `other` is the one of step 1."""
    if form == "file":
        return _hurt_archive(rng, path, _lie)
    files = sorted(file for file in path.iterdir() if file.is_file())
    kind = rng.random()
    if kind < 0.15:
        file = rng.choice(files)
        # FSDP2's checkpoints do not record their step.
        others = [other / file.name] * 4 if form != "stock" else []
        change = damage.change_file(rng, file, [*files, *others])
    elif form == "stock":
        change = (_hurt_table if kind < 0.5 else _hurt_chunk)(rng, path)
    elif kind < 0.45:
        change = damage.change_json(rng, path / "manifest.json")
        change.touched = tuple(re.sub("^(tensors|values)[.]", "", one) for one in change.touched)
    elif kind < 0.6:
        change = _hurt_bytes(rng, path)
    elif kind < 0.75:
        file = path / "checkpoint.safetensors"
        change = damage.change_header(rng, file) if form == "full" else _hurt_table(rng, path)
    else:
        change = _hurt_archive(rng, path / "trainer.pt")
        change.touched = tuple(one.removeprefix("values.") for one in change.touched)
    change.touched = tuple(re.sub(r"^ranks[.][0-9]+[.]", "", one) for one in change.touched)
    if form != "stock" and rng.random() < 0.95:
        damage.fit(path)
    return change


def _hurt_archive(rng, path, lie=None):
    change = damage.change_archive(rng, path, lie)
    if ": rename" in change.what:
        change.touched += tuple(one.rpartition(".")[0] for one in change.touched)  # where the new name is
    return change


def _hurt_bytes(rng, folder):
    """Fills the bytes of a chunk with one number, and now and then its checksum fits."""
    manifest = json.loads((folder / "manifest.json").read_text())
    name = rng.choice([name for name, entry in manifest["tensors"].items() if entry["chunks"]])
    entry = manifest["tensors"][name]
    chunk = rng.choice(entry["chunks"])
    file, first = folder / chunk["file"], chunk.get("first_byte")
    if first is None:
        header = json.loads(file.read_bytes()[8:].split(b"}}", 1)[0] + b"}}")
        first = 8 + int.from_bytes(file.read_bytes()[:8], "little") + header[name]["data_offsets"][0]
        chunk = {"sizes": entry["shape"]}
    value = torch.full(chunk["sizes"], rng.choice([0, 3]), dtype=getattr(torch, entry["dtype"]))
    with open(file, "r+b") as opened:
        opened.seek(first)
        opened.write(value.view(-1).view(torch.uint8).numpy().tobytes())
    if is_fitted := rng.random() < 0.3:
        for one in entry["chunks"]:
            is_filled = chunk.get("offsets") in (None, one["offsets"])
            filled = torch.full(one["sizes"], value.view(-1)[0].item(), dtype=value.dtype)
            one["crc32"] = zlib.crc32(filled.view(-1).view(torch.uint8).numpy()) if is_filled else one["crc32"]
        (folder / "manifest.json").write_text(json.dumps(manifest))
    return damage.Change(f"fill {name} with a number, {is_fitted=}", (name,))


def _lie(rng, tree):
    flat, paths = flatten(tree)
    tensors = {name: value.clone() for name, value in flat.items() if isinstance(value, torch.Tensor)}
    if not tensors:
        return damage.pack({}), damage.Change("nothing left")
    return damage.lying(rng, tensors, lambda stored: nest(paths, {**flat, **stored}))


def _hurt_table(rng, folder):
    path = folder / ".metadata"
    table, change = damage.change(rng, pickle.loads(path.read_bytes()))
    try:
        path.write_bytes(pickle.dumps(table))
    except (RecursionError, AttributeError, TypeError, RuntimeError):
        path.write_bytes(b"")
    change.what, change.touched = f".metadata: {change.what}", ()
    return change


def _hurt_chunk(rng, folder):
    """The archive of one entry becomes another; the table of contents says where everything is then."""
    path = folder / ".metadata"
    table = pickle.loads(path.read_bytes())
    index = rng.choice(sorted(table.storage_data, key=str))
    info = table.storage_data[index]
    file, start, old = folder / info.relative_path, info.offset, info.length
    content = file.read_bytes()
    value = torch.load(io.BytesIO(content[start : start + old]), weights_only=True)
    kind = rng.random()
    if kind < 0.2:
        new, change = damage.change_zip(rng, content[start : start + old])
    else:
        if kind < 0.4 and isinstance(value, torch.Tensor):
            new, change = damage.lying(rng, {index.fqn: value}, lambda stored: stored[index.fqn])
        else:
            tree, change = damage.change(rng, {"it": value})
            new = damage.pack(tree.get("it"))
    file.write_bytes(content[:start] + new + content[start + old :])
    for one in {id(one): one for one in table.storage_data.values()}.values():
        if (one.relative_path, one.offset) == (info.relative_path, start):
            one.length = len(new)
        elif one.relative_path == info.relative_path and one.offset > start:
            one.offset += len(new) - old
    path.write_bytes(pickle.dumps(table))
    return damage.Change(f"{index.fqn} at {index.offset}: {change.what}", (index.fqn,))


def explained(name, values, originals, change):
    """Whether a value that differs from the one that was saved is what the damaged file says."""
    touched = {one.removeprefix("app.").replace("optim.", "optimizer.", 1) for one in change.touched}
    touched |= {one.replace("embed.weight", "head.weight") for one in touched}
    if "" in touched:
        return True
    if not any(f"{name}.".startswith(f"{one}.") or f"{one}.".startswith(f"{name}.") for one in touched):
        return False
    value, original = values.get(name), originals.get(name)
    if not isinstance(original, torch.Tensor):
        return True
    if not isinstance(value, torch.Tensor) or (value.dtype, value.shape) != (original.dtype, original.shape):
        return False
    if "fill" in change.what:
        return True
    if any(word in change.what for word in ("swap", "say that", "ZIP")):
        return any(torch.equal(value, one) for one in originals.values() if isinstance(one, torch.Tensor))
    return value.numel() < 2 or bool(value.isnan().all() or (value == value[:1]).all())  # as damage.py replaces it


@distributed(timeout=280)
@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("form", [*FORMS, "file", "stock"])
def test_damage_is_refused_or_loaded_as_the_files_say(ctx, form, rounds):
    warnings.simplefilter("ignore")
    with shared_folder() as folder:
        damage.Evil.path = str(folder / "executed")
        states = save_two(folder, form)
        subject = Subject()

        def begin(rng):
            path, root = _fresh(ctx, folder, form)
            of_root = root is not None and rng.random() < 0.4
            return (
                "from the folder" if of_root else "alone",
                lambda rng: hurt(rng, path, form, folder / "saved/step-000001"),
                lambda change: subject.judge(root if of_root else path, of_root, form, states, change),
            )

        problems = damage.problems_in(ctx, rounds, form, begin)
        assert not problems, "\n".join(problems)


def save_two(folder, form):
    """Saves steps 1 and 2; returns what they hold, by step."""
    training = Training()
    states = {}
    for step in (1, 2):
        training.steps(1)
        states[step] = snapshot(training)
        if form == "stock":
            from test_checkpoint_forms import stock_save

            stock_save(training, folder / f"saved/step-00000{step}")
        elif form == "file":
            save_file(training, folder / "saved", step)
        else:
            training.save(folder / "saved", form=form)
    return states


def save_file(training, folder, step):
    """Saves a file as other programs write it, by `torch.save` of full tensors."""
    options = StateDictOptions(full_state_dict=True)
    model, optimizer = get_state_dict(training.model, training.optimizer, options=options)
    parts = {"scheduler": training.schedule.state_dict(), "step": step}
    if dist.get_rank() == 0:
        folder.mkdir(exist_ok=True)
        torch.save({"model": model, "optimizer": optimizer, **parts}, folder / f"step-00000{step}.pt")
    dist.barrier()


def _fresh(ctx, folder, form):
    """Copies the saved checkpoint again. Returns its path and the folder of checkpoints that has it, or None."""
    root = folder / "copy"
    on_first(lambda: (shutil.rmtree(root, ignore_errors=True), shutil.copytree(folder / "saved", root)))
    path = root / (f"{LAST}.pt" if form == "file" else LAST)
    return path, None if form in ("file", "stock") else root
