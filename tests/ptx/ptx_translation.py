"""Translates a PTX kernel to a C++ function, with marks of executed instructions."""

from collections.abc import Iterable, Sequence

from ptx_instructions import Translator, identifier
from ptx_reader import Entry, Instruction, Label, stable_name

HEADER = '#include "grid.hpp"\n#include "values.hpp"\n\nnamespace fsdp2x::ptx {\nnamespace {\n\n'
_ENDS_BLOCK = ("bra", "ret")


def leaders(entry: Entry) -> list[int]:
    """Returns, for each instruction, the number of the one whose mark shows that it was executed.

    Consecutive instructions share the first one's mark. Guarded ones have their own.
    """
    result, leader, number = [], -1, 0
    for item in entry.code:
        if isinstance(item, Label):
            leader = -1
            continue
        if leader < 0:
            leader = number
        ends = item.parts[0] in _ENDS_BLOCK
        result.append(number if item.guard and not ends else leader)
        if ends:
            leader = -1
        number += 1
    return result


def executed(entry: Entry, reached: Sequence[bool]) -> list[bool]:
    """Returns, for each instruction, whether a thread executed it with a true guard. Branches count if reached."""
    return [reached[leader] for leader in leaders(entry)]


def _statement(translator: Translator, instruction: Instruction, mark: str) -> str:
    code = translator.translate(instruction)
    if not instruction.guard:
        return f"{mark}{code}"
    condition = translator.value(instruction.guard, "pred")
    if instruction.parts[0] in _ENDS_BLOCK:
        return f"{mark}if ({condition}) {code}"
    return f"if ({condition}) {{ {mark}{code} }}"


def _function(entry: Entry) -> Iterable[str]:
    translator, marked = Translator(entry), leaders(entry)
    for bits in (1, 16, 32, 64):
        names = [identifier(name) for name, width in entry.registers.items() if width == bits]
        if names:
            yield f"  {'pred' if bits == 1 else f'u{bits}'} {', '.join(f'{name} = 0' for name in names)};"
    index = 0
    for item in entry.code:
        if isinstance(item, Label):
            yield f" {identifier(item.name)}:;"
            continue
        mark = f"mark({index}); " if marked[index] == index else ""
        yield f"  {_statement(translator, item, mark)}"
        index += 1


def translate(entry: Entry) -> str:
    """Returns a C++ file that defines the kernel `FSDP2X_KERNEL`. The compile command sets this name."""
    result, call = ("Fiber", "start") if entry.waits else ("void", "run")
    places = ", ".join(f"{{{offset}, {num_bytes}}}" for offset, num_bytes in entry.params.places.values())
    lines = [
        f"uint8_t reached[{len(entry.instructions)}];",
        f"constexpr Place params[] = {{{places}}};",
        "",
        "inline void mark(int number) { __atomic_store_n(&reached[number], uint8_t{1}, __ATOMIC_RELAXED); }",
        "",
        f"{result} {call}_thread(const Thread& t) {{",
        *_function(entry),
        "}",
        "",
        "}  // namespace",
        "",
        "extern const Kernel FSDP2X_KERNEL;",
        "const Kernel FSDP2X_KERNEL = {",
        f'    .name = "{stable_name(entry.name)}",',
        f"    .run = {'nullptr' if entry.waits else 'run_thread'},",
        f"    .start = {'start_thread' if entry.waits else 'nullptr'},",
        "    .params = params,",
        f"    .shared_bytes = {entry.shared.num_bytes},",
        f"    .max_threads = {entry.max_threads},",
        "    .reached = reached,",
        "};",
        "",
        "}  // namespace fsdp2x::ptx",
    ]
    return HEADER + "\n".join(lines) + "\n"
