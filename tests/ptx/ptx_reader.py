"""Reads PTX: the kernels of a module, with their parameters, registers, and instructions."""

import re
from dataclasses import dataclass, field, replace

# Ends with its line, while everything else ends with a semicolon.
_LINE_DIRECTIVE = re.compile(r"\.(version|target|address_size|file|loc|maxntid|minnctapersm|reqntid)\b[^\n]*")
_VARIABLE = re.compile(
    r"\.(param|shared|local)\s+(?:\.align\s+(\d+)\s+)?\.[busf](\d+)\s+"
    r"(?:\.ptr\s+(?:\.\w+\s+)?\.align\s+\d+\s+)?([\w$]+)(?:\[(\d+)\])?"  # .ptr: of what the pointer points to
)
_LABEL = re.compile(r"([\w$]+):")
_ANONYMOUS = re.compile(r"\d+_GLOBAL__N__[0-9a-f]{8}_\d+_\w+?_cu_[0-9a-f]{8}")


class UnknownPtx(Exception):
    """Something that no kernel had so far. The message says what and where."""


@dataclass(frozen=True)
class Instruction:
    """`@!%p1 ld.global.v4.f32 {%f1, ...}, [%rd1+16];`"""

    opcode: str
    operands: tuple[str, ...]
    guard: str = ""  # "%p1", or "!%p1"
    source: str = ""  # its line of C++, and the line that it was inlined into

    @property
    def parts(self) -> list[str]:
        return self.opcode.split(".")

    def __str__(self) -> str:
        guard = f"@{self.guard} " if self.guard else ""
        return f"{guard}{self.opcode} {', '.join(self.operands)}"


@dataclass(frozen=True)
class Label:
    name: str


