"""Wrong versions of the kernels, which the bodies must notice.

A mutant of the first kind changes one instruction, if a test that executes it must notice. It omits a store, truncates
a conversion, or removes a wait. A mutant of the second kind changes every instruction of its kind in a kernel, because
the compiler decides which single one matters.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from ptx_reader import Entry, Instruction
from ptx_translation import Mutant

Change = Callable[[Instruction], tuple[Instruction, ...] | None]  # None: not of its kind


def _leaves_a_store_out(instruction: Instruction) -> tuple[Instruction, ...] | None:
    return () if instruction.parts[0] == "st" else None


def _cuts_off(instruction: Instruction) -> tuple[Instruction, ...] | None:
    """Converts to bf16 by its upper half, rounded towards zero."""
    if instruction.opcode != "cvt.rn.bf16.f32":
        return None
    target, source = instruction.operands
    return (replace(instruction, opcode="mov.b32", operands=(f"{{_, {target}}}", source)),)


def _does_not_wait(instruction: Instruction) -> tuple[Instruction, ...] | None:
    return () if instruction.opcode == "bar.sync" else None


def _takes_the_other_extreme(instruction: Instruction) -> tuple[Instruction, ...] | None:
    """Takes the larger instead of the smaller, and the wrong one of two conditional values."""
    head, *rest = instruction.parts
    if head in ("min", "max"):
        return (replace(instruction, opcode=".".join(({"min": "max", "max": "min"}[head], *rest))),)
    if head == "selp":
        target, yes, no, condition = instruction.operands
        return (replace(instruction, operands=(target, no, yes, condition)),)
    return None


def _goes_one_too_far(instruction: Instruction) -> tuple[Instruction, ...] | None:
    """Ends loops and ranges one element late."""
    if instruction.opcode.startswith("setp.lt.s"):
        return (replace(instruction, opcode=instruction.opcode.replace(".lt.", ".le.")),)
    if instruction.opcode.startswith("setp.ge.s"):
        return (replace(instruction, opcode=instruction.opcode.replace(".ge.", ".gt.")),)
    return None


def _confuses_types(instruction: Instruction) -> tuple[Instruction, ...] | None:
    """Inverts a condition on modes and dtypes, which are 16-bit numbers."""
    for this, other in ((".eq.", ".ne."), (".ne.", ".eq.")):
        if instruction.parts[0] == "setp" and instruction.opcode.endswith("16") and this in instruction.opcode:
            return (replace(instruction, opcode=instruction.opcode.replace(this, other)),)
    return None


def _shortens_tiles(instruction: Instruction) -> tuple[Instruction, ...] | None:
    """Makes tiles of 4095 elements, at the places of those of 4096."""
    if "4096" not in instruction.operands or instruction.parts[0] == "bar":
        return None
    return (replace(instruction, operands=tuple("4095" if o == "4096" else o for o in instruction.operands)),)


def _rounds_twice(instruction: Instruction) -> tuple[Instruction, ...] | None:
    """Uses a product and a sum instead of the fused one."""
    if instruction.parts[0] != "fma":
        return None
    target, a, b, c = instruction.operands
    kind = instruction.parts[-1]
    product = replace(instruction, opcode=f"mul.rn.{kind}", operands=(target, a, b))
    return product, replace(instruction, opcode=f"add.rn.{kind}", operands=(target, target, c))


def _reads_the_next(instruction: Instruction) -> tuple[Instruction, ...] | None:
    """Reads every element of a vector from the place of the next one."""
    if instruction.parts[0] != "ld" or instruction.parts[-1] not in ("u8", "u16", "u32", "f32"):
        return None
    if len(instruction.parts) > 2 and instruction.parts[1:-1] != ["global"]:
        return None
    base = instruction.operands[1].strip("[]")
    if "+" in base:
        return None
    size = int(instruction.parts[-1][1:]) // 8
    return (replace(instruction, operands=(instruction.operands[0], f"[{base}+{size}]")),)


ONE_BY_ONE: tuple[Change, ...] = (_leaves_a_store_out, _cuts_off, _does_not_wait)
ALL_AT_ONCE: tuple[Change, ...] = (
    _takes_the_other_extreme,
    _goes_one_too_far,
    _confuses_types,
    _shortens_tiles,
    _rounds_twice,
    _reads_the_next,
)


def mutants(entry: Entry, most: int) -> Iterator[Mutant]:
    """Returns a kernel's mutants, at most `most` of each kind, spread over its instructions."""
    for change in (*ONE_BY_ONE, *ALL_AT_ONCE):
        found = {}
        for index, instruction in enumerate(entry.instructions):
            changed = change(instruction)
            if changed is not None:
                found[index] = changed
        kind = change.__name__[1:].replace("_", " ")
        if change in ONE_BY_ONE:
            chosen = sorted(found)[:: max(1, -(-len(found) // most))]
            yield from (Mutant(kind, {index: found[index]}) for index in chosen)
        elif found:
            yield Mutant(kind, found)
