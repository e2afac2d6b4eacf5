"""Splits fused matrices into the blocks that Muon orthogonalizes, by the model's family or a group's settings."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

# Settings of a group of parameters, with the values for matrices without blocks.
SPLIT_SETTINGS = {"split_sizes": None, "num_heads": None, "split_dim": -2, "split_repeats": 1}
WAYS = ("blocks", "heads", "none")


@dataclass(frozen=True)
class Split:
    """How a matrix falls into blocks along ``dim`` (-2: rows, -1: columns). Heads cut a block into equal parts.

    qkv_proj of Phi-3           24 rows   sizes (8, 8, 8)             rows 0-7, 8-15, 16-23
    query_key_value of GPT-NeoX 24 rows   sizes (4, 4, 4), repeats 2  rows 0-3 and 12-15, 4-7 and 16-19, ...
    """

    sizes: tuple[int, ...]
    heads: tuple[int, ...]
    dim: int = -2
    repeats: int = 1

    @property
    def is_whole(self) -> bool:
        return len(self.sizes) == 1 and self.heads == (1,)

    def parts(self, rows: int, columns: int) -> list[tuple[int, int, int]]:
        """The matrices of each block: how many, their rows and columns."""
        sides = [(heads, self.repeats * size // heads) for size, heads in zip(self.sizes, self.heads, strict=True)]
        return [(heads, side, columns) if self.dim == -2 else (heads, rows, side) for heads, side in sides]

    def orthogonalize(self, whole: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Applies ``function`` ([k, m, n] -> [k, m, n], may overwrite) to the blocks of ``whole`` [num, rows, columns].

        Returns the result in the place of ``whole``, unless the matrices are one block.
        """
        if self.is_whole:
            return function(whole)
        lines = whole if self.dim == -2 else whole.mT
        blocks = lines.unflatten(1, (self.repeats, -1)).split(self.sizes, dim=2)
        for block, heads in zip(blocks, self.heads, strict=True):
            num, repeats, size, width = block.shape
            matrices = block.reshape(num * heads, repeats * size // heads, width)
            result = function(matrices) if self.dim == -2 else function(matrices.mT.contiguous()).mT
            block.copy_(result.reshape(block.shape))
        return whole

    def factors(self, rows: int, columns: int, scale: Callable[[int, int], float]) -> list[tuple[int, int, float]]:
        """(begin, end, ``scale(m, n)``) along ``dim``, from the sizes of matrices there; equal neighbors are one."""
        found: list[tuple[int, int, float]] = []
        scales = [scale(m, n) for _, m, n in self.parts(rows, columns)]
        for size, factor in list(zip(self.sizes, scales, strict=True)) * self.repeats:
            begin, end = (found[-1][1], found[-1][1] + size) if found else (0, size)
            if found and found[-1][2] == factor:
                begin = found.pop()[0]
            found.append((begin, end, factor))
        return found

    def __str__(self) -> str:
        sizes = " + ".join(map(str, self.sizes))
        repeats = f", {self.repeats} times" if self.repeats > 1 else ""
        heads = f", heads {' + '.join(map(str, self.heads))}" if max(self.heads) > 1 else ""
        return f"{'rows' if self.dim == -2 else 'columns'} {sizes}{repeats}{heads}"


def split_of(group: dict[str, Any], shape: Sequence[int], name: str) -> Split:
    """The blocks that ``group`` sets for a parameter [..., rows, columns].

    Raises:
        ValueError: sizes that do not add up, or that heads do not divide.
    """
    given, heads, dim, repeats = (group[setting] for setting in SPLIT_SETTINGS)
    if given is None and heads is None:
        return Split((shape[-2],), (1,))

    def refuse(what: str) -> ValueError:
        return ValueError(f"fsdp2x.optim.Muon: {name} {what}")

    if dim not in (-2, -1):
        raise refuse(f"has split_dim={dim!r}. Pass -2 for blocks of rows, -1 for blocks of columns.")
    size, lines = shape[dim], "rows" if dim == -2 else "columns"
    sizes = (size,) if given is None else tuple(given)
    num_heads = tuple(heads) if isinstance(heads, (tuple, list)) else (heads or 1,) * len(sizes)
    numbers = (*sizes, *num_heads, repeats)
    if not sizes or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in numbers):
        raise refuse(f"has split_sizes={given}, num_heads={heads}, split_repeats={repeats}. Pass positive integers.")
    if sum(sizes) * repeats != size:
        raise refuse(
            f"has {size} {lines}, but split_sizes={sizes} with split_repeats={repeats} cover {sum(sizes) * repeats}. "
            f"Pass sizes that cover {size}, or split_sizes=None (split='none' of "
            "muon_param_groups) to orthogonalize the matrix as one."
        )
    if len(num_heads) != len(sizes):
        raise refuse(f"has num_heads={heads} for {len(sizes)} blocks. Pass one number, or one for each of split_sizes.")
    for block, count in zip(sizes, num_heads, strict=True):
        if repeats * block % count:
            raise refuse(
                f"has a block of {repeats * block} {lines}, which num_heads={count} does not divide. Pass a divisor, "
                "or 1 to orthogonalize the block as one."
            )
    return Split(sizes, num_heads, dim, repeats)


