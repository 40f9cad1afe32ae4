"""A TorchScript file with values of its code handed out, and parts of it by themselves.

The code in the archive is edited as text, since it is what the file's runtimes run: a straight line
of statements, which Python's grammar reads too. Its parameters stay as they are.
"""

import ast
import operator
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import fx
from torch._ops import OpOverload

from fuseport.exporter.program import Program
from fuseport.exporter.verify.localise import parts
from fuseport.exporter.verify.localise.written import Written

__all__ = ["ScriptFile"]

_RESULT = "fuseport_result"
_GIVEN = "fuseport_given_"
_SET_ITEM = "torch._set_item"
_INDENT = "    "
_RETURNED = ("Tensor", "Dict[str, Tensor]")


@dataclass(frozen=True)
class ScriptFile:
    """A candidate, see `candidates.Candidate`.

    Attributes:
        runtime: that runs it.
        artifact: the file.
        member: of the archive, that has the code.
        text: of that.
        names: node of the program → what its value is called in the code.
        given: of these, the inputs.
        output: the name of the file's one output; None where it returns them by name.
        method: how it is looked into.
    """

    runtime: str
    artifact: Path
    member: str
    text: str
    names: Mapping[str, str]
    given: Sequence[str]
    output: str | None
    method: Literal["intermediates", "bisection"] = "intermediates"

    @classmethod
    def of(cls, runtime: str, artifact: Path, program: Program) -> "ScriptFile":
        """The candidate for a file that was made from `program`, or changed after that.

        Raises:
            LookupError: its code has none of the program's values under their names.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TorchScript is deprecated, and says so at every call
            module = torch.jit.load(str(artifact), map_location="cpu")
        path = module._c._type().qualified_name().rpartition(".")[0].replace(".", "/")
        with zipfile.ZipFile(artifact) as archive:
            member = next(n for n in archive.namelist() if n.endswith(f"/code/{path}.py"))
            text = archive.read(member).decode()
        text, results = _with_results(text, program.outputs[0].name)
        function = _forward(text)
        known = {name for statement in function.body for name in _made(statement)}
        nodes = list(program.exported.graph.nodes)
        names = {node.name: f"v_{node.name}" for node in nodes if f"v_{node.name}" in known}
        users = [str(name) for name in program.exported.graph_signature.user_inputs]
        arguments = [argument.arg for argument in function.args.args[1:]]
        returned = None if function.returns is None else ast.unparse(function.returns)
        if not names or len(users) != len(arguments) or returned not in _RETURNED:
            raise LookupError(f"{artifact.name} has none of the program's values under their names")
        names |= _of_several(function, nodes)
        given = dict(zip(users, arguments, strict=True))
        output = program.outputs[0].name if returned == "Tensor" else None
        # What is given as an output stands for the node that is that output, whatever it is.
        nodes_of = parts.node_of(program)
        names |= {nodes_of[name]: value for name, value in results.items() if name in nodes_of}
        return cls(runtime, artifact, member, text, {**names, **given}, tuple(given), output)

    @property
    def visible(self) -> frozenset[str]:
        """As `candidates.Candidate` says."""
        return frozenset(self.names)

    def whole(self, names: Sequence[str], folder: Path) -> Written:
        """As `candidates.Candidate` says."""
        function = _forward(self.text)
        *body, last = function.body
        assert isinstance(last, ast.Return)
        assert last.value is not None
        returned = ast.unparse(last.value)
        if self.output is None:
            lines = [f"{_RESULT} = {returned}"]
        else:
            lines = [_EMPTY, _item(self.output, returned)]
        wanted = {name: self.names[name] for name in names}
        lines += [_item(value, value) for value in dict.fromkeys(wanted.values())]
        lines.append(f"return {_RESULT}")
        arguments = [argument.arg for argument in function.args.args[1:]]
        return Written(self._save(arguments, body, lines, folder), None, wanted)

    def part(self, entries: Sequence[str], output: str, folder: Path) -> Written:
        """As `candidates.Candidate` says."""
        inputs = {n: self.names[n] for n in (*entries, *self.given) if n in self.names}
        goal = self.names[output]
        body, outside = _between(_forward(self.text), goal, set(inputs.values()))
        kept = {name: value for name, value in inputs.items() if value in outside}
        lines = [_EMPTY, _item(goal, goal), f"return {_RESULT}"]
        file = self._save(list(dict.fromkeys(kept.values())), body, lines, folder)
        return Written(file, kept, {output: goal})

    def _save(
        self, arguments: Sequence[str], body: Sequence[ast.stmt], lines: Sequence[str], folder: Path
    ) -> Path:
        """The file with another `forward`."""
        whole = self.text.splitlines()
        function = _forward(self.text)
        of_self = ast.unparse(function.args.args[0])
        given = ", ".join([of_self, *(f"{name}: Tensor" for name in arguments)])
        text = [
            *whole[: function.lineno - 1],
            f"  def forward({given}) -> Dict[str, Tensor]:",
            *(f"{_INDENT}{line}" for kept in body for line in _lines(whole, kept)),
            *(f"{_INDENT}{line}" for line in lines),
            *whole[function.end_lineno :],
        ]
        file = folder / self.artifact.name
        with zipfile.ZipFile(self.artifact) as old, zipfile.ZipFile(file, "w") as new:
            for member in old.namelist():
                if member == self.member:
                    new.writestr(member, "\n".join(text) + "\n")
                elif member != f"{self.member}.debug_pkl":  # places in the text as it was
                    new.writestr(member, old.read(member))
        return file


_EMPTY = f"{_RESULT} = annotate(Dict[str, Tensor], {{}})"


def _item(name: str, value: str) -> str:
    return f'{_SET_ITEM}({_RESULT}, "{name}", {value})'


def _forward(text: str) -> ast.FunctionDef:
    """The method `forward` of the file's root."""
    found = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)]
    return next(function for function in found if function.name == "forward")


