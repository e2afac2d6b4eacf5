"""Decides which modules of a model form a unit. Reads the model, changes nothing, and needs no engine.

The first source that names modules gives the candidates, separately for each HuggingFace model inside the model:

1. ``_fsdp_plan`` of the model and ``base_model_fsdp_plan`` of its config (transformers 5). ``"model.layers.*"`` maps to
   ``free_full_weight`` (resharded after forward) or ``keep_full_weight`` (kept). A tuple of paths is one unit.
   In many models an inherited default plan matches nothing, or only the embedding. So the next source adds to it.
2. ``_no_split_modules`` (list, set or None) adds every instance of these classes outside of the plan's modules. A
   match inside another match becomes a separate unit and the outer one keeps the rest, as in accelerate. Names of
   classes that do not occur are ignored, because models inherit such lists.
   With ``auto_wrap=True``, the attribute also counts on models of other libraries.
3. Repeated blocks, if 1 and 2 found none: children of one class in a ModuleList, ModuleDict or Sequential.
   The outermost run wins. Runs of comparatively tiny blocks stay with their parent.

In a HuggingFace model the input embedding is also a unit. Final norm and head form one unit that is kept after forward,
because it ends the forward and starts the backward. If embedding and head are tied, all three form one unit, gathered
from the first use to the last. The rest belongs to the root, which the caller shards last.

Only one unit may gather a parameter. A parameter may have several owners (tied weights), or an owner may be reachable
through several units (a shared module). Then the owners' units are joined:

* an owner that is a module of a unit brings the whole unit (embedding and head);
* a leaf owner inside a larger unit moves into the joined unit (a Linear that blocks share);
* any other owner inside a unit brings the whole unit (a block that registers a parameter itself);
* an owner outside of all units joins alone, unless it is the root, a container, or holds other units. In that case
  the units are dissolved, and their parameters belong to the root.

The root is gathered from the start of forward to the end of backward, so dissolving is always correct.
"""

import difflib
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

AutoWrap = bool | str | type[nn.Module] | Collection[str | type[nn.Module]] | Callable[[str, nn.Module], bool] | None

logger = logging.getLogger("fsdp2x")

# A run of repeated blocks counts if its mean block has at least this fraction of the largest run's mean block.
_MIN_RELATIVE_BLOCK = 0.05
# Their parent reads the weight directly and never calls them, so hooks on them would not run.
_NEVER_CALLED = ("NonDynamicallyQuantizableLinear",)
# Levels that activation checkpointing and torch.compile insert into paths.
WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod")
_LEVELS = re.compile(rf"(?:{'|'.join(WRAPPERS)})\.")


def clean_name(name: str) -> str:
    """Returns a FQN without the levels that wrappers insert."""
    return _LEVELS.sub("", name)


def unsharded_class(module: nn.Module) -> type:
    """Returns the module's class before ``fully_shard`` replaced it by a subclass."""
    return next(cls for cls in type(module).__mro__ if not issubclass(cls, FSDPModule))


@dataclass(frozen=True)
class UnitPlan:
    """One call of ``fully_shard``: the modules to shard together, none inside another.

    ``names`` are their paths from the model, in the same order. ``reshard_after_forward`` None means the caller's
    argument. ``reason`` is one sentence for reports. ``unshard_in_backward``: see ``FSDPModule``.
    """

    modules: tuple[nn.Module, ...]
    names: tuple[str, ...]
    reshard_after_forward: bool | None
    reason: str
    unshard_in_backward: bool = True


def has_forward(module: nn.Module) -> bool:
    """Returns whether the module can be called, so that hooks on it run (ModuleList and ModuleDict cannot)."""
    return type(module).forward is not nn.Module.forward


def should_auto_wrap(model: nn.Module, auto_wrap: AutoWrap) -> bool:
    """Returns whether ``fully_shard(model)`` makes units of submodules. None: only for unsharded HuggingFace models."""
    if isinstance(auto_wrap, bool):
        return auto_wrap
    if auto_wrap is not None:
        return True
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return False
    if _wraps_huggingface(model):
        return True
    if getattr(model, "_no_split_modules", None):
        logger.warning(
            "fsdp2x: %s has _no_split_modules, but is not a HuggingFace model, so all of it becomes one unit. Pass "
            "auto_wrap=True to make units of these modules, or auto_wrap=False to keep one unit.",
            type(model).__name__,
        )
    return False


