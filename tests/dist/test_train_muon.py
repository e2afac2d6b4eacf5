"""A training file with Muon: its matrices, AdamW in 8 bits beside them, and a run that goes on from a checkpoint."""

from harness import distributed
from reference import changes, full, only_fsdp2x, same
from training import losses, run, settings, shared_folder, weights

MUON = {"name": "muon", "lr": 1e-2, "adamw_lr": 5e-3, "momentum": 0.9, "moments_dtype": "int8"}


@distributed(world_sizes=(2,))
def test_runs_and_goes_on(ctx):
    only_fsdp2x(ctx)
    with shared_folder(ctx) as folder:

        def train(name: str, steps: int, resume_from: str | None = None):
            return run(
                settings(
                    folder / "text",
                    folder / name,
                    optimizer=MUON,
                    schedule={"decay_steps": 6},
                    train={"steps": steps, "clip": 1.0},
                    checkpoint={"save_every": 3, "resume_from": resume_from},
                )
            )

        whole, half = train("whole", 6), train("half", 3)
        rest = train("rest", 6, str(half.checkpoints))
        same(weights(rest), weights(whole), "parameters")
        states, resumed = (full(one.optimizer.state_dict()["state"]) for one in (whole, rest))
        for number, state in states.items():
            same(dict(sorted(resumed[number].items())), dict(sorted(state.items())), f"state {number}")
        kept = {name for state in states.values() for name in state}
        assert kept == {"momentum_buffer", "step", "exp_avg", "exp_avg_sq"}
        if ctx.rank == 0:
            found = losses(folder / "whole")
            assert found == {**losses(folder / "half"), **losses(folder / "rest")}
            assert changes(map(float.fromhex, found.values()))
