"""A session on anything that torch loads as a module."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from fuseport.exporter.program import real
from fuseport.exporter.program.backward_forms import Asked
from fuseport.exporter.user_code import own_backward

__all__ = ["ModuleSession"]

_CPU = torch.device("cpu")


class ModuleSession:
    """Runs a module that takes a program's inputs by position and has torch's autograd.

    Args:
        call: inputs in order → the module's result.
        parameters: named, at each call the same ones.
        outputs: result → outputs by name.
        device: of the parameters, and of the inputs of each call.
        explained: an error of autograd → the error to raise instead.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        parameters: Iterable[tuple[str, Tensor]],
        outputs: Callable[[Any], dict[str, Tensor]],
        device: torch.device = _CPU,
        explained: Callable[[RuntimeError | ValueError], Exception] = lambda error: error,
    ) -> None:
        self.device = device
        self._call = call
        self._parameters = {name: p for name, p in parameters if p.requires_grad}
        self._outputs = outputs
        self.explained = explained

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The program's outputs by name."""
        with torch.no_grad():
            return self._outputs(self._call(*inputs.values()))

    def asked(self, inputs: Mapping[str, Tensor], cotangents: Mapping[str, Tensor]) -> Asked:
        """The module as a function of its inputs, for `backward_forms`.

        Args:
            inputs: by name, in any memory layout.
            cotangents: by output name.
        """

        def run(leaves: Mapping[str, object]) -> dict[str, Tensor]:
            return self._outputs(self._call(*leaves.values()))

        return Asked(run, inputs, self._parameters, cotangents)

    def differentiate(
        self, inputs: Mapping[str, Tensor], cotangents: Mapping[str, Tensor]
    ) -> dict[str, Tensor | None]:
        """Outputs, and `grad/<name>` of each floating input and each trainable parameter.

        A model that writes in place into what the gradient of an input needs, `x /= scale`, is
        trained nevertheless, by its parameters alone. Its programs write nothing in place, and have
        both; so has this, since what autograd saves is copied then.

        Args:
            inputs: by name, in any memory layout, which is kept.
            cotangents: by output name.
        """
        try:
            return self._differentiated(inputs, cotangents)
        except (RuntimeError, ValueError) as error:
            if own_backward.in_place(error) is None:
                raise self.explained(error) from error
        try:
            with own_backward.saving_copies():
                return self._differentiated(inputs, cotangents)
        except (RuntimeError, ValueError) as error:
            raise self.explained(error) from error

    def _differentiated(
        self, inputs: Mapping[str, Tensor], cotangents: Mapping[str, Tensor]
    ) -> dict[str, Tensor | None]:
        leaves = {
            name: tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor
            for name, tensor in inputs.items()
        }
        wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
        wanted |= self._parameters
        with torch.enable_grad():
            outputs = self._outputs(self._call(*leaves.values()))
        roots = {n: out for n, out in outputs.items() if n in cotangents and out.requires_grad}
        results: dict[str, Tensor | None] = {n: output.detach() for n, output in outputs.items()}
        results |= dict.fromkeys(f"grad/{name}" for name in wanted)
        if roots and wanted:
            # By edges, not tensors: a function mode, which truth is computed under, sets itself
            # aside for the time of a call that it is asked about, and would miss the backward.
            gradients = torch.autograd.grad(
                [get_gradient_edge(root) for root in roots.values()],
                [get_gradient_edge(leaf) for leaf in wanted.values()],
                [cotangents[name] for name in roots],
                allow_unused=True,
            )
            results |= {
                f"grad/{n}": None if g is None else real(g)
                for n, g in zip(wanted, gradients, strict=True)
            }
        return results