def plan_units(
    model: nn.Module, auto_wrap: AutoWrap = True, *, ignored_params: Collection[nn.Parameter] = ()
) -> list[UnitPlan]:
    """Returns the units below ``model`` without the root, in sharding order (inner before outer).

    Args:
        model: the model to split.
        auto_wrap: True or None take the sources of this module's docstring. Class names or classes replace them;
            embedding and head of a HuggingFace model stay units. A predicate ``(path, module) -> bool`` selects exactly
            its modules, plus what their ties need. False makes no units.
        ignored_params: parameters that no unit shards.

    Raises:
        ValueError: a class does not occur, or the predicate selects nothing or a container without forward.
        TypeError: ``auto_wrap`` has another type.
    """
    if auto_wrap is False:
        return []
    tree = _Tree(model, ignored_params)
    if auto_wrap is None or auto_wrap is True:
        units = _from_sources(tree) + _embedding_and_head(tree)
        if not units:
            logger.warning("fsdp2x: no repeated blocks in %s: the whole model is one unit", type(model).__name__)
    elif isinstance(auto_wrap, (str, type)) or not callable(auto_wrap):
        units = _of_classes(tree, _checked_classes(tree, auto_wrap), "class {}") + _embedding_and_head(tree)
    else:
        units = _of_predicate(tree, auto_wrap)
    units = join_ties(model, _without_repeats(units), set(map(id, ignored_params)))
    return sort_bottom_up(model, units)


class _Tree:
    """The model's modules by path, and which of them can still be sharded."""

    def __init__(self, model: nn.Module, ignored_params: Collection[nn.Parameter]):
        self.model = model
        self.ignored = set(map(id, ignored_params))
        self.modules = dict(model.named_modules())
        self.names = {module: name for name, module in self.modules.items()}
        # Matching looks through wrappers: "layers.0._checkpoint_wrapped_module" is the inner module of "layers.0".
        self.inner = {m for module in self.modules.values() if (m := unwrap(module)) is not module}

    def free_params(self, module: nn.Module) -> list[nn.Parameter]:
        return [p for p in module.parameters() if id(p) not in self.ignored and not isinstance(p, DTensor)]

    def can_be_unit(self, module: nn.Module | None) -> TypeGuard[nn.Module]:
        """Returns whether it is in the model, is not the root or sharded yet, and has parameters left to shard."""
        if module is None or module is self.model or module not in self.names:
            return False
        return not isinstance(module, FSDPModule) and bool(self.free_params(module))

    def candidates(self, scope: str = "") -> Iterable[tuple[str, nn.Module]]:
        """Yields modules strictly below ``scope`` that may become units, in registration order."""
        prefix = scope + "." if scope else ""
        for name, module in self.modules.items():
            if name.startswith(prefix) and name != scope and module not in self.inner and self.can_be_unit(module):
                yield name, module

    def unit(self, modules: Sequence[nn.Module], reshard: bool | None, reason: str) -> UnitPlan:
        return UnitPlan(tuple(modules), tuple(self.names[m] for m in modules), reshard, reason)


def unwrap(module: nn.Module) -> nn.Module:
    """Returns the module below wrappers, which gives the class. The wrapper is the unit."""
    for attribute in WRAPPERS * 2:
        inner = module._modules.get(attribute)
        module = module if inner is None else inner
    return module


# ---- HuggingFace models, recognized by their attributes: transformers is never imported


def _is_huggingface(module: nn.Module) -> bool:
    cls = type(module)
    return hasattr(cls, "_no_split_modules") and hasattr(cls, "base_model_prefix") and hasattr(module, "config")


def _wraps_huggingface(model: nn.Module) -> bool:
    """Returns whether the model is a HuggingFace model or wraps one (PEFT, torch.compile)."""
    model = unwrap(model)
    if _is_huggingface(model):
        return True
    return hasattr(model, "peft_config") and any(_is_huggingface(module) for module in model.modules())


def _base_of(model: Any) -> nn.Module | None:
    """Returns the model without its head, if it has a separate one."""
    base = getattr(model, model.base_model_prefix, None) if model.base_model_prefix else None
    return base if isinstance(base, nn.Module) else None


