"""``Recorder``: records the tensors of training steps while it is active, by hooks that every torch program has.

It records module forwards, backward calls, gradient clipping, and optimizer steps. Each outermost forward has its own
random state, made from its step, name, call, and rank. So dropout agrees, even if one side draws numbers elsewhere.
"""

from __future__ import annotations

import functools
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as hooks
from torch.optim import optimizer as optimizers
from torch.utils.weak import WeakTensorKeyDictionary

import fsdp2x
from fsdp2x.compare import trace
from fsdp2x.compare.containers import leaves, mapped
from fsdp2x.compare.engines import AsScript, Patches
from fsdp2x.compare.joining import Source
from fsdp2x.compare.sketch import NUM_VALUES, sketch
from fsdp2x.compare.trace import Event, Key, RankTrace

# Names that wrappers add to the names of parameters, and the wrappers' classes, which are not recorded.
_WRAPPER_NAMES = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
_WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "OptimizedModule", "CheckpointWrapper"}
# What DDP calls in engines.py, and what torch.compile makes.
_WRAPPERS |= {"Module", "GraphModule"}


class StepsDone(BaseException):
    """Ends a script after the steps that were asked for. Not an Exception, so scripts do not catch it."""


class Recorder:
    """Records the steps of one rank inside a `with` block.

    Args:
        engine: how to shard (``engines.py``).
        num_steps: number of optimizer steps after which to raise ``StepsDone``. None: no limit.
        noise_seed: multiplies every module output and its gradient by ``1 + x``, where ``x`` is random and at most the
            dtype's epsilon. The run then shows how rounding errors grow. None: changes nothing.
        keep: keys of tensors to keep completely in the trace.
        rows: whose rows this rank has, if the other side has another number of ranks.
    """

    def __init__(
        self,
        engine: AsScript | None = None,
        *,
        num_steps: int | None = None,
        noise_seed: int | None = None,
        keep: Collection[Key] = (),
        rows: Source | None = None,
    ) -> None:
        self._engine, self._num_steps, self._keep = engine or AsScript(), num_steps, frozenset(keep)
        self._noise_seed, self._rows = noise_seed, rows
        self._kept: dict[Key, list[Tensor]] = {}
        self._events: list[Event] = []
        self._values: list[Tensor] = []
        self._closing = Patches()
        self._names: dict[int, str] = {}  # of modules
        self._roots: list[nn.Module] = []
        self._run = _RunState()
        self._hooked: Any = WeakTensorKeyDictionary()

    def __enter__(self) -> Recorder:
        closing = self._closing
        closing.enter_context(self._engine)
        if self._rows is not None:
            self._rows.step = lambda: self._run.step + self._run.has_stepped
            closing.enter_context(self._rows)
        closing.callback(hooks.register_module_forward_pre_hook(self._before_forward).remove)
        closing.callback(hooks.register_module_forward_hook(self._after_forward).remove)
        closing.callback(optimizers.register_optimizer_step_pre_hook(self._before_step).remove)
        closing.callback(optimizers.register_optimizer_step_post_hook(self._after_step).remove)
        closing.wrap(nn.Module, "__call__", self._wrap_call)
        closing.wrap(torch.autograd, "backward", self._wrap_backward)
        for place in (nn.utils, nn.utils.clip_grad, fsdp2x, fsdp2x.optim):
            closing.wrap(place, "clip_grad_norm_", self._wrap_clipping)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._closing.close()

    def finish(self) -> RankTrace:
        """Returns the trace. Call it once, after the block."""
        values = [one.cpu() for one in self._values]
        stacked = torch.stack(values) if values else torch.empty(0, NUM_VALUES)
        return RankTrace(self._events, stacked, self._kept, self._rows.rows if self._rows else [])

    # ---- recording

    @torch.no_grad()
    def _record(self, phase: str, name: str, tensor: Tensor) -> None:
        key = Key(self._run.step, phase, name, self._run.count(phase, name))
        shape, offset = tuple(tensor.shape), 0
        if isinstance(tensor, DTensor):
            tensor, offset = _local_part(tensor) if key not in self._keep else (tensor.full_tensor(), 0)
        parts = self._rows.cut(key, tensor) if self._rows and phase in trace.PER_RANK else []
        if key in self._keep:
            self._kept[key] = [one.detach().cpu().clone() for one in parts or [tensor]]
        for index, one in enumerate(parts or [tensor]):
            dtype = str(one.dtype).removeprefix("torch.")
            numel, part = one.numel(), index if parts else -1
            self._events.append(Event(key, tuple(one.shape) if parts else shape, dtype, offset, numel, part))
            self._values.append(sketch(one, offset))

    def _record_all(self, phase: str, name: str, value: Any) -> None:
        for path, leaf in leaves(value):
            self._record(phase, name + path, leaf)

    # ---- forward

    def _wrap_call(self, original: Callable) -> Callable:
        """Wraps the call of all modules, because hooks for all modules do not get keyword arguments."""

        @functools.wraps(original)
        def call(module: nn.Module, *args: Any, **options: Any) -> Any:
            run, root = self._run, getattr(module, "_orig_mod", module)
            if _is_transparent(root) or run.stack or run.num_backwards:
                return original(module, *args, **options)
            self._begin_step()
            self._engine.before_root(root)
            name = self._name_root(root)
            self._record_all(trace.INPUT, name, args)
            self._record_all(trace.INPUT, name, options)
            seed = f"{run.step} {name} {run.count('call', name)} {'' if self._rows else _rank()}"
            with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
                torch.manual_seed(zlib.crc32(seed.encode()))
                run.stack = [root]
                try:
                    output = original(module, *args, **options)
                    changed = self._after_forward(root, args, output)  # torch.compile leaves hooks out
                    return output if changed is None else changed
                finally:
                    run.stack = []

        return call

    def _before_forward(self, module: nn.Module, inputs: tuple) -> None:
        if not _is_transparent(module) and not (self._run.stack and self._run.stack[0] is module):
            self._run.stack.append(module)

    def _after_forward(self, module: nn.Module, inputs: tuple, output: Any) -> Any:
        run = self._run
        if _is_transparent(module) or not any(one is module for one in run.stack):
            return None
        while run.stack.pop() is not module:  # modules that raised
            pass
        name = self._name_of(module)
        if self._noise_seed is not None:
            output = mapped(output, lambda one: self._perturbed(one, f"output {name}"))
        self._record_all(trace.RECOMPUTED if run.num_backwards else trace.FORWARD, name, output)
        for path, leaf in leaves(output):
            if leaf.requires_grad:
                leaf.register_hook(functools.partial(self._on_gradient, trace.OUTPUT_GRADIENT, name + path))
        for key, param in module.named_parameters(recurse=False):
            if param.requires_grad and not isinstance(param, DTensor) and param not in self._hooked:
                self._hooked[param] = True
                whole = f"{name}.{key}" if name else key
                param.register_hook(functools.partial(self._on_gradient, trace.LOCAL_GRADIENT, whole))
        return output if self._noise_seed is not None else None

    def _on_gradient(self, phase: str, name: str, gradient: Tensor) -> Tensor | None:
        if torch.compiler.is_compiling() or isinstance(gradient, DTensor):
            return None
        if self._noise_seed is None:
            self._record(phase, name, gradient)
            return None
        perturbed = self._perturbed(gradient, f"{phase} {name}")
        self._record(phase, name, perturbed)
        return perturbed

    def _perturbed(self, value: Tensor, name: str) -> Tensor:
        """Returns the tensor with a random relative error of at most one epsilon in each element."""
        if not value.is_floating_point() or value.is_meta or isinstance(value, DTensor):
            return value
        run = self._run
        seed = zlib.crc32(f"{self._noise_seed} {run.step} {name} {run.count('noise', name)} {_rank()}".encode())
        generator = torch.Generator(value.device).manual_seed(seed)
        random = torch.rand(value.shape, generator=generator, device=value.device, dtype=torch.float32)
        factor = 1 + (2 * random - 1) * torch.finfo(value.dtype).eps
        return (value * factor).to(value.dtype)

    # ---- backward, clipping, and the optimizer

    def _wrap_backward(self, backward: Callable) -> Callable:
        @functools.wraps(backward)
        def call(tensors: Any, *args: Any, **options: Any) -> None:
            run = self._run
            if not run.num_backwards and not run.stack:
                self._begin_step()
                self._record_all(trace.LOSS, "", tensors)
            run.num_backwards += 1
            stack, run.stack = run.stack, []
            try:
                backward(tensors, *args, **options)
            finally:
                run.stack = stack
                run.num_backwards -= 1
            if not run.num_backwards:
                self._engine.after_backward()

        return call

    def _wrap_clipping(self, clip: Callable) -> Callable:
        @functools.wraps(clip)
        def call(parameters: Any, *args: Any, **options: Any) -> Any:
            if self._run.is_clipping:
                return clip(parameters, *args, **options)
            if not self._run.has_clipped:
                self._record_gradients(trace.GRADIENT, [param for _, param in self._named("named_parameters")])
            self._run.is_clipping = self._run.has_clipped = True
            try:
                norm = clip(parameters, *args, **options)
            finally:
                self._run.is_clipping = False
            self._record(trace.NORM, "", norm.full_tensor() if isinstance(norm, DTensor) else norm)
            return norm

        return call

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, options: Any) -> None:
        phase = trace.CLIPPED if self._run.has_clipped else trace.GRADIENT
        self._record_gradients(phase, [param for group in optimizer.param_groups for param in group["params"]])

    def _record_gradients(self, phase: str, params: list[Tensor]) -> None:
        names = {id(param): name for name, param in self._named("named_parameters")}
        for index, param in enumerate(params):
            if param.grad is not None:
                self._record(phase, names.get(id(param), f"(parameter {index} of no module)"), param.grad)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, options: Any) -> None:
        self._run.has_stepped = True
        for name, param in self._named("named_parameters"):
            self._record(trace.WEIGHT, name, param)
        for name, buffer in self._named("named_buffers"):
            self._record(trace.BUFFER, name, buffer)

    def _begin_step(self) -> None:
        """Starts a step with the first forward or backward after optimizer steps."""
        if self._run.has_stepped:
            self._run.next_step()
            if self._run.step == self._num_steps:
                raise StepsDone

    # ---- names

    def _name_root(self, module: nn.Module) -> str:
        if id(module) not in self._names:
            if not any(True for _ in module.parameters()):
                return _class_name(module)
            self._add_root(module)
        return self._names[id(module)]

    def _add_root(self, root: nn.Module) -> None:
        self._roots.append(root)
        self._name_modules()
        for name, param in self._named("named_parameters", [root]):
            self._record(trace.INITIAL, name, param)

    def _name_modules(self) -> None:
        for index, root in enumerate(self._roots, 1):
            prefix = [f"model{index}"] if index > 1 else []
            for name, module in root.named_modules():
                parts = (part for part in name.split(".") if part and part not in _WRAPPER_NAMES)
                self._names.setdefault(id(module), ".".join([*prefix, *parts]))

    def _name_of(self, module: nn.Module) -> str:
        if id(module) not in self._names:  # added since, as adapters are
            self._name_modules()
        return self._names.get(id(module), _class_name(module))

    def _named(self, what: str, roots: list[nn.Module] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yields the parameters or buffers of all models once, with the names that both sides share."""
        seen: set[int] = set()
        for root in self._roots if roots is None else roots:
            for name, tensor in getattr(root, what)():
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    owner, _, own = name.rpartition(".")
                    prefix = self._name_of(root.get_submodule(owner))
                    yield f"{prefix}.{own}" if prefix else own, tensor


class _RunState:
    """Where a rank is in its run."""

    def __init__(self) -> None:
        self.step = self.num_backwards = 0
        self.has_stepped = self.has_clipped = self.is_clipping = False
        self.stack: list[nn.Module] = []  # modules whose forward is running
        self._counts: Counter[tuple[str, str]] = Counter()

    def count(self, phase: str, name: str) -> int:
        """Returns how often the step has had this phase of this name before."""
        self._counts[phase, name] += 1
        return self._counts[phase, name] - 1

    def next_step(self) -> None:
        self.step += 1
        self.has_stepped = self.has_clipped = False
        self._counts.clear()
        self.stack.clear()


def _local_part(tensor: DTensor) -> tuple[Tensor, int]:
    """Returns the part of a tensor on this rank, and the flat index of its first element."""
    (chunk,) = tensor.__create_chunk_list__()
    is_contiguous = tuple(chunk.sizes[1:]) == tuple(tensor.shape[1:])
    if not is_contiguous:
        return tensor.full_tensor(), 0
    return tensor.to_local(), chunk.offsets[0] * tensor.shape[1:].numel() if tensor.dim() else 0


def _is_transparent(module: nn.Module) -> bool:
    return torch.compiler.is_compiling() or _class_name(module) in _WRAPPERS


def _class_name(module: nn.Module) -> str:
    return type(module).__name__.removeprefix("FSDP")


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
