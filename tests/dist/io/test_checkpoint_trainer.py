"""The trainer saves in the background, in other forms, keeps milestones; LoRA and a scaler go through `save`."""

import pytest
import torch
import torch.distributed as dist

from checkpoints import shared_folder as empty_folder
from harness import distributed
from training import losses, run, settings, shared_folder


@distributed
@pytest.mark.parametrize("form", ["sharded", "full", "per_rank"])
def test_a_run_that_saves_in_the_background_resumes_bit_for_bit(ctx, form):
    with shared_folder(ctx) as folder:
        section = {"save_every": 1, "keep": 1, "keep_every": 3, "async_save": True, "form": form}
        run(settings(folder / "text", folder / "whole", checkpoint=section))
        # Of those that nothing protects one is kept: the last one.
        names = sorted(path.name for path in (folder / "whole/checkpoints").iterdir())
        assert names == ["latest", "step-000003", "step-000005", "step-000006"]
        checkpoint = {"resume_from": str(folder / "whole/checkpoints/step-000003"), "save_every": 0}
        run(settings(folder / "text", folder / "resumed", checkpoint=checkpoint))
        dist.barrier()
        assert losses(folder / "resumed") == {step: losses(folder / "whole")[step] for step in (4, 5, 6)}


@distributed(world_sizes=(1, 2))
def test_lora_with_frozen_weights_and_a_scaler(ctx):
    import fsdp2x
    from models import batch, tiny_lora

    def make():
        model = fsdp2x.fully_shard(tiny_lora("qwen3"))
        optimizer = fsdp2x.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        return model, optimizer, torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)

    def step(model, optimizer, scaler, number):
        loss = model(**batch("qwen3", 10 * number + ctx.rank)).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return float(loss)

    with empty_folder() as folder:
        model, optimizer, scaler = make()
        for number in range(3):
            step(model, optimizer, scaler, number)
        for form in ("sharded", "full", "per_rank"):
            fsdp2x.checkpoint.save(folder / form, model, optimizer, step=3, scaler=scaler, form=form)
        expected = [step(model, optimizer, scaler, number) for number in range(3, 6)]
        for form in ("sharded", "full", "per_rank"):
            model, optimizer, scaler = make()
            fsdp2x.checkpoint.load(folder / form, model, optimizer, scaler=scaler)
            assert scaler.get_scale() == 16.0
            assert sum(bool(state) for state in optimizer.state.values()) == 8
            assert [step(model, optimizer, scaler, number) for number in range(3, 6)] == expected, form