@dataclass
class Memory:
    """Consecutive variables: parameters, or the shared memory of a block."""

    places: dict[str, tuple[int, int]] = field(default_factory=dict)  # name: offset and bytes
    num_bytes: int = 0

    def add(self, name: str, num_bytes: int, alignment: int) -> None:
        offset = -(-self.num_bytes // alignment) * alignment
        self.places[name] = (offset, num_bytes)
        self.num_bytes = offset + num_bytes


@dataclass
class Entry:
    """A kernel."""

    name: str
    params: Memory = field(default_factory=Memory)
    shared: Memory = field(default_factory=Memory)
    registers: dict[str, int] = field(default_factory=dict)  # name: bits; 1: a predicate
    max_threads: int = 1024
    code: list[Instruction | Label] = field(default_factory=list)

    @property
    def instructions(self) -> list[Instruction]:
        return [item for item in self.code if isinstance(item, Instruction)]

    @property
    def waits(self) -> bool:
        """Whether its threads wait for others."""
        return any(i.parts[0] in ("bar", "nanosleep") for i in self.instructions)

    @property
    def title(self) -> str:
        """The kernel's name without namespaces: `PackBody`, `AdamWBody<true>`, `add_up_kernel`."""
        name = stable_name(self.name)
        for length in re.finditer(r"\d+", name):
            end = length.end() + int(length[0])
            identifier = name[length.end() : end]
            if identifier.endswith(("Body", "_kernel")):
                argument = re.match(r"ILb([01])E", name[end:])
                return identifier + ("" if argument is None else ("<false>", "<true>")[int(argument[1])])
        raise UnknownPtx(f"a kernel that is neither a body nor called so: {self.name}")


def stable_name(name: str) -> str:
    """Returns a kernel's mangled name without its anonymous namespace, which contains the source's path."""
    return _ANONYMOUS.sub("", name)


def split_operands(text: str) -> tuple[str, ...]:
    """Splits at the commas outside of braces and brackets."""
    return tuple(part.strip() for part in re.split(r",(?![^{\[]*[}\]])", text) if part.strip())


class _Reader:
    """Reads statements one after the other, until the end of the text."""

    def __init__(self, text: str) -> None:
        text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
        self._text = text.split("\n\t.section", 1)[0].split("\n.section", 1)[0]  # debug information is last
        self._at = 0

    def next(self) -> str | None:
        """Returns a directive, a label with its colon, a brace, or a statement without its semicolon."""
        text = self._text
        blank = re.compile(r"\s*").match(text, self._at)
        start = self._at = blank.end()
        if start == len(text):
            return None
        if text[start] in "{}()":
            self._at += 1
            return text[start]
        found = _LINE_DIRECTIVE.match(text, start) or re.compile(r"[\w$]+:").match(text, start)
        if found is not None:
            self._at = found.end()
            return found[0]
        if text.startswith((".visible .entry", ".entry", ".weak .entry"), start):
            self._at = text.index("(", start)
            return text[start : self._at].strip()
        end = text.index(";", start)
        self._at = end + 1
        return " ".join(text[start:end].split())

    def until(self, end: str) -> str:
        stop = self._text.index(end, self._at)
        found = self._text[self._at : stop]
        self._at = stop + len(end)
        return found


def read_module(text: str) -> list[Entry]:
    """Returns the entries of a module. Raises `UnknownPtx` for anything but separate kernels."""
    reader, entries = _Reader(text), []
    files = dict(re.findall(r'\.file\s+(\d+)\s+"(?:[^"]*/)?([^"]+)"', text))
    while (statement := reader.next()) is not None:
        if ".entry" in statement:
            entries.append(_read_entry(reader, statement.split()[-1], files))
        elif not statement.startswith((".version", ".target", ".address_size", ".file")):
            raise UnknownPtx(f"outside of kernels: {statement}")
    return entries


def _read_entry(reader: _Reader, name: str, files: dict[str, str]) -> Entry:
    entry = Entry(name)
    reader.until("(")
    for declaration in reader.until(")").split(","):
        _declare(entry.params, declaration)
    while (statement := reader.next()) != "{":
        if statement.startswith(".maxntid"):
            entry.max_threads = int(re.search(r"\d+", statement)[0])
    depth, source = 1, ""
    while depth > 0:
        statement = reader.next()
        if statement == "{":  # of inline assembler
            depth += 1
        elif statement == "}":
            depth -= 1
        elif statement.startswith(".loc"):
            source = _source_of(statement, files)
        elif statement.startswith(".reg"):
            _declare_registers(entry, statement)
        elif statement.startswith(".shared"):
            _declare(entry.shared, statement)
        elif statement.startswith(".pragma"):
            pass
        elif statement.startswith("."):
            raise UnknownPtx(f"{entry.title}: {statement}")
        elif _LABEL.fullmatch(statement):
            entry.code.append(Label(statement[:-1]))
        else:
            entry.code.append(_read_instruction(statement, source))
    return entry


def _declare(memory: Memory, declaration: str) -> None:
    if not declaration.strip():
        return
    found = _VARIABLE.search(declaration)
    if found is None:
        raise UnknownPtx(f"declaration: {declaration}")
    element = int(found[3]) // 8
    memory.add(found[4], element * int(found[5] or 1), int(found[2] or element))


def _declare_registers(entry: Entry, statement: str) -> None:
    kind, names = re.match(r"\.reg\s+\.(\w+)\s+(.*)", statement).groups()
    bits = 1 if kind == "pred" else int(kind[1:])
    for name in split_operands(names):
        numbered = re.fullmatch(r"(%\w+)<(\d+)>", name)
        if numbered is None:
            entry.registers[name] = bits
        else:
            entry.registers |= {f"{numbered[1]}{i}": bits for i in range(int(numbered[2]))}


def _source_of(directive: str, files: dict[str, str]) -> str:
    places = re.findall(r"(?:\.loc|inlined_at)\s+(\d+)\s+(\d+)", directive)
    return " in ".join(f"{files[number]}:{line}" for number, line in places)


def _read_instruction(statement: str, source: str) -> Instruction:
    guard = ""
    if statement.startswith("@"):
        guard, statement = statement[1:].split(None, 1)
    opcode, _, operands = statement.partition(" ")
    return replace(Instruction(opcode, split_operands(operands), source=source), guard=guard)
