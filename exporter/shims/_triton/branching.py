"""A kernel's code, in which programs may go ways of their own and be computed at once.

Where an `if` hangs on what differs from program to program, both ways are gone, each by the
programs that take it, and what has a name after that is chosen for each program. So are turns of a
loop that some programs have more of than others. What is executed is in `ways`; this writes calls
of it into the code:

    way = __way__(condition)            # of `if condition: x = a` and `else: x = b`
    before = way.kept(lambda: x)
    if way.first():
        x = a
    if way.both:
        then = way.kept(lambda: x)
        x, = before
    if way.second():
        x = b
    if way.both:
        x, = way.merged(then, lambda: x)
    way.end()
"""

import ast
from collections.abc import Iterator, Sequence

__all__ = ["EITHER", "TURNS", "WAY", "branching"]

EITHER, TURNS, WAY = "__either__", "__turns__", "__way__"
_OUT = "__out__"


def branching(kernel: ast.FunctionDef) -> None:
    """Writes ways into a kernel's code; those that are left in their midst stay as they are."""
    if (body := _returning_last(kernel.body)) is not None:
        out = ast.Return(ast.Name(_OUT, ast.Load()))
        kernel.body = [*body, ast.copy_location(out, kernel.body[-1])]
    kernel.body = _Ways().written(kernel.body, {_OUT})


# Where a function returns.


def _returning_last(statements: Sequence[ast.stmt]) -> list[ast.stmt] | None:
    """Statements that give what is returned a name, each way to its end; None where they do not."""
    for at, statement in enumerate(statements):
        if isinstance(statement, ast.Return):
            value = statement.value or ast.Constant(None)
            given = ast.Assign([ast.Name(_OUT, ast.Store())], value)
            return [*statements[:at], ast.copy_location(given, statement)]
        if not any(isinstance(node, ast.Return) for node in ast.walk(statement)):
            continue
        if not isinstance(statement, ast.If):
            return None
        rest = [*statements[at + 1 :]]
        then, other = statement.body, statement.orelse
        if _ends(then):
            other = [*other, *rest]
        elif _ends(other):
            then = [*then, *rest]
        elif rest:
            return None
        ways = _returning_last(then), _returning_last(other)
        if ways[0] is None or ways[1] is None:
            return None
        made = ast.If(statement.test, ways[0], ways[1])
        return [*statements[:at], ast.copy_location(made, statement)]
    last = ast.Assign([ast.Name(_OUT, ast.Store())], ast.Constant(None))
    return [*statements, ast.copy_location(last, statements[-1]) if statements else last]


def _ends(statements: Sequence[ast.stmt]) -> bool:
    """Whether they return in the end, whichever way they go."""
    last = statements[-1] if statements else None
    if isinstance(last, ast.If):
        return _ends(last.body) and _ends(last.orelse)
    return isinstance(last, ast.Return)


# Names.


