"""Training, interrupted and resumed: bit for bit at the same world size, on the same text at another one."""

import re

import pytest
import torch
import torch.distributed as dist

from fsdp2x.checkpoint import CheckpointError, read_parts, resolve
from fsdp2x.train import Trainer, parse_config
from harness import dist_run, distributed
from reference import full, same
from training import MODEL, Said, losses, run, settings, shared_folder, weights, write_text

MUON = {"name": "muon", "lr": 1e-2, "adamw_lr": 5e-3, "momentum": 0.9, "moments_dtype": "int8"}


@distributed(world_sizes=(1, pytest.param(2, marks=pytest.mark.full), 3))
@pytest.mark.parametrize("optimizer", [{}, MUON], ids=["adamw", "muon"])
def test_resumed_run_equals_the_uninterrupted_one_bit_for_bit(ctx, optimizer):
    with shared_folder(ctx) as folder:
        whole = run(settings(folder / "text", folder / "whole", optimizer=optimizer))
        checkpoint = {"resume_from": str(folder / "whole/checkpoints/step-000003")}
        resumed = run(settings(folder / "text", folder / "resumed", optimizer=optimizer, checkpoint=checkpoint))
        dist.barrier()
        assert list(losses(folder / "whole")) == [1, 2, 3, 4, 5, 6]
        assert losses(folder / "resumed") == {step: losses(folder / "whole")[step] for step in (4, 5, 6)}
        for one, other in zip(weights(whole), weights(resumed), strict=True):
            assert torch.equal(one, other)
        states, expected = (full(one.optimizer.state_dict()["state"]) for one in (resumed, whole))
        for number, state in expected.items():
            same(dict(sorted(states[number].items())), dict(sorted(state.items())), f"state {number}")


def train(ctx, config):
    run(config)


def positions(output):
    parts = read_parts(resolve(output))
    return parts["data"]["position"], parts["scheduler"]["step"]


@pytest.mark.parametrize(("saved_at", "loaded_at"), [(2, 1), (1, 3)])
def test_another_world_size_goes_on_with_the_same_text(tmp_path, saved_at, loaded_at):
    text = write_text(tmp_path / "text")
    # Six blocks a step at any world size, so that the losses agree up to rounding.
    per_rank = {n: {"batch_size": 6 // n, "accumulation": 1} for n in (1, 2, 3)}
    dist_run(train, saved_at, settings(text, tmp_path / "whole", train=per_rank[saved_at]), fresh=False)
    checkpoint = {"resume_from": str(tmp_path / "whole/checkpoints/step-000003")}
    resumes = settings(text, tmp_path / "resumed", train=per_rank[loaded_at], checkpoint=checkpoint)
    dist_run(train, loaded_at, resumes, fresh=False)
    whole, resumed = losses(tmp_path / "whole"), losses(tmp_path / "resumed")
    assert list(resumed) == [4, 5, 6]
    for step in resumed:
        assert float.fromhex(resumed[step]) == pytest.approx(float.fromhex(whole[step]), abs=2e-6)
    assert positions(tmp_path / "resumed") == positions(tmp_path / "whole") == (36, 6)


@distributed
def test_settings_changed_at_resume_win_and_are_told(ctx):
    with shared_folder(ctx) as folder, Said() as said:
        run(settings(folder / "text", folder / "first", train={"steps": 3}))
        checkpoint = {"resume_from": str(folder / "first")}
        second = run(
            settings(folder / "text", folder / "second", optimizer={"weight_decay": 0.5}, checkpoint=checkpoint)
        )
        assert [group["weight_decay"] for group in second.optimizer.param_groups] == [0.5, 0.0]
        changed = (("optimizer.weight_decay", 0.1, 0.5), ("train.steps", 3, 6)) if ctx.rank == 0 else ()
        assert sorted(one for one in said if "of the checkpoint" in one) == [
            f"{key} was {was} in the run of the checkpoint, and is {now}. To restore it set {was}"
            for key, was, now in changed
        ]


# A change of a LoRA run when it resumes -> what the error and the warning say.
OTHER_FUNCTIONS = {
    "alpha": ({"lora": {"alpha": 64.0}}, "lora.alpha was 16.0 in the run of the checkpoint, and is 64.0"),
    "evaluation": ({"lora": {"alpha": 64.0}, "train": {"mode": "evaluate"}}, "lora.alpha was 16.0"),
    "model": ({"model": {"config": {**MODEL, "rms_norm_eps": 0.1}}}, "model.config.rms_norm_eps was 1e-06 .* is 0.1"),
    "packing": ({"data": {"packing": True}}, "data.packing was False in the run of the checkpoint, and is True"),
}


@distributed(world_sizes=(2,))
def test_a_run_of_another_function_is_refused(ctx):
    with shared_folder(ctx) as folder:
        base = settings(folder / "text", folder / "first", train={"accumulation": 1, "steps": 1})
        base["lora"] = {"rank": 2}
        run(base)
        for name, (changes, said) in OTHER_FUNCTIONS.items():
            resumed = {"checkpoint": {"resume_from": str(folder / "first")}, "train": {"steps": 2}}
            resumed["logging"] = {"output": str(folder / name)}
            config = {section: base[section] | resumed.get(section, {}) | changes.get(section, {}) for section in base}
            with pytest.raises(CheckpointError, match=f"{said}.* or checkpoint.accept_changes=true"):
                run(config)
            with Said() as told:
                run({**config, "checkpoint": {**config["checkpoint"], "accept_changes": True}})
            assert [re.search(said, one) is not None for one in told].count(True) == (ctx.rank == 0), told


@distributed
def test_evaluation_is_the_mean_over_all_held_out_tokens(ctx):
    with shared_folder(ctx) as folder:
        trainer = Trainer(parse_config(settings(folder / "text", folder / "run", train={"batch_size": 3})))
        mean = trainer.evaluate()
        rows = trainer.blocks.held_out.to(torch.int64)
        with torch.no_grad():
            expected = trainer.model(input_ids=rows, labels=rows).loss.item()
        trainer.close()
        assert len(rows) % (3 * ctx.world)  # the last batches are uneven
        assert mean == pytest.approx(expected, abs=1e-6)
