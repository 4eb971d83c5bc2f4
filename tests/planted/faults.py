"""Which faults can be planted in a file, which of them are chosen, and where one is in a file that has changed."""

from __future__ import annotations

import ast
import contextlib
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

PACKAGES = ("fabfile.py", "launch", "keeper", "containers", "train", "playbooks", "benchmarks")
LONGEST = 200  # characters of an expression

#: These two install into .venv, which all copies of the tree share.
EXCLUDED = ("launch/bootstrap.py", "train/model/torchvision_cpu.py")
#: Functions that delete or kill: a fault there may harm the machine that runs the tests.
DANGEROUS = re.compile(r"rmtree|\bkill|\brm\b|umount")

OPERATORS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
}
#: No test can find `<=` for `<` between times.
CLOCK = re.compile(r"monotonic|perf_counter|time\(")
SYMMETRIC = ("min", "max", "print", "isinstance", "issubclass", "hasattr", "getattr")  # or the swap is not worth a try

Function = ast.FunctionDef | ast.AsyncFunctionDef
Span = tuple[int, int]


class CannotPlaceError(Exception):
    """The source has changed so much that a fault has no place in it."""


@dataclass(frozen=True)
class Fault:
    """One fault. `line` is where it was when it was chosen; `tests` are lab test files for code that runs on hosts."""

    id: str
    file: str
    function: str
    line: int
    kind: str
    original: str
    replacement: str
    lab: bool = False
    tests: tuple[str, ...] = ()


class Source:
    """A file's text, its functions by their qualified names, and the offsets of nodes of its syntax tree."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._lines = text.split("\n")
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line) + 1)
        self.functions = defaultdict[str, list[Function]](list)
        for name, function in _functions(ast.parse(text)):
            self.functions[name].append(function)

    def offset(self, line: int, column: int) -> int:
        """Of a character; `column` counts bytes, as ast does."""
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def span(self, node: ast.expr | ast.stmt) -> Span:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self.offset(node.lineno, node.col_offset), self.offset(node.end_lineno, node.end_col_offset)

    def line(self, offset: int) -> int:
        return self.text.count("\n", 0, offset) + 1


def _functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef):
            if isinstance(child, Function):
                yield prefix + child.name, child
            yield from _functions(child, f"{prefix}{child.name}.")
        else:
            yield from _functions(child, prefix)


def place(source: Source, fault: Fault) -> Span:
    """Where the fault's original text is. Raises CannotPlaceError unless that is exactly one place."""
    found = source.functions[fault.function]
    if len(found) != 1:
        raise CannotPlaceError(f"{fault.file} has {len(found)} functions {fault.function}")
    text = r"\s+".join(map(re.escape, fault.original.split()))
    before, after = (r"(?<![\w.])" if text[0].isalnum() else ""), (r"(?!\w)" if text[-1].isalnum() else "")
    spans = [match.span() for match in re.compile(before + text + after).finditer(source.text, *source.span(found[0]))]
    if len(spans) != 1:
        raise CannotPlaceError(f"{fault.file}, {fault.function}: `{fault.original}` is there {len(spans)} times")
    return spans[0]


def planted(text: str, fault: Fault) -> str:
    """The file's text with the fault in it."""
    start, end = place(Source(text), fault)
    return text[:start] + fault.replacement + text[end:]


def candidates(file: str, source: Source) -> Iterator[Fault]:
    """All faults that can be planted in a file, each in exactly one place."""
    text = source.text
    for name, (function, *_) in source.functions.items() if file not in EXCLUDED else ():
        if DANGEROUS.search(text, *source.span(function)):
            continue
        for node in _own_nodes(function):
            for kind, (start, end), replacement in _faults_of(source, node):
                fault = Fault("", file, name, source.line(start), kind, text[start:end], replacement)
                with contextlib.suppress(CannotPlaceError):
                    if end - start <= LONGEST and place(source, fault) == (start, end):
                        yield fault


