"""Saves that are killed or fail, and bad checkpoints: the last whole one stays, every rank is told."""

import importlib
import os
import signal

import pytest

from harness import dist_run, distributed
from training import MODEL, run, settings, shared_folder, write_text


def make_trainer(config):
    from fsdp2x.train import Trainer, parse_config

    return Trainer(parse_config(config))


def kill(*args, **keywords):
    os.kill(os.getpid(), signal.SIGKILL)


def train_and_die(ctx, config, module, owner, name, victim):
    """Saves after step 1; in the save after step 2 one rank dies when it calls `name`."""
    trainer = make_trainer(config)
    trainer.train_step()
    trainer.save()
    trainer.train_step()
    if ctx.rank == victim:
        target = importlib.import_module(module)
        setattr(getattr(target, owner) if owner else target, name, kill)
    try:
        trainer.save()
    except RuntimeError as error:
        return str(error)
    return "saved"


# Who dies where: in DCP's write, among the small files, before the final name, after the rename.
DEATHS = [
    (1, "fsdp2x.checkpoint.disk", "Sink", "close"),
    (1, "fsdp2x.checkpoint.saving", None, "save_rng"),
    (0, "fsdp2x.checkpoint.saving", None, "write_manifest"),
    (0, "fsdp2x.checkpoint.directory", None, "write_file"),
]


@pytest.mark.parametrize(("victim", "module", "owner", "name"), DEATHS)
def test_a_rank_killed_while_saving_is_named_and_the_last_checkpoint_loads(tmp_path, victim, module, owner, name):
    config = settings(write_text(tmp_path / "text"), tmp_path / "run", train={"steps": 3})
    died = {victim: -signal.SIGKILL}
    outcomes = dist_run(train_and_die, 2, config, module, owner, name, victim, expect_exit=died)
    said = outcomes[1 - victim].value
    assert f"saving checkpoint {tmp_path / 'run/checkpoints/step-000002'}: lost rank {victim} (pid " in said
    assert (tmp_path / "run/checkpoints/latest").read_text() == "step-000001\n"
    # This very process, alone, goes on from there, and cleans up.
    resumed = run({**config, "checkpoint": {"resume_from": str(tmp_path / "run")}})
    assert resumed.step == 3
    left = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    # The last of these deaths comes after the rename: step 2 is whole, though `latest` does not name it.
    assert left == ["latest", "step-000002" if name == "write_file" else "step-000001", "step-000003"]


def refusal(config):
    """What the trainer says when it is asked to resume."""
    from fsdp2x.checkpoint import CheckpointError

    with pytest.raises(CheckpointError) as error:
        make_trainer(config)
    assert "\n" not in str(error.value)
    return str(error.value)


def save_and_resume_config(folder):
    """A run of two steps, its checkpoint, and the config that resumes it."""
    config = settings(folder / "text", folder / "run", train={"steps": 2})
    run(config)
    config["checkpoint"] = {"resume_from": str(folder / "run/checkpoints/step-000002")}
    return config, folder / "run/checkpoints/step-000002"


@distributed
def test_a_checkpoint_of_another_model_is_refused(ctx):
    with shared_folder(ctx) as folder:
        config, _ = save_and_resume_config(folder)
        config["model"] = {"config": {**MODEL, "intermediate_size": 20}}
        assert (
            "of another model, model.layers.0.mlp.gate_proj.weight has shape [24, 16] there, [20, 16] here"
            in refusal(config)
        )
        config["model"] = {"config": {**MODEL, "num_hidden_layers": 3}}
        assert "it lacks model.layers.2." in refusal(config)
