"""Reads the PTX text of one kernel into instructions."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

PARAM = re.compile(r"\.param(?: \.align \d+)? \.(\w+) (\w+)(?:\[(\d+)\])?")
SCALAR_BYTES = {"u32": 4, "s32": 4, "b32": 4, "f32": 4, "u64": 8, "s64": 8, "b64": 8}
GUARD = re.compile(r"@(!?)([%\w]+)\s+")
PIECE = re.compile(r"\{[^}]*\}|\[(?:[^\[\]{}]|\{[^}]*\})*\]|[^,\s{}\[\]]+")


class Guard(NamedTuple):
    """An instruction runs in the lanes where `name` is true, or false if `negated`."""

    name: str
    negated: bool


@dataclass(frozen=True)
class Instruction:
    """`op` is the name with its modifiers, such as ld.global.b32. An operand is a name, a number, '[address]' or
    '{several}'."""

    op: str
    operands: tuple[str, ...]
    guard: Guard | None = None


class Scope(NamedTuple):
    """A block, and the registers that it declares."""

    suffix: str
    names: set[str]

    def named(self, operand: str) -> str:
        return re.sub(r"%?\w+", lambda word: word[0] + self.suffix if word[0] in self.names else word[0], operand)


@dataclass
class Text:
    """A kernel.

    params        the size of each parameter in bytes
    registers     the type of each register that a block declares by name
    labels        the instruction that a label stands before
    """

    params: dict[str, int] = field(default_factory=dict)
    registers: dict[str, str] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    threads: int = 0


def read(source: str) -> Text:
    """The only kernel of a PTX file."""
    source = re.sub(r"//.*", "", source)
    entry = source[source.index(".visible .entry") :]
    head, body = entry.split("{", 1)
    text = Text()
    for kind, name, count in PARAM.findall(head):
        text.params[name] = int(count) if count else SCALAR_BYTES[kind]
    sizes = re.search(r"\.reqntid (\d+), (\d+), (\d+)", head)
    assert sizes is not None, "the kernel does not say how many threads a CTA has"
    text.threads = int(sizes[1]) * int(sizes[2]) * int(sizes[3])
    _read_body(body[: body.rindex("}")], text)
    return text


def _read_body(body: str, text: Text) -> None:
    """Blocks '{ ... }' may declare the same name. So a declared name gets the number of its block."""
    scopes, blocks = [Scope("", set())], 0
    for line in _statements(body):
        if line == "{":
            blocks += 1
            scopes.append(Scope(f"@{blocks}", set()))
        elif line == "}":
            scopes.pop()
        elif line.endswith(":"):
            text.labels[line[:-1] + scopes[-1].suffix] = len(text.instructions)
        elif line.startswith(".reg") and len(scopes) > 1:
            kind, names = re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", line).groups()  # type: ignore[union-attr]
            for name in names.split(","):
                scopes[-1].names.add(name.strip())
                text.registers[name.strip() + scopes[-1].suffix] = kind
        elif not line.startswith("."):
            text.instructions.append(_instruction(line, scopes[-1]))


def _statements(body: str) -> list[str]:
    """Statements without their semicolons, labels with their colons, and the braces of blocks."""
    out: list[str] = []
    for part in re.split(r"(;)", body):
        rest = part.strip()
        while rest:
            label = re.match(r"([$\w]+:)(?!:)\s*", rest)
            if label:
                out.append(label[1])
                rest = rest[label.end() :]
            elif rest[0] in "{}":
                out.append(rest[0])
                rest = rest[1:].lstrip()
            else:
                if rest != ";":
                    out.append(rest)
                break
    return out


def _instruction(line: str, scope: Scope) -> Instruction:
    guard = GUARD.match(line)
    if guard:
        line = line[guard.end() :]
    op, *rest = line.split(None, 1)
    operands = tuple(scope.named(piece) for piece in PIECE.findall(rest[0])) if rest else ()
    if op.startswith("bra") and scope.suffix and not operands[0].startswith("$"):
        operands = (operands[0] + scope.suffix,)
    return Instruction(op, operands, Guard(scope.named(guard[2]), guard[1] == "!") if guard else None)