def _own_nodes(function: Function) -> Iterator[ast.AST]:
    """Without those of nested functions, and of f-strings, whose positions Python 3.11 does not know."""
    todo: list[ast.AST] = [*function.body]
    while todo:
        node = todo.pop(0)
        if not isinstance(node, Function | ast.ClassDef | ast.JoinedStr):
            yield node
            todo.extend(ast.iter_child_nodes(node))


def _faults_of(source: Source, node: ast.AST) -> Iterator[tuple[str, Span, str]]:
    """Kind, place and replacement."""
    text = source.text
    if isinstance(node, ast.Compare | ast.BoolOp):
        operands = [node.left, *node.comparators] if isinstance(node, ast.Compare) else node.values[:2]
        start, end = source.span(node)
        for operator, left, right in zip(
            node.ops if isinstance(node, ast.Compare) else [node.op], operands, operands[1:], strict=False
        ):
            old, new = OPERATORS[type(operator)]
            after_left, before_right = source.span(left)[1], source.span(right)[0]
            gap, count = re.subn(old.replace(" ", r"\s+"), new, text[after_left:before_right])
            if count == 1 and not (old[0] in "<>" and CLOCK.search(text, start, end)):
                changed = text[start:after_left] + gap + text[before_right:end]
                yield f"wrong comparison: {old} to {new}", (start, end), changed
    elif isinstance(node, ast.Call):
        start, end = source.span(node)
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name in ("min", "max"):
            new = "max" if name == "min" else "min"
            yield f"wrong comparison: {name} to {new}", (start, end), new + text[start + len(name) : end]
        for first, second in zip(node.args, node.args[1:], strict=False):
            a, b = source.span(first), source.span(second)
            alike = _is_simple(first) and _is_simple(second) and _is_constant(first) == _is_constant(second)
            if alike and name not in SYMMETRIC and text[slice(*a)] != text[slice(*b)]:
                swapped = text[slice(*b)] + text[a[1] : b[0]] + text[slice(*a)]
                yield "swapped arguments", (start, end), text[start : a[0]] + swapped + text[b[1] : end]
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        start, end = source.span(node)
        yield "missing check: not", (start, end), text[start + 3 : end].lstrip()
    elif isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise | ast.Return | ast.Continue):
        start, end = source.span(node)[0], text.index(":", source.span(node.test)[1]) + 1
        binds = any(isinstance(child, ast.NamedExpr) for child in ast.walk(node.test))
        if len(node.body) == 1 and not binds and ast.unparse(node.test) != "TYPE_CHECKING":
            keyword = "elif" if text.startswith("elif", start) else "if"
            kind = type(node.body[-1]).__name__.lower()
            yield f"missing check: if ... {kind}", (start, end), f"{keyword} False:"


def _is_simple(node: ast.expr) -> bool:
    if isinstance(node, ast.Attribute | ast.Subscript):
        return _is_simple(node.value)
    return isinstance(node, ast.Name | ast.Constant)


def _is_constant(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant)


def package(file: str) -> str:
    return file.split("/")[0]


def quotas(lines: Mapping[str, int], count: int, least: int) -> dict[str, int]:
    """How many faults each package gets: at least so many, the rest by its lines of code."""
    given = dict.fromkeys(lines, least)
    while sum(given.values()) < count:
        given[max(lines, key=lambda name: lines[name] / (given[name] + 1))] += 1
    return given


def choose(found: Sequence[Fault], wanted: Mapping[str, int], seed: int) -> list[Fault]:
    """By chance, but of all kinds alike, from many files, and one in each function."""
    pool = random.Random(seed).sample(found, len(found))
    chosen, used = list[Fault](), Counter[str]()
    for name in (name for name, quota in wanted.items() for _ in range(quota)):
        free = [fault for fault in pool if package(fault.file) == name and not used[_function(fault)]]
        if free:
            best = min(free, key=lambda fault: (used[_family(fault)], used[fault.kind], used[fault.file]))
            chosen.append(best)
            used.update({_function(best), best.kind, best.file})
            used[_family(best)] += 1
    return chosen


def _family(fault: Fault) -> str:
    return f"family {fault.kind.split(':')[0]}"


def _function(fault: Fault) -> str:
    return f"{fault.file}::{fault.function}"
