"""Program → TorchScript, by writing the captured graph out as TorchScript source.

`torch.jit.trace` would bake the example's sizes in, and `torch.jit.script` cannot read model code
that calls custom autograd functions. The captured graph has neither trouble: it is a list of
operators over symbolic sizes.
"""

import keyword
import math
import operator
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch._ops import HigherOrderOperator

from fuseport.exporter.errors import ExportFailed
from fuseport.exporter.formats import Options, _autodiff
from fuseport.exporter.program import Program, argument_names, module_tree, one_line
from fuseport.exporter.program.matching import ASSERT
from fuseport.exporter.program.refusing import requirement, verdicts

__all__ = ["DEFAULT", "SUFFIX", "source", "write"]

SUFFIX = ".pt"
DEFAULT = True

# Operators on sizes, as templates over their arguments.
_SIZE_OPERATORS: dict[Any, str] = {
    operator.add: "({0} + {1})",
    operator.sub: "({0} - {1})",
    operator.mul: "({0} * {1})",
    operator.floordiv: "({0} // {1})",
    operator.truediv: "({0} / {1})",
    operator.mod: "({0} % {1})",
    operator.neg: "(-{0})",
    operator.abs: "abs({0})",
    operator.pow: "({0} ** {1})",
    operator.eq: "({0} == {1})",
    operator.ne: "({0} != {1})",
    operator.lt: "({0} < {1})",
    operator.le: "({0} <= {1})",
    operator.gt: "({0} > {1})",
    operator.ge: "({0} >= {1})",
    operator.and_: "({0} & {1})",
    operator.or_: "({0} | {1})",
    operator.getitem: "{0}[{1}]",
    torch.sym_max: "max({0}, {1})",
    torch.sym_min: "min({0}, {1})",
    torch.sym_float: "float({0})",
    torch.sym_ite: "({1} if {0} else {2})",
    torch.sym_int: "int({0})",
    torch.sym_not: "(not {0})",
    math.ceil: "math.ceil({0})",
    math.floor: "math.floor({0})",
    math.trunc: "int({0})",
    round: "int(round({0}))",
    torch.ops.aten.sym_size.int: "{0}.size({1})",
    torch.ops.aten.sym_stride.int: "{0}.stride({1})",
    torch.ops.aten.sym_numel.default: "{0}.numel()",
}

_NUMBERS = {torch.SymInt: "int", torch.SymFloat: "float", torch.SymBool: "bool"}

# The device of the first tensor there is: the program is captured on the CPU, and runs on any.
_DEVICE = "device__"
_CAPTURED = torch.device("cpu")

# What the source says, and what is saved of it, which an argument would hide.
_WORDS = {
    *("self", "result", _DEVICE, "torch", "math", "Tensor", "Dict", "List"),
    "annotate",
    *("abs", "bool", "float", "getattr", "int", "max", "min", "range", "round"),
}

# What torch.export adds to check its own assumptions; the sizes' ranges are in the manifest.
_ASSERTIONS = {
    "aten::_assert_scalar",
    "aten::_assert_tensor_metadata",
    "aten::sym_constrain_range",
    "aten::sym_constrain_range_for_size",
}


