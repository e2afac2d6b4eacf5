"""Parses YAML and `key=value` overrides into a `TrainConfig`. Every mistake is one sentence with the dotted path."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import re
import types
import typing
from collections.abc import Collection, Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union

from fsdp2x.api import read_text
from fsdp2x.base.arguments import DTYPE_NAMES, checked, dtype_name
from fsdp2x.base.failures import CheckpointError
from fsdp2x.train.config import ConfigError, TrainConfig

# ---- plain mappings


def read_config_text(path: str | Path) -> str:
    """Returns the text of a file, which may be a pipe. Raises `ConfigError`."""
    try:
        return read_text(Path(path), MOST_BYTES, may_be_pipe=True)
    except CheckpointError as error:
        raise ConfigError(f"config file {error}") from None


def read_yaml(path: str | Path, text: str | None = None) -> dict:
    """Returns the mapping of a file, or of its ``text`` if that is known. Raises `ConfigError`."""
    text = read_config_text(path) if text is None else text
    settings = load_yaml(text, f"config file {path}")
    if settings is None:
        settings = {}
    if not isinstance(settings, dict):
        raise ConfigError(f"config file {path}: got {describe(settings)}, expected a mapping of sections")
    for key in settings:
        if isinstance(key, str) and all(parts := key.split(".")) and len(parts) > 1:
            block = ": {".join(parts) + ": ..." + "}" * (len(parts) - 1)
            raise ConfigError(f"config file {path}: {key}: only the command line takes dotted keys. Write {block}")
    return settings


def apply_overrides(settings: Mapping[str, Any], overrides: Iterable[str]) -> dict:
    """Returns a copy of `settings` in which each `a.b.c=value` is set. Values are read as YAML."""
    result = _copy(settings)
    for key, value in read_overrides(overrides):
        set_path(result, key.split("."), value, "override ")
    return result


def read_overrides(overrides: Iterable[str]) -> list[tuple[str, Any]]:
    """Returns dotted key and value of each `a.b.c=value`. Values are read as YAML."""
    read = []
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()
        if not equals or not all(key.split(".")):
            raise ConfigError(f"override {override!r}: expected key=value with a dotted key, such as train.steps=100")
        read.append((key, load_yaml(text, f"override {key}={_short(text)}")))
    return read


def set_path(settings: dict, path: list, value: Any, what: str) -> None:
    """Sets a dotted key in place."""
    what += ".".join(map(str, path))
    target = settings
    for depth, part in enumerate(path[:-1], 1):
        if target.get(part) is None:
            target[part] = {}
        target = target[part]
        if not isinstance(target, dict):
            raise ConfigError(f"{what}: {'.'.join(map(str, path[:depth]))} is {describe(target)}, expected a mapping")
    target[path[-1]] = value


def _copy(value: Any) -> Any:
    return {key: _copy(inner) for key, inner in value.items()} if isinstance(value, Mapping) else value


def first_leaf(path: str, value: Any) -> str:
    """Returns the dotted path along the first keys of a mapping."""
    while isinstance(value, Mapping) and value:
        key, value = next(iter(value.items()))
        path = f"{path}.{key}"
    return path


# ---- typed settings

SECTIONS: dict[str, type] = typing.get_type_hints(TrainConfig)


class KnownKey(NamedTuple):
    kind: Any
    default: Any
    help: str


@functools.cache
def known_keys() -> dict[str, KnownKey]:
    """Returns every setting by its dotted path."""
    keys: dict[str, KnownKey] = {}
    for section, cls in SECTIONS.items():
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            default = field.default_factory() if callable(field.default_factory) else field.default
            keys[f"{section}.{field.name}"] = KnownKey(hints[field.name], default, field.metadata["help"])
    return keys


@checked(own=("settings",))
def parse_config(settings: Mapping[str, Any]) -> TrainConfig:
    """Returns the configuration of a nested mapping."""
    if not isinstance(settings, Mapping):
        raise ConfigError(f"config: got {describe(settings)}, expected a mapping")
    check_sections(settings)
    return TrainConfig(**{section: build(section, settings) for section in SECTIONS})


def build(section: str, settings: Mapping[str, Any]) -> Any:
    """Returns one section of `settings`, with every value checked."""
    values = settings.get(section)
    if not isinstance(values, Mapping | None):
        raise ConfigError(f"{section}: got {describe(values)}, expected a mapping")
    given = {f"{section}.{name}": (name, value) for name, value in (values or {}).items()}
    return SECTIONS[section](
        **{name: convert(known_keys()[path].kind, value, path) for path, (name, value) in given.items()}
    )


def check_sections(settings: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for keys that no section has, with the nearest ones."""
    known, wrong = [*known_keys(), *SECTIONS], []
    for section, values in settings.items():
        if section not in SECTIONS:
            wrong.append(first_leaf(str(section), values))
        elif isinstance(values, Mapping):
            inner = {f"{section}.{name}": value for name, value in values.items()}
            wrong += [first_leaf(path, value) for path, value in inner.items() if path not in known]
    refuse_unknown({path: path for path in wrong}, known)