def _scopes(tree: _Tree) -> list[str]:
    """Returns the paths of the outermost HuggingFace models."""
    found: list[str] = []
    for name, module in tree.modules.items():
        if _is_huggingface(module) and not any(_is_below(name, outer) for outer in found):
            found.append(name)
    return found


# Levels that PEFT inserts into the path of a module that it adapts or trains.
_PEFT_LEVELS = re.compile(r"\.(?:base_layer|original_module|modules_to_save\.\w+)(?=\.)")


def kept_in_float32(model: nn.Module, dtype: torch.dtype) -> list[nn.Parameter]:
    """Returns the parameters that transformers keeps in float32 in a model of ``dtype``.

    A model's class names them in ``_keep_in_fp32_modules_strict``, and for float16 also in ``_keep_in_fp32_modules``.
    """
    kept: list[nn.Parameter] = []
    tree = _Tree(model, ())
    for inner in map(tree.modules.__getitem__, _scopes(tree)):
        plan = getattr(inner, "_get_dtype_plan", lambda _: ())(dtype)
        pattern = re.compile("|".join(f"(?:{key.replace('*', '.*')})" for key in plan))
        named = inner.named_parameters() if plan else ()
        kept += [param for name, param in named if pattern.search(_PEFT_LEVELS.sub("", clean_name(name)))]
    return kept


def float32_ids(model: nn.Module, policy: MixedPrecisionPolicy) -> set[int]:
    """Returns ids of the parameters that stay in float32 under ``policy``, unless it chooses for each parameter."""
    if policy.param_dtype is None or getattr(policy, "param_dtype_override_fn", None) is not None:
        return set()
    return {id(param) for param in kept_in_float32(model, policy.param_dtype) if param.dtype == torch.float32}


def _is_below(name: str, outer: str) -> bool:
    return name != outer and (not outer or name.startswith(outer + "."))


# ---- the sources


def _from_sources(tree: _Tree) -> list[UnitPlan]:
    units: list[UnitPlan] = []
    scopes = _scopes(tree)
    for scope in scopes:
        planned = _of_fsdp_plan(tree, scope)
        covered = [name for unit in planned for name in unit.names]
        classes = set(getattr(tree.modules[scope], "_no_split_modules", None) or ())
        unsplit = [
            unit
            for unit in _of_classes(tree, _classes_named(tree, classes), "_no_split_modules: {}", scope)
            if not _is_in(unit.names[0], covered)
        ]
        found = planned + unsplit
        has_blocks = bool(unsplit) or any(part.isdigit() for name in covered for part in name.split("."))
        units += found if has_blocks else found + _repeated_blocks(tree, scope)
    if "" not in scopes:
        named = _classes_named(tree, set(getattr(tree.model, "_no_split_modules", None) or ()))
        own = [u for u in _of_classes(tree, named, "_no_split_modules: {}") if not _is_in(u.names[0], scopes)]
        units += own or _repeated_blocks(tree, "", exclude=scopes)
    return units


def _is_in(name: str, scopes: list[str]) -> bool:
    return any(name == scope or _is_below(name, scope) for scope in scopes)


def _of_fsdp_plan(tree: _Tree, scope: str) -> list[UnitPlan]:
    model: Any = tree.modules[scope]
    plan = dict(getattr(model, "_fsdp_plan", None) or {})
    prefix = f"{model.base_model_prefix}." if _base_of(model) is not None else ""
    for paths, style in (getattr(model.config, "base_model_fsdp_plan", None) or {}).items():
        key = tuple(prefix + path for path in paths) if isinstance(paths, tuple) else prefix + paths
        plan.setdefault(key, style)
    kept = [paths for paths, style in plan.items() if style == "keep_full_weight"]
    for paths, style in plan.items():
        if style not in ("free_full_weight", "keep_full_weight"):
            raise ValueError(
                f"_fsdp_plan of {type(model).__name__}: {paths!r} has the style {style!r}, expected "
                "'free_full_weight' or 'keep_full_weight'. Correct the plan or pass auto_wrap=[class names]."
            )
    start = len(scope) + 1 if scope else 0
    units, grouped = [], {}
    for name, module in tree.candidates(scope):
        path = clean_name(name[start:])
        generic = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", "." + path)[1:]
        for paths in plan:
            if isinstance(paths, tuple) and {path, generic} & set(paths):
                grouped.setdefault(paths, []).append(module)
            elif not isinstance(paths, tuple) and paths in (path, generic):
                units.append(tree.unit([module], False if paths in kept else None, f"_fsdp_plan: {paths}"))
                break
    for paths, modules in grouped.items():
        units.append(tree.unit(modules, False if paths in kept else None, f"_fsdp_plan: {', '.join(paths)}"))
    return units