def _loaded(*nodes: ast.AST) -> set[str]:
    """Names that are read."""
    inner = [child for node in nodes for child in ast.walk(node)]
    names = {n.id for n in inner if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    changed = [node.target for node in inner if isinstance(node, ast.AugAssign)]
    return names | _stored(*changed)


def _stored(*nodes: ast.AST) -> set[str]:
    """Names that are given."""
    inner = [child for node in nodes for child in ast.walk(node) if isinstance(child, ast.Name)]
    return {name.id for name in inner if not isinstance(name.ctx, ast.Load)}


def _is_left(statement: ast.stmt) -> bool:
    """Whether an `if` or a turn of a loop may be left in its midst."""
    ways_out = (ast.Break, ast.Continue, ast.Return, ast.Yield, ast.Global, ast.Nonlocal)
    return any(isinstance(node, ways_out) for node in _inside(statement))


def _inside(node: ast.AST) -> Iterator[ast.AST]:
    """What is in it; of loops inside, without `break` and `continue`, which are their own."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.For | ast.While):
            own = (ast.Break, ast.Continue)
            yield from (inner for inner in ast.walk(child) if not isinstance(inner, own))
        else:
            yield child
            yield from _inside(child)


class _Ways:
    """Counts the names that it makes."""

    def __init__(self) -> None:
        self._count = 0

    def written(self, statements: Sequence[ast.stmt], after: set[str]) -> list[ast.stmt]:
        """Statements with their ways.

        Args:
            statements: one after the other.
            after: names that may be read after these.
        """
        out: list[ast.stmt] = []
        for statement in reversed(statements):
            read = _loaded(statement)
            out = [*self._statement(statement, after), *out]
            after = after | read
        return out

    def _statement(self, statement: ast.stmt, after: set[str]) -> list[ast.stmt]:
        if isinstance(statement, ast.If):
            return self._if(statement, after)
        if isinstance(statement, ast.For):
            return self._for(statement, after)
        if isinstance(statement, ast.While):
            statement.body = self.written(statement.body, after | _loaded(statement))
        return [statement]

    def _if(self, node: ast.If, after: set[str]) -> list[ast.stmt]:
        names = sorted(_stored(node) & after)
        is_left = _is_left(node)
        node.body, node.orelse = self.written(node.body, after), self.written(node.orelse, after)
        if is_left:
            return [node]
        way = self._name()
        made = _parsed(f"{way} = {WAY}(0)", node)
        _argument(made[0], node.test)
        if names:
            made += _parsed(f"{way}_before = {way}.kept({_read(names)})", node)
        made += _parsed(f"if {way}.first(): pass", node, node.body)
        if names:
            text = f"if {way}.both:\n {way}_then = {way}.kept({_read(names)})\n"
            made += _parsed(f"{text} {_tuple(names)} = {way}_before", node)
        made += _parsed(f"if {way}.second(): pass", node, node.orelse)
        if names:
            merged = f"{way}.merged({way}_then, {way}.kept({_read(names)}))"
            made += _parsed(f"if {way}.both:\n {_tuple(names)} = {merged}", node)
        return [*made, *_parsed(f"{way}.end()", node)]

    def _for(self, node: ast.For, after: set[str]) -> list[ast.stmt]:
        names = sorted(_stored(*node.body) & after)
        is_left = bool(node.orelse) or _is_left(node)
        is_left |= bool(_stored(node.target) & after)
        node.body = self.written(node.body, after | _loaded(node))
        if is_left:
            return [node]
        turns = self._name()
        made = _parsed(f"{turns} = {TURNS}(0)", node)
        _argument(made[0], node.iter)
        node.iter = ast.copy_location(ast.Name(turns, ast.Load()), node.iter)
        if names:
            before = _parsed(f"{turns}_before = {turns}.kept({_read(names)})", node)
            merged = f"{turns}.merged({turns}.kept({_read(names)}), {turns}_before)"
            chosen = _parsed(f"if {turns}.both:\n {_tuple(names)} = {merged}", node)
            node.body = [*before, *node.body, *chosen]
        return [*made, node]

    def _name(self) -> str:
        self._count += 1
        return f"__way_{self._count}"


def _read(names: Sequence[str]) -> str:
    return ", ".join(f"lambda: {name}" for name in names)


def _tuple(names: Sequence[str]) -> str:
    return f"({', '.join(names)},)"


def _argument(statement: ast.stmt, value: ast.expr) -> None:
    """Gives what a statement calls its one argument."""
    called = next(node for node in ast.walk(statement) if isinstance(node, ast.Call))
    called.args = [value]


def _parsed(text: str, at: ast.stmt, body: Sequence[ast.stmt] | None = None) -> list[ast.stmt]:
    """Statements of a text, in the place of another one, around a body."""
    made = ast.parse(text).body
    for statement in made:
        for node in ast.walk(statement):
            ast.copy_location(node, at)
    if body is not None:
        (outer,) = made
        assert isinstance(outer, ast.If)
        outer.body = [*body, *outer.body]
    return made