def describe_groups(groups: Iterable[dict[str, Any]], names: dict[int, str]) -> list[str]:
    """Lists the blocks that ``Muon`` orthogonalizes, and whole parameters that have the name of a fused matrix."""
    blocks: Counter[tuple[str, Split]] = Counter()
    num_others = 0
    for group in groups:
        for param in group["params"]:
            name = names.get(id(param), "?")
            if group["use_muon"]:
                blocks[re.sub(r"\.\d+(?=\.)", ".*", name), split_of(group, param.shape, name)] += 1
            else:
                num_others += 1
    num_whole = sum(count for (_, split), count in blocks.items() if split.is_whole)
    lines = [f"Muon: {num_whole} parameters as whole matrices, {num_others} by AdamW"]
    for (name, split), count in blocks.items():
        if not split.is_whole:
            lines.append(f"Muon: {name} ({count}) in blocks, {split}")
        elif _FUSED.search(name):
            lines.append(f"Muon: {name} ({count}) as one; if it fuses matrices, set split_sizes for its group")
    return lines


_FUSED = re.compile(r"qkv|query_key_value|gate_up|c_attn|kv_proj|in_proj")
# Families of transformers whose rows are [q, k, v] for each head, and [q of all heads, k of all, v of all].
_BY_HEAD = ("gpt_neox", "gpt_neox_japanese", "bloom", "persimmon", "minimax")
_BY_KIND = ("phi3", "phi4_multimodal", "mpt", "modernbert", "dbrx")
_QKV = ("qkv_proj", "query_key_value", "Wqkv", "c_attn")


def splits_of(model: nn.Module, way: str) -> dict[int, dict[str, Any]]:
    """Returns the settings that the family of ``model`` gives to its parameters, by their id.

    ``way``: "blocks" for each matrix that a parameter fuses, "heads" also for each head of queries, keys, and values.
    """
    modules = dict(model.named_modules())
    found: dict[int, dict[str, Any]] = {}
    for path, module in modules.items() if way != "none" else ():
        for key, param in module.named_parameters(recurse=False):
            if param.ndim not in (2, 3):
                continue
            owner, _, leaf = path.rpartition(".") if key == "weight" else (path, "", key)
            settings = _settings_of(modules[owner], leaf, param.shape, _config_above(modules, owner))
            if way != "heads":
                settings.pop("num_heads", None)
            if settings:
                split_of({**SPLIT_SETTINGS, **settings}, param.shape, f"{path}.{key}".lstrip("."))
                found[id(param)] = settings
    return found