def _classes_named(tree: _Tree, names: Collection[str]) -> tuple[type, ...]:
    """Returns the classes of the model's modules with one of these names (before sharding renamed them)."""
    classes = [cls for module in tree.modules.values() for cls in type(module).__mro__ if cls.__name__ in names]
    return tuple(dict.fromkeys(classes))


def _of_classes(tree: _Tree, classes: tuple[type, ...], reason: str, scope: str = "") -> list[UnitPlan]:
    units = []
    for _, module in tree.candidates(scope):
        cls = next((cls for cls in classes if isinstance(unwrap(module), cls)), None)
        if cls is not None:
            units.append(tree.unit([module], None, reason.format(cls.__name__)))
    return units


def _checked_classes(tree: _Tree, policy: Collection[str | type] | str | type) -> tuple[type, ...]:
    if isinstance(policy, (str, type)):
        policy = [policy]
    if isinstance(policy, Collection) and not policy:
        raise ValueError(
            f"auto_wrap={policy!r} names no class, so all of {type(tree.model).__name__} would be one unit. Pass "
            "auto_wrap=False for one unit, or omit auto_wrap for the model's default units."
        )
    if not isinstance(policy, Collection) or not all(isinstance(item, (str, type)) for item in policy):
        raise TypeError(
            "auto_wrap must be None, a bool, class names or classes, or a predicate (path, module) -> bool, "
            f"got {policy!r}"
        )
    present = sorted({type(module).__name__ for module in tree.modules.values()})
    classes: list[type] = []
    for item in policy:
        if isinstance(item, type):
            found = (item,) if any(isinstance(module, item) for module in tree.modules.values()) else ()
        else:
            found = _classes_named(tree, [item])
        if not found:
            wanted = item if isinstance(item, str) else item.__name__
            near = difflib.get_close_matches(wanted, present, n=3)
            hint = f"; did you mean {' or '.join(near)}?" if near else "."
            raise ValueError(
                f"auto_wrap: no module of class {wanted} in {type(tree.model).__name__}{hint} "
                f"The model has: {', '.join(present)}"
            )
        classes += found
    return tuple(dict.fromkeys(classes))


def _of_predicate(tree: _Tree, predicate: Callable[[str, nn.Module], bool]) -> list[UnitPlan]:
    selected = [(name, module) for name, module in tree.candidates() if predicate(name, module)]
    if not selected:
        raise ValueError(
            f"auto_wrap: the predicate selected no module of {type(tree.model).__name__} that can be sharded. "
            "Pass auto_wrap=False to shard the model as one unit."
        )
    for name, module in selected:
        if not has_forward(module):
            raise ValueError(
                f"auto_wrap: the predicate selected {name}, a {type(module).__name__} without forward, whose hooks "
                "would never run. Select its children instead."
            )
    return [tree.unit([module], None, "predicate") for _, module in selected]


def _repeated_blocks(tree: _Tree, scope: str, exclude: Sequence[str] = ()) -> list[UnitPlan]:
    runs: list[tuple[str, list[nn.Module]]] = []

    def visit(name: str, module: nn.Module) -> None:
        if name in exclude or isinstance(module, FSDPModule):
            return
        by_class: dict[type, list[nn.Module]] = {}
        if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            for child in module.children():
                if tree.can_be_unit(child) and has_forward(child):
                    by_class.setdefault(type(unwrap(child)), []).append(child)
        blocks = [run for run in by_class.values() if len(run) > 1]
        runs.extend((name, run) for run in blocks)
        taken = {block for run in blocks for block in run}
        for child_name, child in module.named_children():
            if child not in taken:
                visit(f"{name}.{child_name}" if name else child_name, child)

    visit(scope, tree.modules[scope])
    mean = [sum(p.numel() for block in run for p in tree.free_params(block)) / len(run) for _, run in runs]
    units = []
    for (name, run), numel in zip(runs, mean, strict=True):
        if numel >= _MIN_RELATIVE_BLOCK * max(mean):
            reason = f"repeated block: {len(run)} x {type(unwrap(run[0])).__name__} in {name or 'the model'}"
            units += [tree.unit([block], None, reason) for block in run if tree.names[block] not in exclude]
    return units