def refuse_unknown(unknown: Mapping[str, str], keys: Collection[str]) -> None:
    """Raises `ConfigError` with one line for each of the ``unknown`` keys, if there are any.

    ``unknown`` maps a key as the user wrote it to the form of ``keys``, the known ones.
    """
    said = []
    for shown, path in unknown.items():
        near = nearest_key(path, keys)
        near = shown.removesuffix(path) + near if near and shown.endswith(f".{path}") else near
        if elsewhere := _does_elsewhere(path):
            said.append(f"unknown key {shown}. {elsewhere}")
        elif near:
            said.append(f"unknown key {shown}. Did you mean {near}?")
        else:
            said.append(f"unknown key {shown}. See fsdp2x config list.")
    if said:
        raise ConfigError("\n".join(said))


# ---- keys of other trainers


@functools.cache
def foreign_keys() -> dict[str, Any]:
    """Returns the table `keys.yaml`, which describes itself."""
    import yaml

    text = (resources.files("fsdp2x.train") / "keys.yaml").read_text(encoding="utf-8")
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


@functools.cache
def _by_word() -> dict[str, str]:
    return {word: key for key, words in foreign_keys()["names"].items() for word in words.split()}


def _plain(path: str) -> str:
    return re.sub("[-_]", "", path.rpartition(".")[2].lower())


def _does_elsewhere(path: str) -> str:
    """Returns the sentence about a key that `fsdp2x train` leaves to another program, or an empty string."""
    rows = foreign_keys()["elsewhere"]
    return next((row["say"] for row in rows if {path, _plain(path)} & {*row["names"].split()}), "")


def nearest_key(path: str, keys: Collection[str]) -> str:
    """Returns the key that ``path`` probably means, or "" if none is near.

    It tries a key of the same last name, but prefers a longer name in the same section (save_every for every). Then it
    tries other trainers' names of a setting, and then a similar spelling.
    """
    section, _, last = path.rpartition(".")
    elsewhere = [key for key in keys if key.rpartition(".")[2] == last]
    meant = _by_word().get(_plain(last), "")
    is_known = meant.partition("=")[0] in keys
    siblings = {key.rpartition(".")[2]: key for key in keys if section and key.rpartition(".")[0] == section}
    longer = [key for name, key in siblings.items() if name.endswith(f"_{last}")]
    if elsewhere and (section or not is_known):
        return (longer or elsewhere)[0]
    alike = difflib.get_close_matches(last, siblings, n=1, cutoff=0.8)
    if is_known and not alike:
        return meant
    alike = alike or difflib.get_close_matches(last, siblings, n=1, cutoff=0.6)
    return siblings[alike[0]] if alike else next(iter(difflib.get_close_matches(path, keys, n=1, cutoff=0.7)), "")