def _config_above(modules: dict[str, nn.Module], path: str) -> Any:
    """The config of the innermost module around ``path`` that has one; None without any."""
    while not hasattr(getattr(modules.get(path), "config", None), "model_type"):
        if not path:
            return None
        path = path.rpartition(".")[0]
    return modules[path].config


def _settings_of(owner: nn.Module, leaf: str, shape: Sequence[int], config: Any) -> dict[str, Any]:
    """Settings for the parameter ``owner.leaf``, or the weight of that module; empty for one matrix."""
    kind = getattr(config, "model_type", "")
    rows, columns = shape[-2:]
    if leaf == "gate_up_proj":
        return _gate_up(owner, (rows, columns), getattr(owner, "is_concatenated", kind != "gpt_oss"))
    heads = getattr(config, "num_attention_heads", None) or getattr(owner, "num_heads", None)
    if leaf == "kv_b_proj" and hasattr(owner, "qk_nope_head_dim"):  # multi-head latent attention: [k, v] for each head
        return {"split_sizes": (owner.qk_nope_head_dim, owner.v_head_dim), "split_repeats": heads, "num_heads": heads}
    head_dim = next((d for place in (owner, config) if isinstance(d := getattr(place, "head_dim", None), int)), None)
    if head_dim is None and heads:
        head_dim = (getattr(config, "hidden_size", None) or columns) // heads
    if leaf == "c_attn" and kind != "gpt_bigcode":  # Conv1D of GPT-2 and its kin: columns are outputs
        sizes, repeats, dim = (rows,) * (columns // rows), 1, -1
    elif leaf == "qkv" and rows == 3 * columns:  # vision towers
        sizes, repeats, dim = (columns,) * 3, 1, -2
    elif leaf in _QKV and heads and head_dim and (blocks := _qkv(config, kind, heads, head_dim, rows)):
        (sizes, repeats), dim = blocks, -2
    elif leaf in ("q_proj", "k_proj", "v_proj", "q_b_proj"):
        width = getattr(owner, "v_head_dim" if leaf == "v_proj" else "qk_head_dim", None) or head_dim
        return {"num_heads": rows // width} if width and rows % width == 0 and rows > width else {}
    else:
        return {}
    num_heads = tuple(max(1, repeats * size // head_dim) for size in sizes) if head_dim else None
    return {"split_sizes": sizes, "num_heads": num_heads, "split_dim": dim, "split_repeats": repeats}


def _qkv(config: Any, kind: str, heads: int, head_dim: int, rows: int) -> tuple[tuple[int, ...], int] | None:
    """Sizes and repeats of queries, keys, and values; None where the family is not known."""
    one_key = kind in ("falcon", "gpt_bigcode") and config.multi_query
    if kind == "falcon" and config.new_decoder_architecture:
        return (heads // config.num_kv_heads * head_dim, head_dim, head_dim), config.num_kv_heads
    if kind in _BY_KIND or one_key:
        keys = (rows - heads * head_dim) // 2
        return (heads * head_dim, keys, keys), 1
    if kind in (*_BY_HEAD, "falcon", "gpt_bigcode"):
        return (head_dim,) * 3, heads
    if kind == "codegen":  # four parts, each with queries, values, and keys
        return (rows // 12,) * 3, 4
    return None


def _gate_up(owner: nn.Module, shape: tuple[int, int], is_concatenated: bool) -> dict[str, Any]:
    """Halves, or alternate lines, along the dim that is twice as large as the input of ``down_proj``."""
    down = getattr(owner, "down_proj", None)
    down = down if isinstance(down, Tensor) else getattr(down, "weight", None)
    if down is None:
        return {}
    m, n = down.shape[-2:]
    if shape == (2 * n, m):
        dim, inner = -2, n
    elif shape == (n, 2 * m):
        dim, inner = -1, m
    else:
        return {}
    sizes, repeats = ((inner, inner), 1) if is_concatenated else ((1, 1), inner)
    return {"split_sizes": sizes, "split_dim": dim, "split_repeats": repeats}
