"""Helpers for the tables of other policy trainers: rows that move or change, and settings that all formats imply."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from fsdp2x.train.config import ConfigError
from fsdp2x.train.grpo.config import GrpoConfig
from fsdp2x.train.parse import known_keys
from fsdp2x.train.translate import KeyResult, Row, Translation, becomes, only

KINDS = {key: known.kind for key, known in known_keys(GrpoConfig).items()}
SERVER = "it is an option of the server itself"
TOKENS = "micro-batches are cut by data.max_tokens, their budget of tokens"
EVALUATION = "evaluation samples as training does, except for its temperature"
MEMORY = "a colocated engine samples while the trainers' memory is freed, in any case"
ONE_SEQUENCE = "sequences are not cut over ranks here; set it to 1 and lower the token budget"
LIKE_POLICY = "the reference model is sharded and packed as the policy is"


def keeps(default: Any, otherwise: str, kind: Any = bool) -> Row:
    """Returns a row for a key that may only have its neutral value."""
    return only(default, "nothing is changed", otherwise, kind)


def acts_on(keys: str, kind: Any = bool) -> Row:
    """A key that other keys of the file look at."""
    return Row(kind=kind, note=f"acts on {keys}", by=lambda *_: KeyResult(remark=f"see {keys}", used=True))


def parts(whole: int, part: int, of: str) -> int:
    """Returns how many times `part` goes into `whole` samples of a rollout."""
    if part < 1 or whole % part:
        raise ConfigError(f"got {part}, which does not divide the {whole} samples of a rollout ({of})")
    return whole // part


def reference_path(policy: str, has_kl: Any) -> Row:
    def by(value: str, given: Mapping) -> KeyResult:
        if not has_kl(given):
            return KeyResult(remark="the KL has no weight, so there is no reference model")
        if value == given.get(policy):
            return KeyResult(remark="the policy's weights before training", used=True)
        return KeyResult({"reference.path": value})

    return becomes("reference.path", by=by, note=", if it is not the policy")


def moved(rows: Mapping[str, Row], prefix: str) -> dict[str, Row]:
    """Returns the rows inside `prefix`. Rows that read other keys of the file see them without it."""

    def inside(row: Row) -> Row:
        by = row.by
        if not callable(by):
            return row

        def look(value: Any, given: Mapping) -> Any:
            return by(value, {**given, **{key.removeprefix(prefix): one for key, one in given.items()}})

        return dataclasses.replace(row, by=look)

    return {prefix + key: inside(row) for key, row in rows.items()}


def of_reference(rows: Mapping[str, Row]) -> dict[str, Row]:
    """Returns rows of a policy for the frozen model, of which only dtype and place count."""
    places = {"parallel.param_dtype": "dtype", "model.dtype": "dtype", "parallel.offload": "offload"}

    def one(row: Row) -> Row:
        names = [f"reference.{places[path]}" for path in row.to if path in places]
        if not names:
            return Row(remark=row.remark if not row.to and row.remark else LIKE_POLICY)

        def by(value: Any, given: Mapping) -> KeyResult:
            found = row.apply("", value, given)
            became = {f"reference.{places[path]}": setting for path, setting in found.became.items() if path in places}
            return KeyResult(became, "" if became else found.remark, found.used)

        return Row(tuple(names), by, row.kind)

    return {key: one(row) for key, row in rows.items()}


def is_given(found: Translation, ours: Mapping[str, Any], path: str) -> bool:
    """Returns whether a key of the file or the command line sets it."""
    section, _, name = path.partition(".")
    return name in (found.settings.get(section) or {}) or name in (ours.get(section) or {})


def imply_all(found: Translation, ours: Mapping[str, Any], kl: str) -> None:
    """Adds settings that all three formats imply, and what is missing."""
    files = {**(found.settings.get("data") or {}), **(ours.get("data") or {})}.get("files") or []
    files = [files] if isinstance(files, str) else files
    is_parquet = bool(files) and all(str(file).endswith(".parquet") for file in files)
    found.imply("(data)", "data.format", "parquet" if is_parquet else "jsonl", "by the names of the files")
    if not is_given(found, ours, "data.validation_files"):
        found.imply("(data)", "data.held_out", 0.0, "all prompts are trained on")
    if (found.settings.get("algorithm") or {}).get("kl_weight"):
        found.imply("(algorithm)", "algorithm.kl", kl, "the estimate that it has there")
    rollout = {**(found.settings.get("rollout") or {}), **(ours.get("rollout") or {})}
    if rollout.get("engine") in ("vllm", "sglang") and not rollout.get("addresses"):
        found.needs.append(
            f"rollout.addresses=[URL]: a running {rollout['engine']} server (or rollout.engine=server, which starts "
            "fsdp2x's own)"
        )


def if_critic(path: str) -> Row:
    def by(value: float, given: Mapping) -> KeyResult:
        on = given.get("adv_estimator", given.get("advantage_estimator")) in ("gae", "ppo")
        return KeyResult({path: value}) if on else KeyResult(remark="there is no critic")

    return becomes(path, by=by, note=" with a critic")