def write(program: Program, path: Path, options: Options) -> dict[str, Any]:
    """Write `program` as a TorchScript archive that C++ libtorch and `torch.jit.load` open.

    `forward` takes the program's inputs in order. It returns the one output as it is, several as a
    `Dict[str, Tensor]` in the program's order. Parameters keep the model's names; those of a
    forward program require gradients, so that autograd goes through it, at every call by autograd's
    own formulas where TorchScript's are others. It computes where its parameters and inputs are:
    `map_location` and `to` move it.

    Raises:
        ExportFailed: the graph has something that TorchScript cannot say.
    """
    del options
    root = type(program.kind.title(), (nn.Module,), {})()
    module_tree(program.state(requires_grad=program.kind == "forward"), root)
    text = source(program)
    if f"self.{_autodiff.APART}:" in text:
        setattr(root, _autodiff.APART, True)
    with _fresh_compiler(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated, and says so at every call
        try:
            scripted = torch.jit.script(root.eval())
            scripted.define(text)
        except Exception as error:  # a frontend error of any of several unrelated types
            raise ExportFailed(
                f"TorchScript refuses the {program.kind} program: {_refusal(error)}"
            ) from error
        # Not by `save`, which ends the process when the disk is full.
        path.write_bytes(scripted.save_to_buffer())
    return {}


@contextmanager
def _fresh_compiler() -> Iterator[None]:
    """Forget the modules compiled before: the same program gives the same bytes then.

    torch.jit numbers types of one name through the life of the process, and shares a compiled type,
    and its `forward`, between modules of one class.
    """
    kept = torch.jit._state._python_cu, torch.jit._recursive.concrete_type_store
    torch.jit._state._python_cu = torch._C.CompilationUnit()
    torch.jit._recursive.concrete_type_store = torch.jit._recursive.ConcreteTypeStore()
    try:
        yield
    finally:
        torch.jit._state._python_cu, torch.jit._recursive.concrete_type_store = kept


def _refusal(error: Exception) -> str:
    """What the compiler says of which line, without the forms that an operator has."""
    lines = [line for part in str(error).splitlines() if (line := part.strip())]
    here = next((i for i, line in enumerate(lines) if line.endswith("<--- HERE")), None)
    if here is None:
        return one_line(error)
    said = next((line for line in lines if line.startswith("Expected ")), lines[0])
    return f"{said.rstrip('.:')}, at: {lines[here - 1]}"


def source(program: Program) -> str:
    """The method `forward` of the program, as TorchScript source."""
    exported = program.exported
    signature = exported.graph_signature
    attributes = {
        spec.arg.name: _attribute(spec.target)
        for spec in signature.input_specs
        if spec.target is not None
    }
    arguments = argument_names((spec.name for spec in program.inputs), _is_reserved)
    within = "v_"  # no node may be called like something the source needs, or like an argument
    while any(name.startswith(within) for name in arguments):
        within = f"v{within}"
    names = dict(zip(signature.user_inputs, arguments, strict=True))
    declared = ", ".join(f"{name}: Tensor" for name in names.values())
    single = len(program.outputs) == 1
    result = "Tensor" if single else "Dict[str, Tensor]"
    lines = [f"def forward(self, {declared}) -> {result}:"]
    values = {**attributes, **{str(k): v for k, v in names.items()}}
    tensors = [*names.values(), *attributes.values()]
    body = list(_body(exported.graph_module, values, within))
    if any(_DEVICE in line for line in body):
        here = f"{tensors[0]}.device" if tensors else f"torch.device({str(_CAPTURED)!r})"
        lines.append(f"    {_DEVICE} = {here}")
    lines += _checks(program, names)
    lines += body
    outputs = [values.get(str(name), str(name)) for name in signature.user_outputs]
    if single:
        lines.append(f"    return {outputs[0]}")
    else:
        lines.append("    result: Dict[str, Tensor] = {}")
        lines += [
            f"    result[{spec.name!r}] = {value}"
            for spec, value in zip(program.outputs, outputs, strict=True)
        ]
        lines.append("    return result")
    return "\n".join(lines) + "\n"


def _is_reserved(name: str) -> bool:
    return name in _WORDS or keyword.iskeyword(name)


def _checks(program: Program, names: Mapping[Any, str]) -> Iterator[str]:
    """An assertion that the program's sizes are such as it requires."""
    called = dict(zip((spec.name for spec in program.inputs), names.values(), strict=True))
    found = verdicts(
        program,
        lambda name, dim: f"{called[name]}.size({dim})",
        str,
        lambda step, a, b: _SIZE_OPERATORS[step].format(a, b),
    )
    if found:
        yield f"    assert {' and '.join(found)}, {requirement(program)!r}"


def _body(module: fx.GraphModule, values: dict[str, str], within: str) -> Iterator[str]:
    """One line for each call in the graph, and more for those with graphs inside.

    Args:
        module: the graph, and those inside.
        values: what names of the graph read as; it grows.
        within: what its own names begin with.
    """
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        target = node.target
        if isinstance(target, torch._ops.OpOverload) and target._schema.name in _ASSERTIONS:
            continue
        if target is ASSERT:
            yield f"    assert bool({_value(node.args[0], values)}), {node.args[1]!r}"
            continue
        name = values[node.name] = f"{within}{node.name}"
        if isinstance(target, HigherOrderOperator) and str(target) in _REGIONS:
            lines = _REGIONS[str(target)](module, node, values)
        else:
            line = f"{name} = {_call(node, values)}"
            lines = _autodiff.apart(line) if _autodiff.differs(node) else iter([line])
        yield from (f"    {line}" for line in lines)


def _call(node: fx.Node, values: Mapping[str, str]) -> str:
    target = node.target
    if target in _SIZE_OPERATORS:
        number = _SIZE_OPERATORS[target].format(*(_value(a, values) for a in node.args))
        whole = target is operator.pow and isinstance(node.meta.get("val"), torch.SymInt)
        return f"int({number})" if whole else number  # `**` of integers is a float in TorchScript
    if not isinstance(target, torch._ops.OpOverload):
        raise ExportFailed(f"TorchScript has no form of {target}, which the captured graph calls")
    schema = target._schema
    types = {a.name: str(a.type) for a in schema.arguments}
    parts = [
        _value(value, values, str(argument.type))
        for argument, value in zip(schema.arguments, node.args, strict=False)
    ]
    if parts and str(schema.arguments[0].type) == "Tensor" and _is_number(node.args[0]):
        parts[0] = f"torch.tensor({parts[0]})"
    given = dict(node.kwargs)
    if types.get("device") == "Optional[Device]" and not any("Tensor" in t for t in types.values()):
        given.setdefault("device", _CAPTURED)  # what makes a tensor of none makes it there
    parts += [f"{name}={_value(value, values, types[name])}" for name, value in given.items()]
    call = f"torch.ops.{schema.name.replace('::', '.')}({', '.join(parts)})"
    # A number of a tensor is of no type yet, and a list of such is none of sizes.
    type_ = _NUMBERS.get(type(node.meta.get("val")))
    return f"{type_}({call})" if type_ else call


def _is_number(value: Any) -> bool:
    """Whether it is one, or a size, of which TorchScript makes no tensor by itself."""
    known = value.meta.get("val") if isinstance(value, fx.Node) else value
    return isinstance(known, bool | int | float | torch.SymInt | torch.SymFloat | torch.SymBool)


def _cond(module: fx.GraphModule, node: fx.Node, values: Mapping[str, str]) -> Iterator[str]:
    """`cond(predicate, graph, graph, operands)` as a branch; its value is a list."""
    arguments: Any = node.args
    predicate, yes, no, operands = arguments
    name = values[node.name]
    given = [_value(operand, values) for operand in operands]
    for head, graph in (f"if {_value(predicate, values)}:", yes), ("else:", no):
        results, lines = _inlined(module, graph, given, f"{name}_{head[:2]}__")
        yield head
        yield from lines
        yield f"    {name} = [{', '.join(results)}]"


def _scan(module: fx.GraphModule, node: fx.Node, values: Mapping[str, str]) -> Iterator[str]:
    """`scan(graph, states, slices, others)` as a loop: the last states, then stacked outputs."""
    arguments: Any = node.args
    graph, states, slices, others = arguments
    name = values[node.name]
    given = [[_value(value, values) for value in part] for part in (states, slices, others)]
    carried = [f"{name}__state{i}" for i in range(len(given[0]))]
    yield from (f"{state} = {first}" for state, first in zip(carried, given[0], strict=True))
    yield from _loop(module, graph, name, carried, *given[1:])


def _map(module: fx.GraphModule, node: fx.Node, values: Mapping[str, str]) -> Iterator[str]:
    """`map(graph, slices, others)` as a loop: stacked outputs."""
    arguments: Any = node.args
    graph, *rest = arguments
    given = [[_value(value, values) for value in part] for part in rest]
    yield from _loop(module, graph, values[node.name], [], *given)


def _while(module: fx.GraphModule, node: fx.Node, values: Mapping[str, str]) -> Iterator[str]:
    """`while_loop(graph, graph, states, others)` as a loop: the last states."""
    arguments: Any = node.args
    condition, body, *rest = arguments
    name = values[node.name]
    first, others = ([_value(value, values) for value in part] for part in rest)
    carried = [f"{name}__state{i}" for i in range(len(first))]
    yield from (f"{state} = {value}" for state, value in zip(carried, first, strict=True))
    yield f"{name}__on = True"
    yield f"while {name}__on:"
    (on,), lines = _inlined(module, condition, [*carried, *others], f"{name}__if__")
    yield from lines
    yield f"    {name}__on = bool({on})"
    yield f"    if {name}__on:"
    new, lines = _inlined(module, body, [*carried, *others], f"{name}__do__")
    yield from (f"    {line}" for line in lines)
    yield f"        {', '.join(carried)}, = {', '.join(new)},"
    yield f"{name} = [{', '.join(carried)}]"


def _loop(
    module: fx.GraphModule,
    graph: Any,
    name: str,
    carried: Sequence[str],
    slices: Sequence[str],
    others: Sequence[str],
) -> Iterator[str]:
    """A graph over the first dimension of `slices`; `name` becomes the list of what comes out."""
    here = [f"{whole}.select(0, {name}__i)" for whole in slices]
    results, lines = _inlined(module, graph, [*carried, *here, *others], f"{name}__")
    stacked = [f"{name}__output{i}" for i in range(len(results) - len(carried))]
    yield from (f"{output}: List[Tensor] = []" for output in stacked)
    yield f"for {name}__i in range({slices[0]}.size(0)):"
    yield from lines
    new, outputs = results[: len(carried)], results[len(carried) :]
    if carried:
        yield f"    {', '.join(carried)}, = {', '.join(new)},"
    yield from (f"    {a}.append({b})" for a, b in zip(stacked, outputs, strict=True))
    yield f"{name} = [{', '.join([*carried, *(f'torch.stack({o})' for o in stacked)])}]"


def _inlined(
    module: fx.GraphModule, graph: Any, given: Sequence[str], within: str
) -> tuple[list[str], list[str]]:
    """What a graph inside another one returns for these arguments, and the lines of its body."""
    inside = getattr(module, graph.target)
    placeholders = inside.graph.find_nodes(op="placeholder")
    values = {p.name: value for p, value in zip(placeholders, given, strict=True)}
    lines = list(_body(inside, values, within))
    results = inside.graph.output_node().args[0]
    results = [results] if isinstance(results, fx.Node) else results  # that of a condition
    return [_value(result, values) for result in results], lines


_REGIONS: dict[str, Callable[[fx.GraphModule, fx.Node, Mapping[str, str]], Iterator[str]]] = {
    "cond": _cond,
    "map_impl": _map,
    "scan": _scan,
    "while_loop": _while,
}


def _value(value: Any, values: Mapping[str, str], type_: str = "") -> str:
    if isinstance(value, fx.Node):
        return values[value.name]
    if isinstance(value, list | tuple):
        text = f"[{', '.join(_value(item, values) for item in value)}]"
        if value and None not in value:
            return text
        # TorchScript infers no type for an empty literal, and none for one with a None in it.
        annotation = re.search(r"List.*\]", type_)
        return f"torch.jit.annotate({annotation.group()}, {text})" if annotation else text
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    if isinstance(value, torch.device):
        return _DEVICE if value == _CAPTURED else f"torch.device({str(value)!r})"
    if isinstance(value, torch.dtype | torch.memory_format | torch.layout):
        return str(value)
    return repr(value)


def _attribute(name: str) -> str:
    text = "self"
    for part in name.split("."):
        text = f"{text}.{part}" if part.isidentifier() else f"getattr({text}, {part!r})"
    return text