# ---- embedding and head


def writes_in_forward(module: nn.Module) -> bool:
    """Returns whether a forward of the module writes to its parameters, as an embedding with ``max_norm`` does."""
    return getattr(module, "max_norm", None) is not None


def only_looks_up(module: nn.Module) -> bool:
    """Returns whether the module only looks rows up, so that its backward reads no parameter."""
    cls = unsharded_class(module)
    scales = cls.__module__.startswith("transformers.") and cls.__name__.endswith("ScaledWordEmbedding")
    return (cls is nn.Embedding or scales) and not writes_in_forward(module)


def _embedding_and_head(tree: _Tree) -> list[UnitPlan]:
    units = []
    for scope in _scopes(tree):
        model = tree.modules[scope]
        embedding, head = _call(model, "get_input_embeddings"), _call(model, "get_output_embeddings")
        weight = getattr(embedding, "weight", None)
        tied = weight is not None and weight is getattr(head, "weight", None)
        norm = _final_norm(model)
        tail = [m for m in ((norm, embedding, head) if tied else (norm, head)) if tree.can_be_unit(m)]
        if not tied and tree.can_be_unit(embedding):
            unit = tree.unit([embedding], None, "input embedding")
            units.append(replace(unit, unshard_in_backward=not only_looks_up(embedding)))
        if tail:
            parts = [
                label for m, label in ((norm, "final norm"), (embedding, "embedding"), (head, "head")) if m in tail
            ]
            reason = " + ".join(parts) + (" (tied), kept until backward" if tied else ", kept until backward")
            units.append(tree.unit(tail, False, reason))
    return units


def _call(model: nn.Module, method: str) -> nn.Module | None:
    """Calls an accessor of transformers. Models without text raise NotImplementedError there, which gives None."""
    try:
        found = getattr(model, method, lambda: None)()
    except (NotImplementedError, AttributeError):
        return None
    return found if isinstance(found, nn.Module) else None


def _final_norm(model: Any) -> nn.Module | None:
    """Returns the last direct child of the decoder (or base model) whose class is a norm."""
    for owner in (_call(model, "get_decoder"), _base_of(model), model):
        if owner is not None:
            norms = [child for child in owner.children() if "Norm" in type(child).__name__]
            if norms:
                return norms[-1]
    return None


def _without_repeats(units: list[UnitPlan]) -> list[UnitPlan]:
    """Drops repeated modules. Later units win: most plans name embedding and head too, which belong to the tail."""
    owner: dict[nn.Module, int] = {module: i for i, unit in enumerate(units) for module in unit.modules}
    kept = []
    for i, unit in enumerate(units):
        pairs = [(m, n) for m, n in zip(unit.modules, unit.names, strict=True) if owner[m] == i]
        if pairs:
            modules, names = zip(*pairs, strict=True)
            kept.append(replace(unit, modules=modules, names=names))
    return kept


# ---- assigns each parameter to one unit, inner units first


def join_ties(model: nn.Module, units: list[UnitPlan], ignored: Collection[int] = ()) -> list[UnitPlan]:
    """Joins, carves out or dissolves units until none share a parameter. ``ignored`` holds ids of parameters."""
    names = {module: name for name, module in model.named_modules()}
    rooted: set[nn.Module] = set()  # owners that only the root can hold; each dissolution adds some, so the loop ends
    while (tie := next(_ties(model, units, ignored), None)) is not None:
        label, owners = tie
        joined = _joined(model, units, owners, rooted)
        involved = {i for _, i in owners if i is not None}
        if joined is None:
            rooted.update(owner for owner, _ in owners)
            units = [unit for i, unit in enumerate(units) if i not in involved]
            continue
        whole = {i for i in involved if any(module in joined for module in units[i].modules)}
        carved = any(owner in joined and i not in whole for owner, i in owners)
        kept = carved or any(units[i].reshard_after_forward is False for i in whole)
        tied = dict.fromkeys(f"{names[owner]}.{label.rpartition('.')[2]}" for owner, _ in owners)
        reason = f"tied: {' = '.join(tied)}" if len(tied) > 1 else f"shared module: {names[owners[0][0]]}"
        unit = UnitPlan(tuple(joined), tuple(names[m] for m in joined), False if kept else None, reason)
        units = [other for i, other in enumerate(units) if i not in whole] + [unit]
    return units


