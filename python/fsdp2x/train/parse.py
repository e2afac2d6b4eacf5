"""From YAML and `key=value` overrides to a `TrainConfig`; every mistake is one sentence with the dotted path.

`read_yaml` and `apply_overrides` work on plain mappings, `build` turns a mapping into the dataclasses. Between the two
`dialects` translates other spellings of the same settings.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import types
import typing
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union

from .config import DTYPE_NAMES, ConfigError, TrainConfig
from .safe_yaml import load_yaml, load_yaml_file


def parse_config(settings: Mapping[str, Any]) -> TrainConfig:
    """A `TrainConfig` from a nested mapping in fsdp2x's own sections."""
    return build(TrainConfig, settings)


def read_yaml(path: str | Path) -> dict:
    path = Path(path)
    settings = load_yaml_file(path)
    if settings is None:
        settings = {}
    if not isinstance(settings, dict):
        raise ConfigError(f"config file {path}: got {describe(settings)}, expected a mapping of sections")
    return expand_dotted(settings)


def expand_dotted(settings: Mapping[str, Any]) -> dict:
    """`{"a.b": 1}` as `{"a": {"b": 1}}`, at the top level; raises `ConfigError` where both are given."""
    result: dict = {}
    for key, value in settings.items():
        if isinstance(key, str) and "." in key and all(key.split(".")):
            _set(result, key, value, f"key {key}", keep=True)
        elif key in result and isinstance(result[key], dict) and isinstance(value, Mapping):
            for inner, one in value.items():
                _set(result, f"{key}.{inner}", one, f"key {key}.{inner}", keep=True)
        elif key in result:
            raise ConfigError(f"key {key}: it is set twice, as {key} and with dots")
        else:
            result[key] = _copy(value)
    return result


def apply_overrides(settings: Mapping[str, Any], overrides: Iterable[str]) -> dict:
    """A copy of `settings` in which each `a.b.c=value` is set; the value is read as YAML."""
    result = _copy(settings)
    for key, value in read_overrides(overrides):
        _set(result, key, value, f"override {key}")
    return result


def read_overrides(overrides: Iterable[str]) -> list[tuple[str, Any]]:
    """Dotted key and value of each `a.b.c=value`; the value is read as YAML."""
    read = []
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()
        if not equals or not key or any(not part for part in key.split(".")):
            raise ConfigError(f"override {override!r}: expected key=value with a dotted key, such as train.steps=100")
        read.append((key, load_yaml(text, f"override {key}={_short(text)}")))
    return read


def _set(settings: dict, key: str, value: Any, what: str, *, keep: bool = False) -> None:
    """Sets a dotted key in place; with `keep`, a value that is there already is an error."""
    *sections, last = key.split(".")
    target = settings
    for depth, part in enumerate(sections):
        inner = target.get(part)
        if inner is None:
            inner = target[part] = {}
        if not isinstance(inner, dict):
            above = ".".join(sections[: depth + 1])
            raise ConfigError(f"{what}: {above} is {describe(inner)}, expected a mapping")
        target = inner
    if keep and last in target:
        raise ConfigError(f"{what}: it is set twice")
    target[last] = value


def build(cls: type, settings: Any, path: str = "") -> Any:
    """An instance of the dataclass `cls` from a mapping; `path` is its dotted place in the whole."""
    if settings is None:
        settings = {}
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{path or 'config'}: got {describe(settings)}, expected a mapping")
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for key in settings:
        if key not in fields:
            raise ConfigError(unknown_key_message(first_leaf(_join(path, key), settings[key])))
    values = {}
    for name in fields:
        if name in settings or dataclasses.is_dataclass(hints[name]):
            values[name] = convert(hints[name], settings.get(name), _join(path, name))
    return cls(**values)