def convert(kind: Any, value: Any, path: str) -> Any:
    """Returns `value` as `kind`, or raises a `ConfigError` with what it got and expected."""
    try:
        return _convert(kind, value)
    except ValueError:
        words = [str(word) for word in _words(kind)]
        words += [alias for alias, name in DTYPE_NAMES.items() if name in words]
        near = difflib.get_close_matches(str(value), words, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{path}: got {describe(value)}, expected {type_name(kind)}{hint}") from None


def _convert(kind: Any, value: Any) -> Any:
    """Converts, or raises `ValueError` without a text."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        for option in args:
            try:
                return _convert(option, value)
            except ValueError:
                pass
    elif origin is Literal:
        if isinstance(value, bool) and "on" in args:
            return "on" if value else "off"  # YAML 1.1 reads these words as booleans
        if isinstance(value, str) and value not in args:
            value = dtype_name(value)
        if any(value == option and type(value) is type(option) for option in args):
            return value
    elif origin is list:
        values = [value] if args[0] is str and isinstance(value, str) else value
        if isinstance(values, list):
            return [_convert(args[0], item) for item in values]
    elif origin is tuple:
        if isinstance(value, list | tuple) and len(value) == len(args):
            return tuple(map(_convert, args, value))
    elif kind is float:
        # YAML 1.1 reads 1e-3 (no dot) as text.
        number = float(value) if type(value) in (int, float, str) else math.nan
        if not math.isnan(number):
            return number
    elif type(value) is kind:
        return value
    raise ValueError


def _words(kind: Any) -> list[Any]:
    """Returns the values of each `Literal` in `kind`."""
    args = typing.get_args(kind)
    return list(args) if typing.get_origin(kind) is Literal else [word for arg in args for word in _words(arg)]


def type_name(kind: Any) -> str:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(type_name(arg) for arg in args)
    if origin is Literal:
        return "one of " + ", ".join(map(str, args))
    if origin in (list, tuple):
        return f"list of {len(args) if origin is tuple else ''} {type_name(args[0])}".replace("  ", " ")
    return {type(None): "null", dict: "mapping"}.get(kind) or kind.__name__


def describe(value: Any) -> str:
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return f"a list ({_short(repr(value))})"
    return f"{_short(repr(value))} ({'null' if value is None else type(value).__name__})"


def show(value: Any) -> str:
    """Returns a value as YAML writes it."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {show(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(show, value)) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}..."


# ---- YAML from untrusted files: a few lines must not make an endless tree


MOST_BYTES = 1 << 20
MOST_VALUES = 20_000
DEEPEST = 64
_LARGEST = 2**64


def load_yaml(text: str, what: str) -> Any:
    """Returns the value of a text. `what` begins the sentence of a `ConfigError`.

    Raises:
        ConfigError: the text is not YAML, sets a key twice, has more than `MOST_VALUES` values (aliases count as often
            as they occur) or `DEEPEST` levels, or has a number of more than 64 bits.
    """
    import yaml

    try:
        return yaml.load(text, Loader=_loader())
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from None
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), _problem(error)
        line = f":{mark.line + 1}" if mark is not None and "\n" in text else ""
        shown = (text.splitlines()[mark.line : mark.line + 1] or [""])[0].strip() if mark is not None else ""
        near = f", near {_short(shown)!r}" if shown else ""
        raise ConfigError(f"{what}{line}: not valid YAML: {' '.join(problem.split())}{near}") from None
    except Exception as error:  # PyYAML's constructors raise various types for tags and dates
        raise ConfigError(f"{what}: a value cannot be read: {' '.join(str(error).split())}") from None


def _problem(error: Any) -> str:
    return ", ".join(filter(None, (getattr(error, name, None) for name in ("context", "problem")))) or str(error)


@functools.cache
def _loader() -> type:
    """Makes PyYAML's safe loader with limits. They act while nodes are composed, before anything is built."""
    import yaml

    class Loader(yaml.SafeLoader):
        num_values = depth = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            compose: Any = super().compose_node  # whose nodes get attributes of this loader
            line = self.peek_event().start_mark.line + 1
            if self.check_event(yaml.AliasEvent):
                node = compose(parent, index)
                if not hasattr(node, "num_values"):
                    raise ConfigError(f"the alias of line {line} contains itself")
                self._count(node.num_values, node.height, line)
                return node
            before = self.num_values
            self._count(1, 1, line)
            self.depth += 1
            node = compose(parent, index)
            self.depth -= 1
            children = node.value if not isinstance(node, yaml.ScalarNode) else []
            if isinstance(node, yaml.MappingNode):
                _refuse_repeated_keys(node)
                children = [part for pair in children for part in pair]
            node.num_values = self.num_values - before
            node.height = 1 + max((child.height for child in children), default=0)
            return node

        def _count(self, num_values: int, height: int, line: int) -> None:
            self.num_values += num_values
            if self.num_values > MOST_VALUES:
                raise ConfigError(f"line {line}: with its aliases the text has more than {MOST_VALUES} values")
            if self.depth + height > DEEPEST:
                raise ConfigError(f"line {line} is nested deeper than {DEEPEST} levels")

        def construct_yaml_int(self, node: Any) -> int:
            number = super().construct_yaml_int(node)
            if not -_LARGEST < number < _LARGEST:
                raise ConfigError("a number has more than 64 bits")
            return number

    Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_yaml_int)
    return Loader


def key_lines(text: str) -> dict[str, int]:
    """Returns the line of each key of a YAML text, by dotted path."""
    import yaml

    lines: dict[str, int] = {}

    def visit(node: Any, prefix: str) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if isinstance(key.value, str):
                    lines.setdefault(prefix + key.value, key.start_mark.line + 1)
                    visit(value, f"{prefix}{key.value}.")

    visit(yaml.compose(text, Loader=_loader()), "")
    return lines


def _refuse_repeated_keys(node: Any) -> None:
    """Raises for repeated keys, of which PyYAML would take the last."""
    lines: dict[str, int] = {}
    for key, _ in node.value:
        if isinstance(key.value, str):
            line = key.start_mark.line + 1
            if key.value in lines and key.value != "<<":
                raise ConfigError(f"{key.value} is set twice, in lines {lines[key.value]} and {line}. Keep one.")
            lines[key.value] = line