def _ties(
    model: nn.Module, units: list[UnitPlan], ignored: Collection[int]
) -> Iterator[tuple[str, list[tuple[nn.Module, int | None]]]]:
    """Yields (parameter path, [(owner, index of its unit or None for the root)]) for parameters of several units."""
    unit_of = {module: i for i, unit in enumerate(units) for module in unit.modules}
    owners: dict[nn.Parameter, tuple[str, dict[tuple[nn.Module, int | None], None]]] = {}
    visited: set[tuple[nn.Module, int | None]] = set()

    def visit(name: str, module: nn.Module, unit: int | None) -> None:
        unit = unit_of.get(module, unit)
        if (module, unit) in visited:
            return
        visited.add((module, unit))
        for key, param in module._parameters.items():
            if param is not None and id(param) not in ignored and not isinstance(param, DTensor):
                owners.setdefault(param, (name + key, {}))[1][module, unit] = None
        for key, child in module.named_children():
            visit(f"{name}{key}.", child, unit)

    visit("", model, None)
    for label, pairs in owners.values():
        if len({unit for _, unit in pairs}) > 1:
            yield label, list(pairs)


def _joined(
    model: nn.Module, units: list[UnitPlan], owners: list[tuple[nn.Module, int | None]], rooted: set[nn.Module]
) -> list[nn.Module] | None:
    """Returns the modules of the unit for the parameter of these owners. None if only the root can hold it."""
    planned = {module for unit in units for module in unit.modules}
    joined: dict[nn.Module, None] = {}
    for owner, i in owners:
        called = has_forward(owner) and type(owner).__name__ not in _NEVER_CALLED
        leaf = called and not any(True for _ in owner.children())
        if owner in rooted or owner is model:
            return None
        if i is not None and (owner in units[i].modules or not leaf):
            joined.update(dict.fromkeys(units[i].modules))
        elif called:
            joined[owner] = None
        else:
            return None
    joined_below = _below(joined)
    outside = [owner for owner, i in owners if i is None]
    if any(module in planned and module not in joined for owner in outside for module in owner.modules()):
        return None
    return [module for module in joined if module not in joined_below]


def sort_bottom_up(model: nn.Module, units: list[UnitPlan]) -> list[UnitPlan]:
    """Sorts inner units first, otherwise by registration. Joins two units that contain parts of each other."""
    position = {module: i for i, module in enumerate(model.modules())}
    waiting = sorted(units, key=lambda unit: max(position[module] for module in unit.modules))
    ordered: list[UnitPlan] = []
    while waiting:
        ready = next((unit for unit in waiting if not any(_contains(unit, o) for o in waiting if o is not unit)), None)
        if ready is None:
            waiting.append(_union(waiting.pop(0), waiting.pop(0)))
        else:
            waiting.remove(ready)
            ordered.append(ready)
    return ordered


def _below(modules: Iterable[nn.Module]) -> set[nn.Module]:
    """Returns all modules inside of these."""
    return {module for outer in modules for module in outer.modules() if module is not outer}


def _contains(outer: UnitPlan, inner: UnitPlan) -> bool:
    below = {module for top in outer.modules for module in top.modules()}
    return any(module in below for module in inner.modules)


def _union(one: UnitPlan, other: UnitPlan) -> UnitPlan:
    named = dict(zip(one.modules + other.modules, one.names + other.names, strict=True))
    below = _below(named)
    outermost = {module: name for module, name in named.items() if module not in below}
    kept = False in (one.reshard_after_forward, other.reshard_after_forward)
    reason = f"{one.reason}; {other.reason}"
    return UnitPlan(tuple(outermost), tuple(outermost.values()), False if kept else None, reason)
