"""HuggingFace folders whose files lie: refused by all ranks alike, or loaded as the files say; never half of it."""

import json
import shutil
import warnings

import pytest
import torch
from torch import nn

import damage
import fsdp2x
from checkpoints import on_first, shared_folder
from fsdp2x.checkpoint import CheckpointError
from harness import distributed
from models import build, tiny_lora

FORMS = ("safetensors", "indexed", "bin", "indexed_bin", "experts", "adapter")
# The first seeds, and seeds that have found bugs.
ROUNDS = [pytest.param((*range(10), 295), id="10")]
ROUNDS += [
    pytest.param(range(a, b), id=f"{a}-{b}", marks=pytest.mark.full) for a, b in ((10, 120), (120, 220), (220, 320))
]


def write(folder, form):
    """A small model in one of the forms."""
    if form == "adapter":
        model = tiny_lora()
        for name, param in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(param)
        model.save_pretrained(folder)
        return
    model = build("qwen3_moe" if form == "experts" else "llama")
    if "bin" not in form:
        model.save_pretrained(folder, max_shard_size="6KB" if form == "indexed" else "5GB")
        return
    model.config.save_pretrained(folder)
    state = model.state_dict()
    if form == "bin":
        torch.save(state, folder / "pytorch_model.bin")
        return
    files = {name: f"{'ab'[number % 2]}.bin" for number, name in enumerate(state)}
    for file in ("a.bin", "b.bin"):
        torch.save({name: value for name, value in state.items() if files[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))


def hurt(rng, folder):
    files = sorted(file for file in folder.iterdir() if file.suffix in (".json", ".safetensors", ".bin"))
    file = rng.choice(files)
    if rng.random() < 0.15:
        return damage.change_file(rng, file, files)
    if file.suffix == ".json":
        change = damage.change_json(rng, file)
        change.touched = ("",) if file.name in ("config.json", "adapter_config.json") else ()
        return change
    if file.suffix == ".bin":
        return damage.change_archive(rng, file, _lie)
    if rng.random() < 0.1:
        content = file.read_bytes()
        size = int.from_bytes(content[:8], "little")
        file.write_bytes(rng.choice([0, 1, size - 1, size + 1, 2**40, 2**64 - 1]).to_bytes(8, "little") + content[8:])
        return damage.Change(f"{file.name}: another size of the header")
    change = damage.change_header(rng, file)
    names = tuple(one.removesuffix(".data_offsets") for one in change.touched)
    return damage.Change(f"{file.name}: {change.what}", names)


def _lie(rng, tree):
    tensors = {name: value.contiguous() for name, value in tree.items()}
    return damage.lying(rng, tensors, lambda stored: {**tree, **stored})


class Subject:
    """A sharded model that has weights, and is loaded into."""

    def __init__(self, form):
        self.form = form
        torch.manual_seed(1)
        model = tiny_lora() if form == "adapter" else build("qwen3_moe" if form == "experts" else "llama")
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1.5)
        self.model = fsdp2x.fully_shard(model)
        self.kept = _locals(self.model)

    def judge(self, folder, mode, original, change):
        """Loads a damaged folder and returns what goes wrong, if anything. Restores the model."""
        error = None
        try:
            if self.form == "adapter":
                fsdp2x.load_adapter(self.model, folder)
            else:
                fsdp2x.load_hf(self.model, folder, mode=mode, progress=False)
        except Exception as refusal:
            error = refusal
        after = _locals(self.model)
        self.restore()
        if wrong := damage.unlike(error, CheckpointError, ValueError):
            return wrong
        if error is not None:
            changed = [name for name in after if not _same(after[name], self.kept[name])]
            return f"partly loaded, {changed[:5]}: {error}" if changed else None
        return _differ(after, original, change)

    @torch.no_grad()
    def restore(self):
        for param, kept in zip(self.model.parameters(), self.kept.values(), strict=True):
            (param.to_local() if hasattr(param, "to_local") else param).copy_(kept)


def judge_made(folder, mode, whole, change):
    """The same for a model that is made from the folder."""
    error = model = None
    try:
        model = fsdp2x.from_pretrained(folder, mode=mode, progress=False)
    except Exception as refusal:
        error = refusal
    if (wrong := damage.unlike(error, CheckpointError, ValueError)) or error is not None:
        return wrong
    found = dict(fsdp2x.full_tensors(model))
    return _differ({name: value for name, value in found.items() if name in whole}, whole, change)


def _differ(found, expected, change):
    odd = [name for name, value in found.items() if not _same(value, expected[name]) and not _explained(name, change)]
    return f"{odd[:5]} are not what was saved" if odd else None


def _explained(name, change):
    name = name.replace(".default.", ".")
    return any(one == "" or f"{name}.".startswith(f"{one}.") for one in change.touched)


def _same(one, other):
    return one.shape == other.shape and torch.equal(one, other)


def _locals(model):
    return {
        name: (param.to_local() if hasattr(param, "to_local") else param).detach().clone()
        for name, param in model.named_parameters()
    }


@distributed(timeout=280)
@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("form", FORMS)
def test_damage_is_refused_or_loaded_as_the_files_say(ctx, form, rounds):
    import logging

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with shared_folder() as folder:
        damage.Evil.path = str(folder / "executed")
        (saved := folder / "saved").mkdir(exist_ok=True)
        on_first(lambda: write(saved, form))
        subject = Subject(form)
        if form == "adapter":
            fsdp2x.load_adapter(subject.model, saved)
        else:
            fsdp2x.load_hf(subject.model, saved, progress=False)
        original, whole = _locals(subject.model), dict(fsdp2x.full_tensors(subject.model))
        subject.restore()

        def begin(rng):
            made, mode = rng.random() < 0.4 and form != "adapter", rng.choice(["each", "broadcast"])
            copy = folder / "copy"
            on_first(lambda: (shutil.rmtree(copy, ignore_errors=True), shutil.copytree(saved, copy)))
            judge = judge_made if made else subject.judge
            name = f"{'made' if made else 'loaded'} in mode {mode}"
            return (
                name,
                lambda rng: hurt(rng, copy),
                lambda change: judge(copy, mode, whole if made else original, change),
            )

        problems = damage.problems_in(ctx, rounds, form, begin)
        logging.disable(logging.NOTSET)
        assert not problems, "\n".join(problems)
