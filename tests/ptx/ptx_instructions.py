"""Translates one PTX instruction to C++. Registers are unsigned integers of their width; `values.hpp` has the rest.

Unknown instructions raise `UnknownPtx`, so that none is guessed. This includes roundings other than to nearest even,
flushed subnormals, and approximations, which the kernels must not have.
"""

import re
from collections.abc import Callable

from ptx_reader import Entry, Instruction, UnknownPtx

FLOATS = ("f16", "bf16", "f32", "f64")
_INEXACT = {"rz", "rm", "rp", "ftz", "sat", "approx", "full", "relu"}
_OPERATORS = {"add": "+", "sub": "-", "mul": "*", "div": "/", "rem": "%", "and": "&", "or": "|", "xor": "^"}
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_COMPARISONS |= {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
_SPECIAL = {f"%{name}.{axis}": f"t.{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"}
_SPECIAL |= {"%globaltimer": "nanoseconds()"}


def identifier(name: str) -> str:
    """Returns a register or label as a C++ name that is no type's, since a register is called %f16."""
    return name.replace("%", "").replace("$", "") + "_"


def bits_of(type_: str) -> int:
    return 1 if type_ == "pred" else int(type_.lstrip("bfsu"))


def unsigned(type_: str) -> str:
    return type_ if type_ == "pred" else f"u{bits_of(type_)}"


def cpp_type(type_: str) -> str:
    """`b32` moves as `u32` does."""
    return f"u{type_[1:]}" if type_[0] == "b" and type_ != "bf16" else type_


class Translator:
    """Translates the instructions of one kernel."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry

    def translate(self, instruction: Instruction) -> str:
        """Returns C++ statements with the effect of `instruction` if its guard holds."""
        head = instruction.parts[0]
        if head not in _TRANSLATIONS:
            raise UnknownPtx(f"{self.entry.title}: {instruction}")
        try:
            return _TRANSLATIONS[head](self, instruction.parts, instruction.operands)
        except (LookupError, ValueError, TypeError) as error:
            raise UnknownPtx(f"{self.entry.title}: {instruction}") from error

    # --- operands ---

    def value(self, text: str, type_: str) -> str:
        """Returns an operand as a value of `type_`."""
        type_ = cpp_type(type_)
        if text.startswith("!"):
            return f"!{identifier(text[1:])}"
        if text in _SPECIAL:
            return f"as<{type_}>({_SPECIAL[text]})"
        if text.startswith("%") or text in self.entry.registers:
            return identifier(text) if type_ == "pred" else f"as<{type_}>({identifier(text)})"
        if found := re.fullmatch(r"0[fFdD]([0-9A-Fa-f]+)", text):
            return f"as<{type_}>(u{4 * len(found[1])}(0x{found[1]}))"
        if re.fullmatch(r"-?(0x)?[0-9A-Fa-f]+U?", text):
            number = int(text.rstrip("U"), 0)
            return str(bool(number)).lower() if type_ == "pred" else f"as<{type_}>(u64({number % 2**64:#x}))"
        if text in self.entry.params.places:
            return f"as<{type_}>(address_of(t.params + {self.entry.params.places[text][0]}))"
        return f"{type_}({self.entry.shared.places[text][0]})"

    def put(self, register: str, expression: str) -> str:
        """Puts the value of `expression`, extended by its type's sign, into a register."""
        bits = self.entry.registers[register]
        return f"{identifier(register)} = " + (f"{expression};" if bits == 1 else f"to<u{bits}>({expression});")

    def address(self, text: str, parts: list[str]) -> str:
        base, offset = re.fullmatch(r"\[([^+\]]+?)(?:\+(-?\d+))?\]", text).groups()
        if base in self.entry.params.places:
            return f"t.params + {self.entry.params.places[base][0] + int(offset or 0)}"
        start = "t.shared + " if "shared" in parts else "pointer_to("
        return f"{start}{self.value(base, 'u64')} + {int(offset or 0)}" + ("" if "shared" in parts else ")")


def names_in(operand: str) -> list[str]:
    """Returns the registers of a vector, or a single one."""
    return [name.strip() for name in operand.strip("{}").split(",")]


def require_exact(parts: list[str]) -> None:
    """Raises for a float operation that does not round to nearest even."""
    if not _INEXACT.isdisjoint(parts):
        raise ValueError


# --- memory ---------------------------------------------------------------------------------------------------------


def _load(t: Translator, parts: list[str], operands: tuple[str, ...]) -> str:
    names, type_ = names_in(operands[0]), cpp_type(parts[-1])
    where = t.address(operands[1], parts)
    if "acquire" in parts:
        return t.put(names[0], f"load_acquire<{type_}>({where})")
    size = bits_of(type_) // 8
    reads = [t.put(name, f"load<{type_}>(p + {i * size})") for i, name in enumerate(names) if name != "_"]
    return f"{{ const char* p = aligned<{size * len(names)}>({where}); {' '.join(reads)} }}"


def _store(t: Translator, parts: list[str], operands: tuple[str, ...]) -> str:
    names, type_ = names_in(operands[1]), cpp_type(parts[-1])
    where = t.address(operands[0], parts)
    if "release" in parts:
        return f"store_release<{type_}>({where}, {t.value(names[0], type_)});"
    size = bits_of(type_) // 8
    writes = [f"store<{type_}>(p + {i * size}, {t.value(name, type_)});" for i, name in enumerate(names)]
    return f"{{ char* p = aligned<{size * len(names)}>({where}); {' '.join(writes)} }}"


def _convert_address(t: Translator, parts: list[str], operands: tuple[str, ...]) -> str:
    if not {"global", "param"} & set(parts):
        raise ValueError
    return t.put(operands[0], t.value(operands[1], "u64"))


# --- moves ----------------------------------------------------------------------------------------------------------


def _move(t: Translator, parts: list[str], operands: tuple[str, ...]) -> str:
    target, source = operands
    type_ = cpp_type(parts[-1])
    if target.startswith("{"):
        names = names_in(target)
        width = bits_of(type_) // len(names)
        writes = [t.put(name, f"u{width}(whole >> {i * width})") for i, name in enumerate(names) if name != "_"]
        return f"{{ const u{bits_of(type_)} whole = {t.value(source, type_)}; {' '.join(writes)} }}"
    if source.startswith("{"):
        names = names_in(source)
        width = bits_of(type_) // len(names)
        terms = [f"{type_}({t.value(name, f'u{width}')}) << {i * width}" for i, name in enumerate(names)]
        return t.put(target, f"{type_}({' | '.join(terms)})")
    return t.put(target, t.value(source, type_))


def _select(t: Translator, parts: list[str], operands: tuple[str, ...]) -> str:
    yes, no = (t.value(operand, parts[-1]) for operand in operands[1:3])
    return t.put(operands[0], f"{t.value(operands[3], 'pred')} ? {yes} : {no}")


def _convert(t: Translator, parts: list[str], operands: tuple[str, ...]) -> str:
    to, from_ = parts[-2:]
    if parts[1] == "rzi" and from_ in FLOATS and to not in FLOATS and len(parts) == 4:
        return t.put(operands[0], f"cut_off<{cpp_type(to)}>({t.value(operands[1], from_)})")
    rounds = to in FLOATS and (from_ not in FLOATS or bits_of(to) < bits_of(from_))
    if len(operands) != 2 or (from_ in FLOATS and to not in FLOATS) or rounds != ("rn" in parts) or "sat" in parts:
        raise ValueError
    require_exact(parts)
    return t.put(operands[0], f"{cpp_type(to)}({t.value(operands[1], from_)})")


# --- arithmetic -----------------------------------------------------------------------------------------------------


def _arithmetic(t: Translator, parts: list[str], operands: tuple[str, ...]) -> str:
    head, type_ = parts[0], parts[-1]
    require_exact(parts)
    if type_ in FLOATS:
        if "rn" not in parts:  # without it ptxas may fuse a product into a sum
            raise ValueError
    elif head in ("mul", "mad"):
        return _product(t, parts, operands)
    elif head not in ("div", "rem"):
        type_ = unsigned(type_)
    x, y = (t.value(operand, type_) for operand in operands[1:])
    return t.put(operands[0], f"{cpp_type(type_)}({x} {_OPERATORS[head]} {y})")


def _product(t: Translator, parts: list[str], operands: tuple[str, ...]) -> str:
    half, type_ = parts[1], parts[-1]
    wide = f"{type_[0]}{2 * bits_of(type_)}"
    whole = f"{wide}({t.value(operands[1], type_)}) * {wide}({t.value(operands[2], type_)})"
    out = wide if half == "wide" else type_
    product = {"wide": whole, "lo": whole, "hi": f"({whole}) >> {bits_of(type_)}"}[half]
    product = f"{unsigned(out)}({product})"
    if parts[0] == "mad":
        product = f"{unsigned(out)}({product} + {t.value(operands[3], unsigned(out))})"
    return t.put(operands[0], product)


def _fused(t: Translator, parts: list[str], operands: tuple[str, ...]) -> str:
    require_exact(parts)
    values = ", ".join(t.value(operand, parts[-1]) for operand in operands[1:])
    return t.put(operands[0], f"std::fma({values})")


def _of_one(t: Translator, parts: list[str], operands: tuple[str, ...]) -> str:
    head, type_ = parts[0], parts[-1] if parts[-1] in FLOATS else unsigned(parts[-1])
    require_exact(parts)
    if head in ("sqrt", "rcp") and "rn" not in parts:
        raise ValueError
    x = t.value(operands[1], type_)
    forms = {"neg": "-{}", "not": "~{}", "sqrt": "std::sqrt({})", "rcp": "1 / {}", "popc": "std::popcount({})"}
    forms["abs"] = "std::fabs({})" if type_ in FLOATS else "magnitude({})"
    if type_ == "pred":
        return t.put(operands[0], f"!{x}")
    return t.put(operands[0], f"{type_}({forms[head].format(x)})")


def _extreme(t: Translator, parts: list[str], operands: tuple[str, ...]) -> str:
    if parts[-1] in FLOATS:
        require_exact(parts)
        if len(parts) != 2:
            raise ValueError
        function = {"min": "smaller", "max": "larger"}[parts[0]]
        return t.put(operands[0], f"{function}({t.value(operands[1], parts[-1])}, {t.value(operands[2], parts[-1])})")
    return t.put(operands[0], f"std::{parts[0]}({t.value(operands[1], parts[-1])}, {t.value(operands[2], parts[-1])})")


def _shift(t: Translator, parts: list[str], operands: tuple[str, ...]) -> str:
    type_ = cpp_type(parts[-1])
    function = {"shl": "shift_left", "shr": "shift_right"}[parts[0]]
    return t.put(operands[0], f"{function}<{type_}>({t.value(operands[1], type_)}, {t.value(operands[2], 'u32')})")


def _bits(t: Translator, parts: list[str], operands: tuple[str, ...]) -> str:
    """Translates 32-bit instructions for which `values.hpp` has a function of the same name."""
    if parts == ["bfe", "s32"]:  # the bits, extended by their sign: only of a complete byte
        if operands[3] != "8":
            raise ValueError
        return t.put(operands[0], f"s32(s8(bfe({', '.join(t.value(operand, 'u32') for operand in operands[1:])})))")
    if parts[1:] not in (["b32"], ["u32"]):
        raise ValueError
    return t.put(operands[0], f"{parts[0]}({', '.join(t.value(operand, 'u32') for operand in operands[1:])})")


def _funnel_shift(t: Translator, parts: list[str], operands: tuple[str, ...]) -> str:
    """Shifts 64 bits, and returns the upper half after a left shift or the lower half after a right shift."""
    if parts[2:] != ["wrap", "b32"]:
        raise ValueError
    function = {"l": "funnel_left", "r": "funnel_right"}[parts[1]]
    return t.put(operands[0], f"{function}({', '.join(t.value(operand, 'u32') for operand in operands[1:])})")


def _compare(t: Translator, parts: list[str], operands: tuple[str, ...]) -> str:
    comparison, type_ = parts[1], parts[-1]
    x, y = t.value(operands[1], type_), t.value(operands[2], type_)
    is_float = type_ in FLOATS
    if is_float and comparison in ("nan", "num"):
        result = f"{'!' if comparison == 'num' else ''}unordered({x}, {y})"
    elif is_float and comparison.endswith("u"):
        result = f"(unordered({x}, {y}) || {x} {_COMPARISONS[comparison[:-1]]} {y})"
    elif is_float and comparison == "ne":
        result = f"(!unordered({x}, {y}) && {x} != {y})"
    else:
        result = f"({x} {_COMPARISONS[comparison]} {y})"
    if len(parts) == 4:
        operator = {"and": "&&", "or": "||", "xor": "!="}[parts[2]]
        result = f"({result} {operator} {t.value(operands[3], 'pred')})"
    return t.put(operands[0], result)


# --- control --------------------------------------------------------------------------------------------------------


def _wait(t: Translator, parts: list[str], operands: tuple[str, ...]) -> str:
    if parts[0] == "bar" and (parts[1:] != ["sync"] or operands != ("0",)):
        raise ValueError
    return f"co_await Fiber::Wait{{{'true' if parts[0] == 'bar' else 'false'}}};"


_TRANSLATIONS: dict[str, Callable[[Translator, list[str], tuple[str, ...]], str]] = {
    "ld": _load,
    "st": _store,
    "cvta": _convert_address,
    "mov": _move,
    "selp": _select,
    "cvt": _convert,
    "fma": _fused,
    "setp": _compare,
    "bar": _wait,
    "nanosleep": _wait,
    "membar": lambda t, parts, operands: "std::atomic_thread_fence(std::memory_order_seq_cst);",
    "ret": lambda t, parts, operands: "co_return;" if t.entry.waits else "return;",
    "bra": lambda t, parts, operands: f"goto {identifier(operands[0])};",
    **dict.fromkeys(("add", "sub", "mul", "mad", "div", "rem", "and", "or", "xor"), _arithmetic),
    **dict.fromkeys(("abs", "neg", "not", "sqrt", "rcp", "popc"), _of_one),
    **dict.fromkeys(("min", "max"), _extreme),
    **dict.fromkeys(("shl", "shr"), _shift),
    **dict.fromkeys(("prmt", "bfe", "bfi"), _bits),
    "shf": _funnel_shift,
}
