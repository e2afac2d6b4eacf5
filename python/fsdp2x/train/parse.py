"""Reads YAML and `key=value` overrides as plain mappings, and names the known keys nearest to unknown ones."""

from __future__ import annotations

import difflib
import functools
import itertools
import re
from collections.abc import Collection, Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from fsdp2x.base.errors import CheckpointError, ConfigError, reworded

# ---- plain mappings


def read_yaml(path: str | Path) -> dict:
    """Returns the mapping of a file, which may be a pipe. Raises `ConfigError`."""
    return read_lines(path)[0]


def read_lines(path: str | Path) -> tuple[dict, dict[str, int]]:
    """Returns the mapping of a file, and the line of each of its dotted keys. Raises `ConfigError`."""
    from fsdp2x.api import how_to_download, read_text

    hint = how_to_download(path)
    with reworded(ConfigError, lambda error: f"config file {error}{'.' * bool(hint)}{hint}", CheckpointError):
        text = read_text(Path(path), MOST_BYTES, may_be_pipe=True)
    settings, lines = _load(text, f"config file {path}")
    settings = {} if settings is None else settings
    if not isinstance(settings, dict):
        raise ConfigError(f"config file {path}: got {describe(settings)}, expected a mapping of sections")
    for key in settings:
        if isinstance(key, str) and all(parts := key.split(".")) and len(parts) > 1:
            block = ": {".join(parts) + ": ..." + "}" * (len(parts) - 1)
            raise ConfigError(f"config file {path}: {key}: only the command line takes dotted keys. Write {block}")
    return settings, lines


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


# ---- unknown keys


def refuse_unknown(unknown: Mapping[str, str], keys: Collection[str]) -> None:
    """Raises `ConfigError` with one line for each of the ``unknown`` keys, if there are any.

    ``unknown`` maps a key as the user wrote it to the form of ``keys``, the known ones.
    """
    if unknown:
        raise ConfigError("\n".join(say_unknown(shown, path, keys) for shown, path in unknown.items()))


def say_unknown(shown: str, path: str, keys: Collection[str]) -> str:
    """Returns a sentence about an unknown key with the nearest one of ``keys``."""
    near = nearest_key(path, keys)
    near = shown.removesuffix(path) + near if near and shown.endswith(f".{path}") else near
    if elsewhere := _does_elsewhere(path):
        return f"unknown key {shown}. {elsewhere}"
    return f"unknown key {shown}. Did you mean {near}?" if near else f"unknown key {shown}. See fsdp2x config list."


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


def name_of(word: str) -> str:
    """Returns the setting that another trainer's name means, or an empty string."""
    return _by_word().get(_plain(word), "")


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
    meant = name_of(last)
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
    return _load(text, what)[0]


def _load(text: str, what: str) -> tuple[Any, dict[str, int]]:
    """Returns the value of a text, and the line of each of its dotted keys."""
    import yaml

    try:
        loader = _loader()(text)
        loader.name = "the text"
        node = loader.get_single_node()
        lines = {} if node is None else _find_lines(node)
        return None if node is None else loader.construct_document(node), lines
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from None
    except RecursionError:
        raise ConfigError(f"{what}: the text is nested deeper than {DEEPEST} levels") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None and "\n" in text else ""
        raise ConfigError(f"{what}{line}: not valid YAML: {' '.join(str(error).split())}") from None
    except Exception as error:  # PyYAML's constructors raise various types for tags and dates
        raise ConfigError(f"{what}: a value cannot be read: {' '.join(str(error).split())}") from None


@functools.cache
def _loader() -> type:
    """Makes PyYAML's safe loader with YAML 1.2's numbers: 1e-3 is one, and none has more than 64 bits."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_yaml_int(self, node: Any) -> int:
            number = super().construct_yaml_int(node)
            if not -_LARGEST < number < _LARGEST:
                raise ConfigError("a number has more than 64 bits")
            return number

    Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_yaml_int)
    exponent = re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", exponent, list("-+0123456789"))
    return Loader


def _find_lines(root: Any) -> dict[str, int]:
    """Returns the line of each dotted key of a tree of nodes. Raises `ConfigError` for a tree over the limits."""
    import yaml

    lines: dict[str, int] = {}
    numbers = itertools.count(1)

    def visit(node: Any, prefix: str, depth: int) -> None:
        line = node.start_mark.line + 1
        if next(numbers) > MOST_VALUES:
            raise ConfigError(f"line {line}: with its aliases the text has more than {MOST_VALUES} values")
        if depth > DEEPEST:
            raise ConfigError(f"line {line} is nested deeper than {DEEPEST} levels")
        seen: dict[str, int] = {}
        for key, value in node.value if isinstance(node, yaml.MappingNode) else []:
            path, line = prefix, key.start_mark.line + 1
            if isinstance(key.value, str):
                if key.value in seen and key.value != "<<":  # PyYAML would take the last
                    raise ConfigError(f"{key.value} is set twice, in lines {seen[key.value]} and {line}. Keep one.")
                seen[key.value] = line
                path = f"{prefix}{key.value}"[:200]
                lines.setdefault(path, line)
            visit(key, "", depth + 1)
            visit(value, f"{path}.", depth + 1)
        for item in node.value if isinstance(node, yaml.SequenceNode) else []:
            visit(item, f"{prefix}[].", depth + 1)

    visit(root, "", 1)
    return lines
