"""Small faults that can be put into a module, one at a time. Pure: text in, text out.

Not drawn, because no behaviour depends on them:
    docstrings, texts and f-strings; annotations, decorators, `__all__`, `if TYPE_CHECKING`, `assert`
    lines that only print (`print`, `sys.stderr.write`), or sleep before another look (`time.sleep`)
    numbers of a module-level name with a unit (`GREETING_S = 5.0`, `MAX_NOTES`): sizes and times that were chosen
    `strict=` of zip: like an assert, it never fails
    how much is read at a time, how long is slept, how long a secret is: arguments of read, recv, sleep, token_hex
    what such a size or time is multiplied with (`2 * SALVAGE_S`); to how many digits is rounded
    `<` for `<=` where the clock is compared: two moments are never equal
    `del name`: that it is not used, or memory that goes sooner
    assignments in `__init__`: without them every test fails
"""

from __future__ import annotations

import ast
import bisect
import random
import re
from dataclasses import dataclass

_OPPOSITE = {
    ast.Lt: ("<", "<=", ">="),
    ast.LtE: ("<=", "<", ">"),
    ast.Gt: (">", ">=", "<="),
    ast.GtE: (">=", ">", "<"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
"""Operator -> its text, and what takes its place: of an order first its border, then its opposite."""
_CLOCK = re.compile(r"\bmonotonic\b|\btime\(\)|\bnow\b|\bdeadline\b|\bend\b|_at\b|_s\b|\blate\b|\bmoment\b")
_CHOSEN = re.compile(r"_?(MAX_\w+|\w+_(S|MS|BITS|BYTES|CHARS|LINES|HOSTS|NAMES|WORDS|AT_A_TIME))\Z")
_CHUNKED = {"read", "recv", "recv_into", "sleep", "wait", "token_hex", "token_bytes"}
_SILENT = {"time.sleep", "print", "sys.stderr.write", "sys.stdout.write", "sys.stderr.flush", "sys.stdout.flush"}


@dataclass(frozen=True)
class Mutation:
    """One fault: bytes `begin` to `end` of a file are replaced by `after`."""

    path: str
    """Relative to the repository."""
    line: int
    column: int
    begin: int
    end: int
    kind: str
    before: str
    after: str

    def apply(self, source):
        """Return the module with the fault; all other characters stay."""
        data = source.encode()
        return (data[: self.begin] + self.after.encode() + data[self.end :]).decode()

    def describe(self, source):
        """Return the lines that differ, as a diff shows them."""
        old, new = source.splitlines(), self.apply(source).splitlines()
        first = self.line - 1
        last = first + self.before.count("\n") + 1
        more = len(new) - len(old)
        return "\n".join(
            [*(f"  - {line}" for line in old[first:last]), *(f"  + {line}" for line in new[first : last + more])]
        )


def find_mutations(path, source):
    """Return every fault that can be put into a module; a few of them change nothing (`changes`)."""
    finder = _Finder(path, source)
    finder.visit(ast.parse(source))
    return finder.found


def draw(sources, number, seed):
    """Return faults in `number` lines, each line of those that can have one as likely as any other."""
    lines = {}
    for path in sorted(sources):
        for mutation in find_mutations(path, sources[path]):
            lines.setdefault((path, mutation.line), []).append(mutation)
    chance = random.Random(seed)  # the same seed draws the same lines of the same sources
    drawn = []
    for place in chance.sample(sorted(lines), len(lines)):
        if len(drawn) == number:
            break
        choices = chance.sample(lines[place], len(lines[place]))
        drawn += [mutation for mutation in choices if changes(mutation, sources[mutation.path])][:1]
    return drawn


def changes(mutation, source):
    """Return whether the result is a program, and another one."""
    try:
        changed = ast.dump(ast.parse(mutation.apply(source)))
    except SyntaxError:
        return False
    return changed != ast.dump(ast.parse(source))


def mark(source, places):
    """Return the module with `reach(number)` before the statement, or in the condition, at each of these bytes.

    What runs when the module is imported has its mark in every function of the module, too.
    """
    data, begins = source.encode(), [0]
    for line in source.encode().splitlines(keepends=True):
        begins.append(begins[-1] + len(line))

    def begin(node):
        return begins[node.lineno - 1] + node.col_offset

    def end(node):
        return begins[node.end_lineno - 1] + node.end_col_offset

    insertions = []

    def insert_before(node, text):
        first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])
        insertions.append((begins[first - 1], f"{' ' * node.col_offset}{text}\n"))

    statements = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]
    functions = [node for node in statements if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for number, place in places.items():
        call = f'__import__("msrun.reached").reached.reach({number})'
        node = max((node for node in statements if begin(node) <= place < end(node)), key=begin)
        if isinstance(node, ast.While) or data[begin(node) :].startswith(b"elif"):
            insertions += [(begin(node.test), f"{call} or ("), (end(node.test), ")")]
        else:
            insert_before(node, call)
        if not any(begin(function.body[0]) <= place < end(function) for function in functions):
            for function in functions:
                insert_before(function.body[min(len(function.body) - 1, bool(ast.get_docstring(function)))], call)
    for place, text in sorted(insertions, reverse=True):
        data = data[:place] + text.encode() + data[place:]
    return data.decode()


class _Finder(ast.NodeVisitor):
    def __init__(self, path, source):
        self._path = path
        self._data = source.encode()
        self._line_begins = [0]
        for line in self._data.splitlines(keepends=True):
            self._line_begins.append(self._line_begins[-1] + len(line))
        self._functions: list[ast.FunctionDef | ast.AsyncFunctionDef] = []
        self.found: list[Mutation] = []

    # -- places -----------------------------------------------------------------------------------------------------

    def _span(self, node):
        assert node.end_lineno is not None and node.end_col_offset is not None
        begins = self._line_begins
        return begins[node.lineno - 1] + node.col_offset, begins[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node):
        begin, end = self._span(node)
        return self._data[begin:end].decode()

    def _add(self, kind, begin, end, after):
        line = bisect.bisect_right(self._line_begins, begin)
        before = self._data[begin:end].decode()
        column = begin - self._line_begins[line - 1]
        self.found.append(Mutation(self._path, line, column, begin, end, kind, before, after))

    def _replace(self, kind, node, after):
        self._add(kind, *self._span(node), after)

    # -- what is left alone -----------------------------------------------------------------------------------------

    def visit_FunctionDef(self, node):
        for default in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
            self.visit(default)
        self._functions.append(node)
        self._visit_all(node.body)
        self._functions.pop()

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_ClassDef(self, node):
        self._visit_all(node.body)

    def visit_AnnAssign(self, node):
        self._visit_assigned([node.target], node.value, node)

    def visit_Assign(self, node):
        self._visit_assigned(node.targets, node.value, node)

    def visit_JoinedStr(self, node):
        """Leave texts."""

    def visit_Assert(self, node):
        """Leave what never fails."""

    # -- statements -------------------------------------------------------------------------------------------------

    def _visit_all(self, nodes):
        for node in nodes:
            self.visit(node)

    def _visit_assigned(self, targets, value, node):
        is_chosen = not self._functions and any(
            isinstance(target, ast.Name) and (target.id == "__all__" or _CHOSEN.match(target.id)) for target in targets
        )
        if value is None or is_chosen:
            return
        is_kept = any(isinstance(target, ast.Attribute | ast.Subscript) for target in targets)
        if is_kept and self._functions and self._functions[-1].name not in ("__init__", "__new__", "__post_init__"):
            self._replace("statement dropped", node, "pass")
        self._visit_all([*targets, value])

    def visit_AugAssign(self, node):
        self._replace("statement dropped", node, "pass")
        self.visit(node.value)

    def visit_Expr(self, node):
        value = node.value
        if isinstance(value, ast.Constant):  # a docstring
            return
        if isinstance(value, ast.Call) and ast.unparse(value.func) in _SILENT:
            return
        self._replace("statement dropped", node, "pass")
        self.visit(value)

    def _visit_jump(self, node):
        self._replace("statement dropped", node, "pass")
        self.generic_visit(node)

    visit_Break = visit_Continue = visit_Raise = _visit_jump  # noqa: N815

    def visit_Delete(self, node):
        if not all(isinstance(target, ast.Name) for target in node.targets):
            self._visit_jump(node)

    def visit_Return(self, node):
        if node.value is None:
            return
        returns = self._functions[-1].returns if self._functions else None
        if isinstance(returns, ast.Name) and returns.id == "bool":
            if not isinstance(node.value, ast.Constant | ast.Compare):
                self._replace("return changed", node, f"return not ({self._text(node.value)})")
        elif isinstance(node.value, ast.Constant) and node.value.value == "":
            self._replace("return changed", node, 'return "?"')  # None is as false as it
        elif not (isinstance(node.value, ast.Constant) and node.value.value is None):
            self._replace("return changed", node, "return None")
        self.visit(node.value)

    # -- conditions -------------------------------------------------------------------------------------------------

    def _negate(self, test):
        if isinstance(test, ast.UnaryOp | ast.Constant) or (isinstance(test, ast.Compare) and len(test.ops) == 1):
            return  # what stands there already does the same
        self._replace("condition negated", test, f"not ({self._text(test)})")

    def _visit_condition(self, node):
        if ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            return
        self._negate(node.test)
        self.generic_visit(node)

    visit_If = visit_While = visit_IfExp = _visit_condition  # noqa: N815

    def visit_comprehension(self, node):
        for test in node.ifs:
            self._negate(test)
        self.generic_visit(node)

    def visit_UnaryOp(self, node):
        if isinstance(node.op, ast.Not):
            self._replace("condition negated", node, f"bool({self._text(node.operand)})")
        self.generic_visit(node)

    def visit_BoolOp(self, node):
        other = " or " if isinstance(node.op, ast.And) else " and "
        self._replace("and/or swapped", node, f"({other.join(f'({self._text(value)})' for value in node.values)})")
        self.generic_visit(node)

    def visit_Compare(self, node):
        operands = [node.left, *node.comparators]
        for left, operator, right in zip(operands, node.ops, operands[1:], strict=False):
            if type(operator) not in _OPPOSITE:
                continue
            own, *others = _OPPOSITE[type(operator)]
            is_number = any(isinstance(operand, ast.Constant) for operand in (left, right))
            if len(others) > 1 and not is_number and _CLOCK.search(self._text(node)):
                others = others[1:]
            begin, end = self._span(left)[1], self._span(right)[0]
            between = self._data[begin:end].decode()
            for other in others:
                self._add("comparison swapped", begin, end, between.replace(own, other, 1))
        self.generic_visit(node)

    # -- values -----------------------------------------------------------------------------------------------------

    def visit_Call(self, node):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in _CHUNKED:
            self.visit(node.func)
        elif name == "zip":
            self._visit_all(node.args)
        elif name == "round":
            self._visit_all(node.args[:1])
        else:
            self.generic_visit(node)

    def visit_BinOp(self, node):
        sides = (node.left, node.right)
        is_chosen = isinstance(node.op, ast.Mult | ast.Div) and any(
            _CHOSEN.match(getattr(side, "attr", "") or getattr(side, "id", "")) for side in sides
        )
        if not (is_chosen and any(isinstance(side, ast.Constant) for side in sides)):
            self.generic_visit(node)

    def visit_Constant(self, node):
        if isinstance(node.value, bool):
            self._replace("constant shifted", node, str(not node.value))
        elif isinstance(node.value, int | float):
            self._replace("constant shifted", node, f"{node.value + 1!r}")
