"""YAML of others: read with limits, and every mistake is one sentence.

YAML lets a few lines stand for a tree without end, and PyYAML follows it: by aliases of aliases, by an alias of what
it is in, by thousands of brackets.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fsdp2x.errors import CheckpointError

from ..reading.safe_files import read_text
from .config import ConfigError

MOST_BYTES = 1 << 20
MOST_VALUES = 20_000
DEEPEST = 64
_LARGEST = 2**64


def load_yaml_file(path: Path) -> Any:
    """The value of a file, which may be a pipe; raises `ConfigError`."""
    try:
        text = read_text(path, MOST_BYTES, may_be_pipe=True)
    except CheckpointError as error:
        raise ConfigError(f"config file {error}") from None
    return load_yaml(text, f"config file {path}")


def load_yaml(text: str, what: str) -> Any:
    """The value of a text; `what` begins the sentence of a `ConfigError`.

    Raised for what is no YAML, for a key that is set twice, more than `MOST_VALUES` values (aliases counted as often as
    they stand), `DEEPEST` levels, and numbers of more than 64 bits.
    """
    import yaml

    loader = None
    try:
        _check_events(yaml.parse(text, Loader=yaml.SafeLoader), what)
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check_node(node, what)
        value = loader.construct_document(node)
    except ConfigError:
        raise
    except yaml.YAMLError as error:
        raise ConfigError(f"{what}: not valid YAML: {' '.join(str(error).split())}") from None
    except Exception as error:  # what PyYAML's constructors let through for tags and dates
        raise ConfigError(f"{what}: a value cannot be read: {' '.join(str(error).split())}") from None
    finally:
        if loader is not None:
            loader.dispose()
    _check_numbers(value, what)
    return value


def _check_events(events: Any, what: str) -> None:
    """Depth and number of what stands in the text, before anything follows it recursively."""
    import yaml

    depth = 0
    for number, event in enumerate(events):
        if number > 2 * MOST_VALUES:
            raise ConfigError(f"{what}: it has more than {MOST_VALUES} values")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > DEEPEST:
                raise ConfigError(f"{what}: line {event.start_mark.line + 1} is nested deeper than {DEEPEST} levels")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _check_node(root: Any, what: str) -> None:
    """Keys that are set twice, of which YAML's loader takes the last; aliases that are endless or too many."""
    import yaml

    sizes: dict[int, int] = {}
    open_: set[int] = set()

    def count(node: Any, depth: int) -> int:
        """Values that a node stands for."""
        line = node.start_mark.line + 1
        if id(node) in open_:
            raise ConfigError(f"{what}: the alias of line {line} stands for what it is in")
        if depth > DEEPEST:
            raise ConfigError(f"{what}: aliases of line {line} are nested deeper than {DEEPEST} levels")
        if id(node) not in sizes:
            open_.add(id(node))
            children: list[Any] = []
            if isinstance(node, yaml.SequenceNode):
                children = node.value
            elif isinstance(node, yaml.MappingNode):
                _check_keys(node, what)
                children = [part for pair in node.value for part in pair]
            sizes[id(node)] = 1 + sum(count(child, depth + 1) for child in children)
            open_.discard(id(node))
        if sizes[id(node)] > MOST_VALUES:
            raise ConfigError(f"{what}: with its aliases line {line} stands for more than {MOST_VALUES} values")
        return sizes[id(node)]

    count(root, 0)


def _check_keys(node: Any, what: str) -> None:
    import yaml

    lines: dict[str, int] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        line = key.start_mark.line + 1
        if key.value in lines and key.value != "<<":
            raise ConfigError(f"{what}: {key.value} is set twice, in lines {lines[key.value]} and {line}; keep one")
        lines[key.value] = line


def _check_numbers(value: Any, what: str) -> None:
    """Numbers that could not even be printed."""
    if isinstance(value, dict):
        for key, inner in value.items():
            _check_numbers(key, what)
            _check_numbers(inner, what)
    elif isinstance(value, list | tuple | set):
        for inner in value:
            _check_numbers(inner, what)
    elif isinstance(value, int) and not -_LARGEST < value < _LARGEST:
        raise ConfigError(f"{what}: a number has more than 64 bits")
