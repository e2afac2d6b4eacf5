"""Damage to files that no checksum tells: one change of what a file says, and everything around it made to fit.

`change` alters one place of a tree of plain values, tensors or torch's metadata: removes, renames, doubles, swaps,
shrinks or replaces it. The rest applies that to files: archives of `torch.save`, JSON, whatever else lies in a folder.
"""

import dataclasses
import io
import json
import math
import os
import pickle
import pickletools
import random
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_DEEP = 3000
_STOP = 0.25  # at each level on the way to the place that is changed


class Evil:
    """Makes the folder `path` when it is unpickled by a reader that calls what a pickle says."""

    path = ""

    def __reduce__(self):
        return os.mkdir, (self.path,)


@dataclasses.dataclass
class Change:
    """What was done. `touched`: dotted names of the places whose values may be others now, and nothing else."""

    what: str
    touched: tuple[str, ...] = ()


def change(rng: random.Random, tree: Any, *, json_only: bool = False) -> tuple[Any, Change]:
    """The tree with one change at a random place; the tree itself stays."""
    path: tuple = ()
    node = tree
    while True:
        key, inner = rng.choice(_children(node))
        path, parent, node = (*path, key), node, inner
        if not _children(node) or rng.random() < _STOP:
            break
    outer, items = path[:-1], _children(parent)
    actions = ["replace"] * 3 + ["remove", "double"]
    actions += ["rename"] if isinstance(parent, dict) else []
    actions += ["swap"] if len(items) > 1 else []
    actions += ["empty", "shrink"] if _children(node) else []
    action = rng.choice(actions)
    touched = (dotted(path),)
    said = f"{action} {dotted(path)}"
    if action == "remove":
        items = [item for item in items if item[0] != key]
    elif action == "double":
        twin = _renamed(rng, key)
        items, said = [*items, (twin, node)], f"{said} as {shown(twin)}"
        touched = (dotted(outer),) if isinstance(parent, list | tuple) else (*touched, dotted((*outer, twin)))
    elif action == "rename":
        name = _renamed(rng, key)
        items, said = [(name if k == key else k, v) for k, v in items], f"{said} to {shown(name)}"
    elif action == "swap":
        other = rng.choice([k for k, _ in items if k != key])
        values = {**dict(items), key: dict(items)[other], other: node}
        items, said = [(k, values[k]) for k, _ in items], f"{said} with {shown(other)}"
        touched = (*touched, dotted((*outer, other)))
    elif action == "empty":
        items = [(k, _rebuilt(v, []) if k == key else v) for k, v in items]
    elif action == "shrink":
        items = [(k, _rebuilt(v, _children(v)[: len(_children(v)) // 2]) if k == key else v) for k, v in items]
    else:
        # torch writes a wrong memory format into a sentence, whose end would never come.
        new = _other(rng, node, json_only or key == "memory_format")
        items, said = [(k, new if k == key else v) for k, v in items], f"{said} by {shown(new)}"
    return _with(tree, outer, _rebuilt(parent, items)), Change(said[:300], touched)


def dotted(path: tuple) -> str:
    return ".".join(map(shown, path))


def shown(value: Any) -> str:
    if isinstance(value, str):
        return value[:80]
    if isinstance(value, torch.Tensor):
        return f"{value.layout} {value.dtype} of {tuple(value.shape)}"
    if isinstance(value, Evil | list | dict) or dataclasses.is_dataclass(value):
        return f"a {type(value).__name__}"
    return repr(value)[:80]


def _children(node: Any) -> list[tuple[Any, Any]]:
    if isinstance(node, dict):
        return list(node.items())
    if isinstance(node, list | tuple):
        return list(enumerate(node))
    return list(vars(node).items()) if dataclasses.is_dataclass(node) and not isinstance(node, type) else []


def _rebuilt(node: Any, items: list[tuple[Any, Any]]) -> Any:
    """A node of the same kind with other children."""
    if isinstance(node, dict):
        return dict(items)
    if isinstance(node, list | tuple):
        values = [value for _, value in items]
        if isinstance(node, torch.Size) and all(type(value) is int and abs(value) < 2**62 for value in values):
            return torch.Size(values)
        return values if isinstance(node, list) else tuple(values)
    made = object.__new__(type(node))
    made.__dict__.update(items)
    return made


def _with(tree: Any, path: tuple, new: Any) -> Any:
    if not path:
        return new
    return _rebuilt(tree, [(k, _with(v, path[1:], new) if k == path[0] else v) for k, v in _children(tree)])


def _renamed(rng: random.Random, key: Any) -> Any:
    if isinstance(key, str):
        return rng.choice([f"{key}x", key[:-1], "", f"{key}.{key}", "x" * 5000, f"../{key}"])
    if isinstance(key, int):
        return rng.choice([key + 1, -1, str(key), 2**40])
    name = rng.choice(sorted(vars(key)))
    made = _rebuilt(key, [(k, _other(rng, v, False) if k == name else v) for k, v in vars(key).items()])
    try:
        hash(made)
    except Exception:
        return "no key"
    return made


_PLAIN = (None, True, 0, -1, 1, 7, 2**31, 2**63, 10**30, 0.5, -0.0, math.nan, math.inf, 1e308, "", "x", "../x", [], {})
_MORE = (b"", b"xyz", (), (1, 2), torch.zeros(()), torch.ones(3), torch.float16, torch.Size([2]), {"a": torch.ones(2)})


def _other(rng: random.Random, value: Any, json_only: bool) -> Any:
    """Something else, near to `value`, far from it, or without an end."""
    near: list[Any] = []
    if isinstance(value, bool):
        near = [not value]
    elif isinstance(value, int):
        near = [value + 1, value - 1, -value, value * 2, value + 64, value // 2, float(value)]
    elif isinstance(value, float):
        near = [-value, value * 2, math.nan, math.inf]
    elif isinstance(value, str):
        near = [f"{value}x", value[:-1], value.upper(), value[::-1], f"../{value}", "/etc/passwd", value * 1000]
    elif isinstance(value, torch.dtype):
        near = [torch.float16, torch.float64, torch.int32, torch.complex64, torch.bool]
    elif isinstance(value, torch.Tensor):
        near = _other_tensors(value)
    if rng.random() < 0.05:
        return rng.choice([nested] if json_only else [nested, looped, laughs, Evil])()
    if near and rng.random() < 0.6:
        return near[rng.randrange(len(near))]
    far = _PLAIN if json_only else _PLAIN + _MORE
    return far[rng.randrange(len(far))]


def _other_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    shape = tuple(tensor.shape)
    made = [tensor.to(dtype) for dtype in (torch.float16, torch.float64, torch.int32, torch.bool, torch.complex64)]
    made += [tensor.clone().flatten(), tensor.new_zeros(()), tensor.new_zeros((0,)), tensor[None].clone()]
    made += [torch.full_like(tensor, 3), torch.empty(shape, dtype=tensor.dtype, device="meta")]
    if tensor.is_floating_point():
        made.append(torch.full_like(tensor, math.nan))
    if tensor.ndim:
        made += [tensor[:1].clone(), tensor[:-1].clone(), torch.cat([tensor, tensor]), tensor.float().to_sparse()]
        made += [tensor[:1].clone().expand(shape)] if shape[0] else []
    if tensor.ndim > 1:
        made += [tensor.T.contiguous(), tensor.T.contiguous().T]
    return made


def nested() -> list:
    """A list in a list in a list."""
    value: list = []
    for _ in range(_DEEP):
        value = [value]
    return value


def looped() -> list:
    """A list that holds itself."""
    value: list = []
    value.append(value)
    return value


def laughs() -> list:
    """Few objects that are very many when they are followed."""
    value: Any = "ha"
    for _ in range(40):
        value = [value, value, value]
    return value


# Files


def change_json(rng: random.Random, path: Path) -> Change:
    """One change of a mapping in a JSON file; now and then a key that is there twice."""
    text = path.read_text()
    tree = json.loads(text)
    if rng.random() < 0.1:
        key = rng.choice(list(tree))
        path.write_text(text.replace("{", "{" + json.dumps(key) + ": 5, ", 1))
        return Change(f"{path.name}: {key} twice")
    tree, done = change(rng, tree, json_only=True)
    try:
        path.write_text(json.dumps(tree))
    except RecursionError:
        path.write_text(f'{{"deep": {"[" * 100_000}{"]" * 100_000}, {text.lstrip()[1:]}')
    done.what = f"{path.name}: {done.what}"
    return done


def fit(folder: Path) -> None:
    """Makes the manifest of a checkpoint say what its files are, except for the chunks of tensors in them."""
    path = folder / "manifest.json"
    if not path.is_file():
        return
    try:
        manifest = json.loads(path.read_text())
        for name, described in manifest["files"].items():
            if os.path.isfile(folder / name):
                content = (folder / name).read_bytes()
                described |= {key: {"bytes": len, "crc32": zlib.crc32}[key](content) for key in described}
        path.write_text(json.dumps(sealed(manifest)))
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError):
        pass  # damaged itself


def flip(path: Path) -> None:
    """Changes one bit of a file, of a tensor if the manifest next to it lists one there."""
    tensors = json.loads((path.parent / "manifest.json").read_text())["tensors"].values()
    chunks = [one for entry in tensors for one in entry["chunks"] if one["file"] == path.name]
    content = bytearray(path.read_bytes())
    content[chunks[0].get("first_byte", -1) if chunks else 200] ^= 4
    path.write_bytes(content)


def sealed(manifest: dict) -> dict:
    """The manifest with the checksum of its contents."""
    rest = {key: value for key, value in manifest.items() if key != "crc32"}
    return {**rest, "crc32": zlib.crc32(json.dumps(rest, sort_keys=True).encode())} if "crc32" in manifest else rest


def change_archive(rng: random.Random, path: Path, lie: Callable[[random.Random, Any], tuple] | None = None) -> Change:
    """One change of a file of `torch.save`: of its tree, of its ZIP, or through `lie`, see `lying`."""
    kind = rng.random()
    if kind < 0.12:
        content, done = change_zip(rng, path.read_bytes())
    elif kind < 0.2:
        content, done = change_pickled(rng, path.read_bytes())
    elif kind < 0.32 and lie is not None:
        content, done = lie(rng, torch.load(path, weights_only=True))
    else:
        tree, done = change(rng, torch.load(path, weights_only=True))
        content = pack(tree)
    path.write_bytes(content)
    done.what = f"{path.name}: {done.what}"
    return done


def pack(tree: Any) -> bytes:
    """As `torch.save` writes it; empty for what it cannot write."""
    buffer = io.BytesIO()
    try:
        torch.save(tree, buffer)
    except (RecursionError, AttributeError, NotImplementedError, TypeError):
        return b""
    return buffer.getvalue()


def change_pickled(rng: random.Random, content: bytes) -> tuple[bytes, Change]:
    """An archive whose pickle says another number, name or flag in one place; which, only its reader knows."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    name = next(name for name in parts if name.endswith("data.pkl"))
    parts[name], done = change_pickle(rng, parts[name])
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for one, part in parts.items():
            archive.writestr(one, part)
    return buffer.getvalue(), done


def change_pickle(rng: random.Random, pickled: bytes) -> tuple[bytes, Change]:
    ops = list(pickletools.genops(pickled))
    places = [index for index, (op, _, _) in enumerate(ops) if op.name in _VALUES]
    index = rng.choice(places)
    op, old, start = ops[index]
    new = _other(rng, old, True)
    if not isinstance(new, int | str | float | None) or (isinstance(new, str) and rng.random() < 0.5):
        new = rng.choice([value for op, value, _ in ops if op.name in _VALUES])
    said = pickle.dumps(new, protocol=2)[2:-1]  # without the head and the end
    said = said[: -2 if isinstance(new, str) else None]  # without the place in the memo
    return pickled[:start] + said + pickled[ops[index + 1][2] :], Change(f"say {shown(new)} for {shown(old)}", ("",))


_VALUES = {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "NONE", "NEWTRUE", "NEWFALSE"}


def lying(rng: random.Random, tensors: dict[str, torch.Tensor], nest: Callable[[dict], Any]) -> tuple[bytes, Change]:
    """An archive in which one tensor has another shape or dtype than its record, or none.

    `nest` makes the tree to pickle from the tensors, of which no two may share memory.
    """
    name = rng.choice(list(tensors))
    truth = tensors[name]
    grown = tuple(size + rng.choice([1, 5, 1000]) for size in truth.shape) or (1000,)
    lies = {
        "larger": truth.new_zeros(grown),
        "of another dtype": truth.to(torch.float64),
        "smaller": truth.new_zeros((*truth.shape[:-1], 1)),
        "nowhere": truth,
    }
    said = rng.choice(list(lies))
    buffer = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(pack(nest(tensors)))) as records,
        zipfile.ZipFile(io.BytesIO(pack(nest({**tensors, name: lies[said]})))) as lie,
        zipfile.ZipFile(buffer, "w") as archive,
    ):
        lost = f"archive/data/{list(tensors).index(name)}" if said == "nowhere" else ""
        for one in records.namelist():
            if one != lost:
                archive.writestr(one, (lie if one.endswith("data.pkl") else records).read(one))
    return buffer.getvalue(), Change(f"say that {name} is {said}", (name,))


def change_zip(rng: random.Random, content: bytes) -> tuple[bytes, Change]:
    """One number of the directory or of a header of a ZIP archive is another one."""
    data = bytearray(content)
    places = []
    for mark, fields in _FIELDS.items():
        start = data.find(mark)
        while start >= 0:
            places += [(start + offset, width) for offset, width in fields]
            start = data.find(mark, start + 4)
    start, width = rng.choice(places)
    old = int.from_bytes(data[start : start + width], "little")
    new = rng.choice([0, 1, 8, old + 1, max(old - 1, 0), old + 64, 2 ** (8 * width) - 1, 2 ** (8 * width - 1)])
    new %= 2 ** (8 * width)
    data[start : start + width] = new.to_bytes(width, "little")
    return bytes(data), Change(f"ZIP at {start}: {old} becomes {new}")


# (offset, width) of numbers after each mark, in ZIP's own description.
_FIELDS = {
    b"PK\x01\x02": ((8, 2), (10, 2), (16, 4), (20, 4), (24, 4), (28, 2), (30, 2), (42, 4), (66, 8), (74, 8), (82, 8)),
    b"PK\x03\x04": ((6, 2), (8, 2), (18, 4), (22, 4), (26, 2), (28, 2)),
    b"PK\x06\x06": ((24, 8), (32, 8), (40, 8), (48, 8)),
    b"PK\x05\x06": ((8, 2), (10, 2), (12, 4), (16, 4), (20, 2)),
}


def change_header(rng: random.Random, path: Path) -> Change:
    """One change of what the header of a safetensors file says."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header, done = change(rng, json.loads(content[8 : 8 + size]), json_only=True)
    try:
        text = json.dumps(header).encode()
    except RecursionError:
        text = b"[" * 100_000
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])
    return done


def change_file(rng: random.Random, path: Path, others: list[Path]) -> Change:
    """Another thing in the place of a file, or another of the files."""
    size = path.stat().st_size
    other = rng.choice(others)
    action = rng.choice(
        ["cut", "empty", "grow", "remove", "folder", "link", "dangling", "loop", "pipe", "copy", "swap"]
    )
    if action == "cut":
        os.truncate(path, rng.randrange(size) if size else 0)
    elif action == "empty":
        os.truncate(path, 0)
    elif action == "grow":
        path.write_bytes(path.read_bytes() + bytes(rng.randrange(1, 5000)))
    elif action == "swap":
        mine, theirs = path.read_bytes(), other.read_bytes()
        path.write_bytes(theirs)
        if other.parent == path.parent:
            other.write_bytes(mine)
    elif action == "copy":
        path.write_bytes(other.read_bytes())
    else:
        path.unlink()
        if action == "folder":
            path.mkdir()
        elif action == "link":
            path.symlink_to(other)
        elif action == "dangling":
            path.symlink_to("nowhere")
        elif action == "loop":
            path.symlink_to(path.name)
        elif action == "pipe":
            os.mkfifo(path)
    return Change(f"{action} {path.name} ({other.parent.name}/{other.name})")


# --- rounds on several ranks ------------------------------------------------------------------------------------------


def problems_in(ctx, rounds, form: str, begin) -> list[str]:
    """Runs rounds of damage. `begin(rng)` prepares one: its name, what damages on rank 0, what judges it."""
    problems = []
    for number in rounds:
        rng = random.Random(f"{form} {number}")
        name, hurt, judge = begin(rng)
        changes = [hurt(rng) if ctx.rank == 0 else None]
        dist.broadcast_object_list(changes, src=0)
        what = f"round {number}: {changes[0].what}, {name}"
        print(what, flush=True)  # the last one is the one that hangs
        everyone = [None] * ctx.world
        dist.all_gather_object(everyone, judge(changes[0]))
        problems += [f"{what}: {one}" for one in dict.fromkeys(everyone) if one is not None]
    return problems


def unlike(error: Exception | None, *kinds: type) -> str | None:
    """Returns what is wrong with the ranks' errors: code was executed, they differ, or they have another type."""
    said = [None] * dist.get_world_size()
    dist.all_gather_object(said, None if error is None else f"{type(error).__name__}: {error}")
    if os.path.exists(Evil.path):
        return "executed"
    if len(set(said)) > 1:
        return f"the ranks say {said}"
    is_refusal = error is None or isinstance(error, kinds) and error.__cause__ is None
    return None if is_refusal else f"{error!r} from {error.__cause__!r}"
