"""``freeze_module_prefix``: freezes parameters whose names begin with a prefix, and logs what it froze."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable

from torch import nn

from fsdp2x.base.arguments import checked
from fsdp2x.sharding.wrap import clean_name

logger = logging.getLogger("fsdp2x")


@checked
def freeze_module_prefix(model: nn.Module, prefixes: str | Iterable[str]) -> int:
    """Freezes every parameter whose name begins with one of ``prefixes``.

    Call it before or after ``fully_shard``. Frozen and trainable parameters may share a unit. Tied parameters are
    frozen under all their names, with a warning.

    Args:
        model: any module.
        prefixes: one path or several, in a string also separated by commas. A path has complete names of modules. It
            starts at the model (``"model.visual"``) or at a level below it (``"visual"``). If it matches at several
            levels, the outermost counts: ``"norm"`` is the final norm, not those of the layers.

    Returns:
        Number of elements of the full parameters that match, tied ones once. Parameters that were already frozen
        count.

    Raises:
        ValueError: a prefix matches nothing. The message names the nearest ones, and nothing is frozen.
        TypeError: a prefix is not a string.
    """
    wanted = _split(prefixes)
    params = [(clean_name(name), param) for name, param in model.named_parameters(remove_duplicate=False)]
    matched: dict[int, nn.Parameter] = {}
    names: set[str] = set()
    for prefix in wanted:
        levels = [(_level(name, prefix), name, param) for name, param in params]
        outermost = min((level for level, _, _ in levels if level is not None), default=None)
        if outermost is None:
            raise ValueError(_no_match(prefix, [name for name, _ in params], type(model).__name__))
        for level, name, param in levels:
            if level == outermost:
                matched[id(param)] = param
                names.add(name)
    outside = [name for name, param in params if id(param) in matched and name not in names]
    if outside:
        logger.warning("freeze_module_prefix: tied to a frozen parameter and frozen with it: %s", ", ".join(outside))
    for param in matched.values():
        param.requires_grad_(False)
        param.grad = None
    numel = sum(param.numel() for param in matched.values())
    logger.info("freeze_module_prefix %s: %d parameters, %d elements", ", ".join(wanted), len(matched), numel)
    if not any(param.requires_grad for param in model.parameters()):
        logger.warning("freeze_module_prefix: nothing in %s is trainable any more", type(model).__name__)
    return numel


def _split(prefixes: str | Iterable[str]) -> list[str]:
    given = [prefixes] if isinstance(prefixes, str) else list(prefixes)
    for prefix in given:
        if not isinstance(prefix, str):
            raise TypeError(f"freeze_module_prefix: a prefix must be a string, got {prefix!r}")
    wanted = [part.strip().rstrip(".") for prefix in given for part in prefix.split(",")]
    wanted = [part for part in wanted if part]
    if not wanted:
        raise ValueError(f"freeze_module_prefix: no prefix given, got {prefixes!r}")
    return wanted


def _level(name: str, prefix: str) -> int | None:
    """Returns how many names precede ``prefix`` in the path ``name``, or None if it does not occur."""
    before, found, _ = f".{name}.".partition(f".{prefix}.")
    return before.count(".") if found else None


def _no_match(prefix: str, names: list[str], model: str) -> str:
    # Complete paths of modules from any level on, because users usually write one of them.
    paths: dict[str, str] = {}
    for name in names:
        parts = name.split(".")[:-1]
        for end in range(1, len(parts) + 1):
            if not parts[end - 1].isdigit():
                paths.setdefault(parts[end - 1], ".".join(parts[:end]))
                paths.setdefault(".".join(parts[:end]), ".".join(parts[:end]))
    last = prefix.rpartition(".")[2]
    # "vision_model" means "visual" rather than "model".
    near = [key for key in paths if key[:3] == last[:3]]
    near += difflib.get_close_matches(last, paths, n=3, cutoff=0.5) + difflib.get_close_matches(prefix, paths, n=3)
    hints = list(dict.fromkeys(paths[key] for key in near))[:4]
    top = list(dict.fromkeys(".".join(name.split(".")[:2]) for name in names))[:8]
    told = f"; did you mean {' or '.join(hints)}" if hints else ""
    return (
        f"freeze_module_prefix: no parameter of {model} begins with {prefix!r}{told}. The model has: {', '.join(top)}"
    )