def _with_results(text: str, only: str) -> tuple[str, dict[str, str]]:
    """The text, where all that it gives back has a name; and these names.

    Args:
        text: of the file.
        only: what a result is called that is returned without one.
    """
    whole = text.splitlines()
    function = _forward(text)
    by_name = function.returns is None or ast.unparse(function.returns) != "Tensor"
    found: dict[str, str] = {}
    for statement in reversed(function.body):
        match statement:
            case ast.Return(value=ast.expr() as value) if not by_name:
                key, given = only, "return {}"
            case ast.Expr(ast.Call(func, [of, ast.Constant(str(key)), value])) if (
                ast.unparse(func) == _SET_ITEM
            ):
                given = f'{_SET_ITEM}({ast.unparse(of)}, "{key}", {{}})'
            case _:
                continue
        found[key] = value.id if isinstance(value, ast.Name) else f"{_GIVEN}{len(found)}"
        assert statement.end_lineno is not None
        lines = [] if isinstance(value, ast.Name) else [f"{found[key]} = {ast.unparse(value)}"]
        lines.append(given.format(found[key]))
        whole[statement.lineno - 1 : statement.end_lineno] = [_INDENT + line for line in lines]
    return "\n".join(whole) + "\n", found


def _lines(whole: Sequence[str], statement: ast.stmt) -> list[str]:
    """A statement as it stands there, moved to the margin."""
    assert statement.end_lineno is not None
    return [line[statement.col_offset :] for line in
            whole[statement.lineno - 1 : statement.end_lineno]]  # fmt: skip


def _made(statement: ast.stmt) -> list[str]:
    """The names that a statement gives values to, in order."""
    nodes = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
    return [node.id for node in nodes if isinstance(node.ctx, ast.Store)]


def _needed(statement: ast.stmt) -> Iterator[str]:
    nodes = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
    yield from (node.id for node in nodes if isinstance(node.ctx, ast.Load))


def _of_several(function: ast.FunctionDef, nodes: Sequence[fx.Node]) -> dict[str, str]:
    """The results of operators that give several, which lose their names: by operator and turn."""
    found: dict[str, list[list[str]]] = {}
    for statement in function.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call):
            made = _made(statement)
            if len(made) > 1 and isinstance(statement.value.func, ast.Attribute):
                found.setdefault(statement.value.func.attr, []).append(made)
    owners: dict[str, list[fx.Node]] = {}
    for node in nodes:
        several = isinstance(node.meta.get("val"), tuple | list)
        if several and isinstance(node.target, OpOverload):  # not a loop, nor a branch
            name = node.target._schema.name.partition("::")[2]
            owners.setdefault(name, []).append(node)
    names: dict[str, str] = {}
    for name, turns in found.items():
        if len(turns) != len(owners.get(name, ())):
            continue  # some were left out, and which cannot be told
        for made, owner in zip(turns, owners[name], strict=True):
            for user in owner.users:
                if user.target is operator.getitem and isinstance(user.args[1], int):
                    names[user.name] = made[user.args[1]]
    return names


def _between(
    function: ast.FunctionDef, goal: str, stops: set[str]
) -> tuple[list[ast.stmt], set[str]]:
    """The statements that compute a value from others, and the inputs and `stops` they need."""
    makers: dict[str, list[ast.stmt]] = {}
    for statement in function.body:
        for name in _made(statement):
            makers.setdefault(name, []).append(statement)
    inputs = {argument.arg for argument in function.args.args[1:]}
    taken: set[ast.stmt] = set()
    outside: set[str] = set()
    waiting = [goal]
    while waiting:
        name = waiting.pop()
        if name in inputs or (name in stops and name != goal):
            outside.add(name)
            continue
        for statement in makers.get(name, ()):
            if statement not in taken:
                taken.add(statement)
                waiting += _needed(statement)
    # A statement may give a value beside the wanted one that is among the stops.
    return [statement for statement in function.body if statement in taken], outside
