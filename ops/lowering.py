"""An op's form in ONNX: what it has to offer, and how to write it as text.

An op's `onnx.py` is a `Lowering`. `Bodies` makes one of function bodies alone, for ops whose
operators are one node each, with inputs, outputs and attributes of the same names.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from fuseport.ops.onnx_bodies import parsed

if TYPE_CHECKING:
    from onnx import FunctionProto

    from fuseport.ops.spec import Operator, OpSpec

__all__ = ["Bodies", "Lowering"]


class Lowering(Protocol):
    """How the operators of an op become nodes of `DOMAIN`, and these standard operators."""

    DOMAIN: str
    VERSION: int

    def decompositions(self) -> Mapping[str, Callable[..., Any]]:
        """For each operator of the op, by name, its form as symbolic ONNX nodes."""

    def functions(self, opset: int) -> list["FunctionProto"]:
        """The bodies of the nodes, in standard operators of `opset`, 18 or later."""


@dataclass(frozen=True)
class Bodies:
    """Function bodies in the text format of `onnx.parser`, one for each operator.

    `name <attribute> (input) => (output) { … }`: the name is an operator's; tensors among its
    inputs are the function's inputs, plain numbers its attributes, by name. Outputs that only the
    backward of torch reads may be left out. Attributes that are floats have 32 bits.

    Attributes:
        domain: of the nodes, one of your own.
        texts: the functions.
        version: of the domain.
    """

    domain: str
    texts: tuple[str, ...]
    version: int = 1

    def of(self, spec: "OpSpec") -> Lowering:
        """The lowering of the op that has these bodies."""
        return _Lowering(self, spec)


class _Lowering:
    def __init__(self, bodies: Bodies, spec: "OpSpec") -> None:
        self.DOMAIN = bodies.domain
        self.VERSION = bodies.version
        self._texts = bodies.texts
        self._spec = spec

    def decompositions(self) -> dict[str, Callable[..., Any]]:
        """As `Lowering` says.

        Raises:
            ValueError: a function does not fit the operator of its name.
        """
        named = {function.name: function for function in self.functions(18)}
        operators = {operator.name: operator for operator in self._spec.operators}
        for name in named.keys() - operators.keys():
            raise ValueError(f"the ONNX function {name} is of no operator of {self._spec.name}")
        return {name: self._form(operators[name], f) for name, f in named.items()}

    def functions(self, opset: int) -> list["FunctionProto"]:
        """As `Lowering` says."""
        return parsed(self._texts, opset, self.DOMAIN)

    def _form(self, operator: "Operator", function: "FunctionProto") -> Callable[..., Any]:
        given = {*function.input, *function.attribute, *(a.name for a in function.attribute_proto)}
        unknown = sorted({*given, *function.output} - {*operator.inputs, *operator.outputs})
        needed = self._spec.differentiable(operator)[1] or operator.outputs
        lacking = [name for name in needed if name not in function.output]
        if unknown or lacking:
            what = f"has no {unknown[0]}" if unknown else f"returns {lacking[0]}"
            raise ValueError(f"the ONNX function {function.name}: its operator {what}")

        def form(*args: Any, **kwargs: Any) -> Any:
            values = operator.bound(args, kwargs)
            known = dict(zip(operator.inputs, values, strict=True))
            faked = operator.fake(*values)
            results = (faked,) if isinstance(faked, Tensor) else faked
            like = dict(zip(operator.outputs, results, strict=True))
            nodes = torch.onnx.ops.symbolic_multi_out(
                f"{self.DOMAIN}::{function.name}",
                [known[name] for name in function.input],
                {
                    n: _attribute(known[n])
                    for n in operator.inputs
                    if n in given - {*function.input}
                },
                dtypes=[like[name].dtype for name in function.output],
                shapes=[like[name].shape for name in function.output],
                version=self.VERSION,
            )
            made = dict(zip(function.output, nodes, strict=True))
            # What only the backward of torch reads, the ONNX one has no use for.
            found = tuple(made[n] if n in made else t.new_zeros(t.shape) for n, t in like.items())
            return found[0] if isinstance(faked, Tensor) else found

        return form


def _attribute(value: Any) -> Any:
    return int(value) if isinstance(value, bool) else value
