"""Rewards of responses: built-in functions or a user's from a file, several of them with weights.

A function has the signature of TRL's reward functions, with texts: `reward(completions, prompts=..., **columns)` gets a
list of texts and, by name, a list for each column of the rows. It returns a number for each completion. None counts as
zero.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import re
import sys
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp2x.train.config import ConfigError
from fsdp2x.train.grpo.config import RewardSection

Values = Sequence[float | None]
NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:[eE][-+]?\d+)?")


@dataclass(frozen=True)
class Reward:
    """One function with its weight and its name in metrics."""

    name: str
    weight: float
    function: Callable[..., Values]


def make_rewards(config: RewardSection, answer_column: str) -> list[Reward]:
    """Returns the functions of `reward.functions`.

    Raises:
        ConfigError: a name or option is unknown, or a file cannot be imported or lacks the function.
    """
    found: list[Reward] = []
    for index, entry in enumerate(config.functions):
        where = f"reward.functions[{index}]"
        options = {"name": entry} if isinstance(entry, str) else dict(entry) if isinstance(entry, Mapping) else {}
        name, weight = options.pop("name", None), options.pop("weight", 1.0)
        if not isinstance(name, str):
            raise ConfigError(f"{where}: got {entry!r}, expected a name or a mapping with the key name")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            raise ConfigError(f"{where}.weight: got {weight!r}, expected a number")
        if ":" in name:
            made = Reward(name.rpartition(":")[2], float(weight), _from_file(name, options, where))
        else:
            made = Reward(name, float(weight), _built_in(name, options, answer_column, where))
        if made.name in [other.name for other in found]:
            raise ConfigError(f"{where}: {made.name} appears twice. Add their weights, or give one another name.")
        found.append(made)
    return found


def total_reward(
    rewards: Sequence[Reward],
    config: RewardSection,
    prompts: list[Any],
    completions: list[str],
    columns: dict[str, list],
) -> tuple[list[float], dict[str, list[float]]]:
    """Returns the weighted sum for each completion, and the values of each function by name.

    Raises:
        ConfigError: a function raised, or did not return a finite number for each completion.
    """
    parts: dict[str, list[float]] = {}
    sums = [0.0] * len(completions)
    for reward in rewards:
        if not completions:
            parts[reward.name] = []
            continue
        try:
            values = reward.function(completions, prompts=prompts, **columns)
        except ConfigError:
            raise
        except Exception as error:
            said = " ".join(str(error).split())
            raise ConfigError(f"reward {reward.name}: {type(error).__name__}: {said}") from error
        values = [0.0 if value is None else float(value) for value in values]
        if len(values) != len(completions) or not all(map(math.isfinite, values)):
            raise ConfigError(
                f"reward {reward.name}: expected a finite number for each of {len(completions)} completions, got "
                f"{len(values)} values"
            )
        parts[reward.name] = values
        sums = [total + reward.weight * value for total, value in zip(sums, values, strict=True)]
    if config.clip is not None:
        sums = [min(max(total, -config.clip), config.clip) for total in sums]
    return sums, parts


def _from_file(name: str, options: dict[str, Any], where: str) -> Callable[..., Values]:
    file, _, attribute = name.rpartition(":")
    path = Path(file).expanduser()
    if not path.is_file():
        raise ConfigError(f"{where}: {file}: no such file. Write FILE.py:FUNCTION.")
    module_name = f"fsdp2x_reward_{abs(hash(path.resolve()))}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{where}: {file}: expected a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"{where}: {file} cannot be imported: {type(error).__name__}: {error}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        names = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        raise ConfigError(f"{where}: {file} has no function {attribute}. It has: {', '.join(names) or 'none'}.")
    if not options:
        return function

    def with_options(completions: list[str], **columns: Any) -> Values:
        return function(completions, **columns, **options)

    return with_options


def _built_in(name: str, options: dict[str, Any], answer_column: str, where: str) -> Callable[..., Values]:
    if name not in BUILT_IN:
        raise ConfigError(f"{where}: unknown reward {name!r}. Built in are {', '.join(BUILT_IN)}, or FILE.py:FUNCTION.")
    function = BUILT_IN[name]
    known = {
        key: parameter
        for key, parameter in inspect.signature(function).parameters.items()
        if key not in ("completion", "answer")
    }
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ConfigError(f"{where}: {name} has no option {unknown[0]!r}. It has {', '.join(known) or 'none'}.")
    missing = [key for key, one in known.items() if one.default is one.empty and key not in options]
    if missing:
        raise ConfigError(f"{where}: {name} needs the option {missing[0]}")
    if name == "math_verify" and importlib.util.find_spec("math_verify") is None:
        raise ConfigError(f"{where}: the package math-verify is not installed. Run `pip install math-verify`.")
    if name == "regex":
        try:
            re.compile(options["pattern"])
        except (re.error, TypeError) as error:
            raise ConfigError(f"{where}.pattern: {error}") from None
    needs_answer = "answer" in inspect.signature(function).parameters

    def of_all(completions: list[str], **columns: Any) -> Values:
        if not needs_answer:
            return [function(completion, **options) for completion in completions]
        if answer_column not in columns:
            raise ConfigError(f"reward {name}: the rows have no column {answer_column!r}. See data.answer_column.")
        answers = columns[answer_column]
        return [function(text, answer=answer, **options) for text, answer in zip(completions, answers, strict=True)]

    return of_all


# ---- built in: each returns 1 for a correct response, 0 otherwise, or a part in between


def _normal(text: Any) -> str:
    """Removes case, punctuation at the ends, and runs of spaces."""
    words = unicodedata.normalize("NFKC", str(text)).casefold().split()
    return " ".join(words).strip(" .,;:!?\"'`*")


def exact_match(completion: str, answer: Any, ignore_case: bool = True) -> float:
    """Returns 1 if the response is the answer, ignoring case, spaces and punctuation at its ends."""
    if not ignore_case:
        return float(str(completion).strip() == str(answer).strip())
    return float(_normal(completion) == _normal(answer))


def contains(completion: str, answer: Any) -> float:
    """Returns 1 if the response contains the answer as complete words."""
    wanted = _normal(answer)
    return float(bool(wanted) and re.search(rf"(?<!\w){re.escape(wanted)}(?!\w)", _normal(completion)) is not None)


def regex(completion: str, pattern: str, whole: bool = False) -> float:
    """Returns 1 if the pattern matches in the response, or with `whole` matches all of it."""
    return float((re.fullmatch if whole else re.search)(pattern, completion, re.DOTALL) is not None)


def number(completion: str, answer: Any, tolerance: float = 1e-6) -> float:
    """Returns 1 if the last number in the response is the answer's last number, as GSM8K is scored."""
    found, wanted = last_number(completion), last_number(str(answer))
    if wanted is None:
        raise ConfigError(f"reward number: the answer {answer!r} has no number")
    return float(found is not None and abs(found - wanted) <= tolerance * max(1.0, abs(wanted)))


def last_number(text: str) -> float | None:
    """Returns the last number of a text, without commas between thousands."""
    found = [match for match in NUMBER.findall(text) if any(character.isdigit() for character in match)]
    return float(found[-1].replace(",", "")) if found else None


def length(completion: str, target: int, slack: int = 0) -> float:
    """Returns 1 up to `target` characters, falling linearly to 0 over `slack` more."""
    beyond = len(completion) - target
    if beyond <= 0:
        return 1.0
    return max(1.0 - beyond / slack, 0.0) if slack else 0.0


def math_verify(completion: str, answer: Any) -> float:
    """Returns 1 if the package math-verify finds the response equal to the answer."""
    verifier: Any = importlib.import_module("math_verify")

    return float(verifier.verify(verifier.parse(str(answer)), verifier.parse(completion)))


BUILT_IN: dict[str, Callable[..., float]] = {
    "exact_match": exact_match,
    "contains": contains,
    "regex": regex,
    "number": number,
    "length": length,
    "math_verify": math_verify,
}
