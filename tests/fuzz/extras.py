"""Operations of a machine between training steps: changes of parameters, gradients, and settings."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from fuzz.observe import SKIPPED, describe, local
from fuzz.parts import give


class Extras:
    """Mixed into `Machine`, whose attributes it uses."""

    def do_deepcopy(self):
        """Copies the model, which FSDP2 and fsdp2x both refuse."""
        copy.deepcopy(self.model)

    def do_collect(self):
        gc.collect()

    def do_apply(self, how="cpu"):
        """Moves that change nothing."""
        if how == "cpu":
            self.model.to("cpu")
        elif how == "float":
            self.model.float()
        else:
            self.model._apply(lambda tensor: tensor)

    def do_write(self, param=0, data=False):
        """Changes a parameter in place, as people clip or decay weights."""
        self.graphs.clear()
        self.reshard_all()
        chosen = self._param(param)
        with torch.no_grad():
            (chosen.data if data else chosen).mul_(0.9)

    def do_foreign_grad(self, param=0):
        """A gradient of the user's own."""
        chosen = self._param(param)
        if not chosen.requires_grad or "unfinished" in self.taint:
            return SKIPPED
        chosen.grad = torch.full_like(chosen.detach(), 0.5, dtype=chosen.grad_dtype)
        return None

    def do_hold(self):
        """Holds the gradients. Nothing may write into them except additions to `.grad` itself."""
        if self.taint & {"grads", "unfinished"}:
            return SKIPPED
        self.held = {name: param.grad for name, param in self.params().items()}
        return None

    def do_input_grad(self, slot=0, retain=False):
        if slot not in self.graphs or not self.graphs[slot][1].requires_grad:
            return SKIPPED
        loss, x = self.graphs[slot]
        if not retain:
            del self.graphs[slot]
        self.before_backward()
        try:
            grads = torch.autograd.grad(loss, [x], retain_graph=retain, allow_unused=True)
            self.after_backward()
        except Exception:
            self.graphs.pop(slot, None)
            self.taint |= {"grads", "stale"}
            raise
        return [local(grad) for grad in grads]

    def before_backward(self) -> None:
        """Marks the values that are unknown from now on."""
        if "stale" in self.taint:
            self.taint.add("grads")
        if self.is_manual:
            self.taint.add("unfinished")

    def after_backward(self) -> None:
        """Marks gradients as finished, as sharded models finish them at the end of each backward."""
        if not self.is_manual:
            self.taint.discard("unfinished")

    def do_set(self, name, value, unit=0, recurse=None):
        """A setter of a unit."""
        self.set(self._unit(unit), name, value, {} if recurse is None else {"recurse": recurse})
        if name == "set_manual_backward_finalization" and self._unit(unit) is self.model:
            self.is_manual = value

    def set(self, module: nn.Module, name: str, value: Any, keywords: dict[str, bool]) -> None:
        raise NotImplementedError

    def do_finalize(self, asynchronous=False):
        """Ends what manual finalization has left open."""
        self.finalize(asynchronous)
        if self.is_manual:
            self.taint.discard("unfinished")

    def finalize(self, asynchronous: bool) -> None:
        raise NotImplementedError

    def do_watch(self, param=0):
        """A hook on a parameter that runs when its gradient is there."""
        names = list(self.params())
        name = names[param % len(names)]
        if name not in self.watched:
            self.watched.add(name)
            self.watch(name)

    def watch(self, name: str) -> None:
        param = self.params()[name]
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(lambda param: self.note_accumulated(name, local(param.grad)))

    def note_accumulated(self, name: str, grad: torch.Tensor) -> None:
        self.stage.fail(self.names.index(name), "accumulated")
        self.stage.log.append((f"accumulated {name}", [] if "grads" in self.taint else [grad]))

    def do_save_optimizer(self):
        if self.optimizer is None:
            return SKIPPED
        self.saved_optimizer = copy.deepcopy(self.optimizer.state_dict())
        return None

    def do_load_optimizer(self):
        if self.optimizer is None or self.saved_optimizer is None:
            return SKIPPED
        self.optimizer.load_state_dict(copy.deepcopy(self.saved_optimizer))
        return None

    def do_torch_save(self):
        """Through a file, as people save what they have."""
        file = io.BytesIO()
        torch.save(self.model.state_dict(), file)
        file.seek(0)
        return {key: local(value) for key, value in torch.load(file, weights_only=False).items()}

    def do_dcp_state(self, full=False):
        """State dicts as torch's checkpointing takes them."""
        options = StateDictOptions(full_state_dict=full, cpu_offload=full)
        return {key: local(value) for key, value in get_model_state_dict(self.model, options=options).items()}

    def do_full(self):
        """Whole parameters, at any time between steps."""
        return self.full()

    def full(self) -> dict[str, torch.Tensor]:
        return {name: param.detach().clone() for name, param in self.params().items()}

    def do_report(self):
        """Reports change nothing."""

    def do_generate(self, batch=0):
        """Forward with all units gathered at once."""
        with self.generation(), torch.no_grad():
            x = self.inputs(batch)
            return describe(self.model(give(self.model.part.takes, x), flag=batch % 3 != 0), x)

    def generation(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def do_accumulate(self, slot=0, before_last="nothing"):
        """A backward of a micro-batch that is not the last."""
        with self.accumulation(before_last):
            return self.do_backward((slot,))

    def accumulation(self, before_last: str) -> contextlib.AbstractContextManager:
        raise NotImplementedError

    # --- what only FSDP modules have ---

    def do_reset(self):
        raise NotImplementedError

    def do_unshard(self, unit=0, asynchronous=False):
        return None if self.initialized else SKIPPED

    def do_reshard(self, unit=0):
        return None

    def do_register(self, part=-1):
        self.registered.add(self._unit(part).number)

    def do_prefetch(self, which="forward", unit=0, targets=()):
        return None

    def do_hook(self, unit=0, factor=0.5):
        """An all-reduce hook."""

    def _param(self, number: int) -> nn.Parameter:
        params = list(self.params().values())
        return params[number % len(params)]
