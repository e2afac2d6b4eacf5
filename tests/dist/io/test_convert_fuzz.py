"""Conversions of files that lie: a sentence and no output at all, or the output that the undamaged files give."""

import pickle
import random
import shutil
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

import damage
import fsdp2x
from fsdp2x.base.failures import CheckpointError
from fsdp2x.convert import dcp_to_hf, export_checkpoint, hf_to_dcp, ranks_to_hf
from fsdp2x.io.hf.empty import plain_config
from harness import dist_run
from models import build

# The first seeds, and seeds that have found bugs.
ROUNDS = [
    pytest.param((*range(20), 49, 163), id="20"),
    pytest.param(range(20, 320), id="20-320", marks=pytest.mark.full),
]


def doubled():
    model = build("llama")
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)
    return model


def save(ctx, folder):
    """Saves the doubled model as a DCP directory, as a file per rank, and as an fsdp2x checkpoint with its config."""
    model = fsdp2x.fully_shard(doubled())
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "dcp")
    (folder / "ranks" / "5").mkdir(parents=True, exist_ok=True)
    state = {name: _own_memory(tensor) for name, tensor in model.state_dict().items()}
    torch.save(state, folder / "ranks" / "5" / f"model_world_size_{ctx.world}_rank_{ctx.rank}.pt")
    fsdp2x.checkpoint.save(folder / "ours", model, step=1, write_assets=plain_config(model).save_pretrained)


def _own_memory(tensor):
    local = tensor.to_local().clone()
    return DTensor.from_local(local, tensor.device_mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    dist_run(save, 2, folder, fresh=False)
    build("llama").save_pretrained(folder / "origin", max_shard_size="6KB")
    return folder


def convert(kind, folder, out):
    if kind in ("dcp", "origin"):
        return dcp_to_hf(folder / "dcp", out, folder / "origin")
    if kind == "ranks":
        return ranks_to_hf(folder / "origin", folder / "ranks", out, 5)
    if kind == "ours":
        return export_checkpoint(folder / "ours", out)
    return hf_to_dcp(folder / "origin", out)


def read(kind, out):
    if kind == "back":
        state = {f"model.{name}": torch.zeros_like(value) for name, value in build("llama").state_dict().items()}
        dcp.load(state, checkpoint_id=out, no_dist=True)
        return {name.removeprefix("model."): value for name, value in state.items()}
    return {name: value for file in out.glob("*.safetensors") for name, value in load_file(file).items()}


def hurt(rng, kind, folder):
    """One change of one file that the conversion reads."""
    where = {"dcp": "dcp", "ranks": "ranks/5", "ours": "ours/step-000001"}.get(kind, "origin")
    files = sorted(file for file in (folder / where).iterdir() if file.is_file())
    file = rng.choice(files)
    if rng.random() < 0.2:
        change = damage.change_file(rng, file, files)
    elif file.suffix == ".json":
        change = damage.change_json(rng, file)
        change.touched = ("",) if file.name == "config.json" else ()
    elif file.suffix == ".pt":
        content, change = rng.choice([damage.change_zip, damage.change_pickled])(rng, file.read_bytes())
        file.write_bytes(content)
    elif file.suffix == ".safetensors":
        change = damage.change_header(rng, file)
    elif file.name == ".metadata":
        table, change = damage.change(rng, pickle.loads(file.read_bytes()))
        try:
            file.write_bytes(pickle.dumps(table))
        except (RecursionError, AttributeError, TypeError, RuntimeError):
            file.write_bytes(b"")
        change.touched = ()
    else:
        content, change = damage.change_zip(rng, file.read_bytes())
        file.write_bytes(content)
        change.touched = ()
    change.what = f"{file.name}: {change.what}"
    if kind == "ours":
        damage.fit(folder / where)
    return change


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("kind", ["dcp", "origin", "ranks", "ours", "back"])
@pytest.mark.timeout(900)
def test_damage_gives_a_sentence_or_the_same_output(saved, tmp_path, kind, rounds):
    warnings.simplefilter("ignore")
    damage.Evil.path = str(tmp_path / "executed")
    whole = read(kind, convert(kind, saved, tmp_path / "whole"))
    problems = []
    for number in rounds:
        rng = random.Random(f"{kind} {number}")
        folder, out = tmp_path / "copy", tmp_path / "out"
        for path in (folder, out):
            shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(saved, folder)
        change = hurt(rng, kind, folder)
        what = f"round {number}: {change.what}"
        print(what, flush=True)
        try:
            found = read(kind, convert(kind, folder, out))
        except CheckpointError as error:
            left = sorted(path.name for path in tmp_path.iterdir() if path.name not in ("copy", "whole"))
            problems += [f"{what}: {left} are left after {error}"] if left else []
            problems += [f"{what}: {error!r} from {error.__cause__!r}"] if error.__cause__ is not None else []
            continue
        except Exception as error:
            problems.append(f"{what}: {error!r}")
            continue
        odd = [name for name in whole if name not in found or not torch.equal(found[name], whole[name])]
        if "" not in change.touched:
            odd = [name for name in odd if not any(f"{one}.".startswith(f"{name}.") for one in change.touched)]
            problems += [f"{what}: {odd[:5]} are others"] if odd or found.keys() != whole.keys() else []
    assert not problems, "\n".join(problems)