def convert(kind: Any, value: Any, path: str) -> Any:
    """`value` as `kind`, or a `ConfigError` that says what was got and what is expected."""
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind):
        return build(kind, value, path)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        for option in args:
            if option is not type(None):
                try:
                    return convert(option, value, path)
                except ConfigError:
                    pass
    elif origin is Literal:
        if isinstance(value, bool) and {"on", "off"} <= set(args):
            return "on" if value else "off"  # YAML 1.1 reads these words as booleans
        if any(value == option and type(value) is type(option) for option in args):
            return value
        dtype = DTYPE_NAMES.get(value.removeprefix("torch.")) if isinstance(value, str) else None
        if dtype in args:
            return dtype
        near = difflib.get_close_matches(str(value), [str(option) for option in args], n=1)
        raise ConfigError(_mismatch(path, value, kind) + (f"; did you mean {near[0]}?" if near else ""))
    elif origin is list and isinstance(value, list):
        return [convert(args[0], item, f"{path}[{index}]") for index, item in enumerate(value)]
    elif origin is list and args[0] is str and isinstance(value, str):
        return [value]
    elif origin is tuple and isinstance(value, list | tuple) and len(value) == len(args):
        return tuple(convert(arg, item, f"{path}[{i}]") for i, (arg, item) in enumerate(zip(args, value, strict=True)))
    elif kind is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        # YAML 1.1 reads 1e-3 (no dot) as text.
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not math.isnan(number):
            return number
    elif kind in (int, bool, str, dict) and type(value) is kind:
        return value
    raise ConfigError(_mismatch(path, value, kind))


class KnownKey(NamedTuple):
    kind: Any
    default: Any
    help: str


@functools.cache
def known_keys(cls: type = TrainConfig, path: str = "") -> dict[str, KnownKey]:
    """Every setting by its dotted path."""
    keys: dict[str, KnownKey] = {}
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        name, kind = _join(path, field.name), hints[field.name]
        if dataclasses.is_dataclass(kind):
            keys.update(known_keys(kind, name))
        else:
            default = field.default_factory() if callable(field.default_factory) else field.default
            keys[name] = KnownKey(kind, default, field.metadata["help"])
    return keys


def unknown_key_message(path: str) -> str:
    """The nearest key of the same section comes first, then the same last name elsewhere, then any spelling."""
    keys = [*known_keys(), *(field.name for field in dataclasses.fields(TrainConfig))]
    return f"unknown key {path}; the nearest known one is {nearest_key(path, keys, siblings_first=True)}"


def nearest_key(path: str, keys: Collection[str], *, siblings_first: bool) -> str:
    """One that is spelt alike in the same section, or one of the same last name elsewhere; else the most alike."""
    section, _, last = path.rpartition(".")
    siblings = {key.rpartition(".")[2]: key for key in keys if key.rpartition(".")[0] == section}
    alike = [siblings[name] for name in difflib.get_close_matches(last, siblings, n=1, cutoff=0.6)]
    elsewhere = [key for key in keys if key.rpartition(".")[2] == last]
    near = alike + elsewhere if siblings_first else elsewhere + alike
    return (near or difflib.get_close_matches(path, keys, n=1, cutoff=0.0))[0]


def describe(value: Any) -> str:
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return f"a list ({_short(repr(value))})"
    return f"{_short(repr(value))} ({'null' if value is None else type(value).__name__})"


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}..."


def type_name(kind: Any) -> str:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(type_name(arg) for arg in args)
    if origin is Literal:
        return "one of " + ", ".join(str(arg) for arg in args)
    if origin is list:
        return f"list of {type_name(args[0])}"
    if origin is tuple:
        return f"list of {len(args)} {type_name(args[0])}"
    if kind is type(None):
        return "null"
    return "mapping" if kind is dict else kind.__name__


def _mismatch(path: str, value: Any, kind: Any) -> str:
    return f"{path}: got {describe(value)}, expected {type_name(kind)}"


def _join(path: str, name: Any) -> str:
    return f"{path}.{name}" if path else str(name)


def first_leaf(path: str, value: Any) -> str:
    """The dotted path down the first keys of a mapping."""
    while isinstance(value, Mapping) and value:
        key, value = next(iter(value.items()))
        path = f"{path}.{key}"
    return path


def _copy(value: Any) -> Any:
    return {key: _copy(inner) for key, inner in value.items()} if isinstance(value, Mapping) else value
