"""YAML from untrusted files: a few lines must not make a tree without end, and every mistake is one sentence."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from fsdp2x.base.failures import CheckpointError
from fsdp2x.io.formats.safe_files import read_text
from fsdp2x.train.config import ConfigError

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

    Raises:
        ConfigError: the text is no YAML, sets a key twice, has more than `MOST_VALUES` values (aliases count as often
            as they occur) or `DEEPEST` levels, or a number of more than 64 bits.
    """
    import yaml

    try:
        return yaml.load(text, Loader=_loader())
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{what}: not valid YAML: {' '.join(str(error).split())}") from None
    except Exception as error:  # what PyYAML's constructors let through for tags and dates
        raise ConfigError(f"{what}: a value cannot be read: {' '.join(str(error).split())}") from None


@functools.cache
def _loader() -> type:
    """PyYAML's safe loader with the limits; they act while nodes are composed, before anything is built of them."""
    import yaml

    class Loader(yaml.SafeLoader):
        num_values = depth = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            line = self.peek_event().start_mark.line + 1
            if self.check_event(yaml.AliasEvent):
                node = super().compose_node(parent, index)
                if not hasattr(node, "num_values"):
                    raise ConfigError(f"the alias of line {line} stands for what it is in")
                self._count(node.num_values, node.height, line)
                return node
            before = self.num_values
            self._count(1, 1, line)
            self.depth += 1
            node = super().compose_node(parent, index)
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


def _refuse_repeated_keys(node: Any) -> None:
    """PyYAML takes the last one."""
    lines: dict[str, int] = {}
    for key, _ in node.value:
        if isinstance(key.value, str):
            line = key.start_mark.line + 1
            if key.value in lines and key.value != "<<":
                raise ConfigError(f"{key.value} is set twice, in lines {lines[key.value]} and {line}; keep one")
            lines[key.value] = line
