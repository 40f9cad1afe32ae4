"""Extensions that model code compiles of CUDA sources, of which it is known what they compute.

A file that loads RWKV's kernels says by the names of their parameters alone which they may be: the
same name and the same parameters are of kernels that look back, and of some that look both ways, of
decays as they are, and of their logarithms. So it is tried: before the first call the sources run
on small tensors, compiled for the CPU (`on_cpu`), forward and backward, and of the forms that there
are in torch (`wkv`) the one is taken that gives the same results and the same gradients.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fuseport.exporter.shims._cuda_sources.cells import Cells, cells_of
from fuseport.exporter.shims._cuda_sources.on_cpu import Failed, Sources
from fuseport.exporter.shims._cuda_sources.wkv import FAMILIES, Family, Form
from fuseport.exporter.shims._gradients import differentiated

__all__ = ["Known", "known"]

Named = dict[str, Any]
_Made = tuple[Tensor, torch.dtype]

# Of what sources are tried on, and compiled for where they have them as constants.
_SIZES = {"B": 2, "T": 64, "C": 64, "H": 8, "N": 8, "P": 4}
_CONSTANTS = {"_N_": 8, "_C_": 8, "_T_": 64, "Tmax": 64, "_CHUNK_LEN_": 16}

_WITHIN = {torch.bfloat16: 2**-7, torch.float16: 2**-10}  # of the largest number; else 1e-4


def known(paths: Sequence[str | Path], flags: Sequence[str]) -> "Known | Cells | None":
    """What an extension is, if the parameters of its functions are those of a family, or its class
    one of recurrent cells.

    Args:
        paths: of its sources.
        flags: of the compiler, among them macros.
    """
    macros = [flag[2:] for part in flags for flag in part.split() if flag.startswith("-D")]
    defined = {name: value for name, _, value in (macro.partition("=") for macro in macros)}
    if (found := cells_of(paths, defined)) is not None:
        return found
    small = {name: str(size) for name, size in _CONSTANTS.items() if name in defined}
    sources = Sources(paths, defined | small)
    for name, parameters in sources.functions.items():
        for family in FAMILIES:
            if parameters == family.parameters:
                return Known(sources, family, name)
    return None


@dataclass(frozen=True)
class _Found:
    """What a trial has found.

    Attributes:
        form: that gives the same.
        factor: of the gradient with respect to w, the names of what it is multiplied by.
        dtypes: that functions take, by their names and those of parameters.
    """

    form: Form
    factor: tuple[str, ...]
    dtypes: Mapping[str, Mapping[str, torch.dtype]]


class Known:
    """An extension's functions, forward and backward, computed by torch.

    Args:
        sources: of the extension.
        family: what it is one of.
        forward: the name of its function.
    """

    def __init__(self, sources: Sources, family: Family, forward: str) -> None:
        self._sources, self._family, self._forward = sources, family, forward
        back = forward.replace("forward", "backward")
        self._backward = back if back != forward and back in sources.functions else ""
        self.libraries = sources.libraries

    @property
    def functions(self) -> dict[str, Callable[..., Any]]:
        """By their names."""
        found: dict[str, Callable[..., Any]] = {self._forward: self.forward}
        return found | ({self._backward: self.backward} if self._backward else {})

    def forward(self, *args: Any) -> Tensor | None:
        """What the extension's function gives, or writes into the tensor that it is given for that.

        Raises:
            NotImplementedError: the sources compute none of the forms.
            TypeError: a tensor is of another dtype than the kernel takes.
        """
        form = self._found.form
        given = self._named(self._forward, args, form)
        out = form.compute(given)
        if "y" not in given:
            return out.to(given["k"].dtype)
        given["y"].copy_(out.reshape(given["y"].shape))
        return None

    def backward(self, *args: Any) -> list[Tensor] | None:
        """Likewise of gradients, by torch's autograd through the form.

        Those of what all samples have in common are of each sample, where there is room for that.
        """
        form = self._found.form
        given = self._named(self._backward, args, form)
        found = {}
        mark = "g" if "gy" in given else "d"
        for name, parts in _gradients(self._family, form, given, given[f"{mark}y"]).items():
            every = torch.stack(parts)
            if name == "w":
                every = every * _product(given, self._found.factor)
            room = given.get(f"{mark}{name}")
            shape = given[name].shape if room is None else room.shape
            if every.numel() != shape.numel():
                every = every.sum(0)
            found[name] = every.reshape(shape)
            if room is not None:
                room.copy_(found[name])
        return None if f"{mark}k" in given else [*found.values()]

    def _named(self, function: str, args: Sequence[Any], form: Form) -> Named:
        """The arguments of a function by their names, inputs in the shapes of the form."""
        names = self._sources.functions[function]
        if len(names) != len(args):
            raise TypeError(f"{function} takes {', '.join(names)}, and was given {len(args)}")
        given = dict(zip(names, args, strict=True))
        with torch._C.DisableTorchFunction():  # that says other dtypes where truth is computed
            for name, dtype in self._found.dtypes[function].items():
                if name in given and given[name].dtype not in (dtype, torch.float64):
                    raise TypeError(f"{function}: {name} is {given[name].dtype}, not {dtype}")
        return _shaped(given, {**self._family.shapes, **form.shapes})

    @cached_property
    def _found(self) -> _Found:
        reasons = []
        with _small():
            for form in self._family.forms:
                try:
                    return self._tried(form)
                except _Differs as error:
                    reasons.append(f"not {form.what}: {error}")
                except Failed as error:
                    reasons = [str(error)]
                    break
        raise NotImplementedError(
            f"{self._forward} of {self._sources} was called: compiled for the CPU and run on small "
            f"tensors, these compute nothing that fuseport knows ({'; '.join(reasons)}). CUDA "
            "kernels run on GPUs only, and no exported format holds one: compute it by functions "
            "of torch, or make it an op of your own (README, Ops of your own)"
        )

    def _tried(self, form: Form) -> _Found:
        """What holds of a form.

        Raises:
            _Differs: it is another one.
            Failed: the sources do not run here.
        """
        draw = torch.Generator().manual_seed(0)
        shapes = {**self._family.shapes, **form.shapes}
        given: Named = dict(_SIZES)
        for name, shape in shapes.items():
            uniform = torch.rand([_SIZES[s] for s in shape], generator=draw, dtype=torch.float64)
            given[name] = form.draw(name, uniform).bfloat16().double()
        given |= {name: value(given) for name, value in form.others.items()}
        given["y"] = form.compute(given)
        given |= {
            name: torch.zeros([_SIZES[s] for s in shape])
            for name, shape in self._family.saved.items()
        }
        made = self._called(self._forward, given, {"y": given["y"]})
        dtypes = {self._forward: _dtypes(made)}
        _hold("the results", given["y"], made["y"])
        given |= {name: made[name][0].reshape(given[name].shape) for name in self._family.saved}
        factor: tuple[str, ...] = ()
        if self._backward:
            mark = "d" if "dy" in self._sources.functions[self._backward] else "g"
            cotangent = torch.randn(given["y"].shape, generator=draw).bfloat16().double()
            found = _gradients(self._family, form, given, cotangent)
            ours = {f"{mark}{name}": torch.stack(parts) for name, parts in found.items()}
            made = self._called(self._backward, {**given, f"{mark}y": cotangent}, ours)
            dtypes[self._backward] = _dtypes(made)
            factor = _factor(given, ours.pop(f"{mark}w"), made[f"{mark}w"])
            for name, gradient in ours.items():
                within = form.rough.get(name[1:], 0.0)
                _hold(f"the gradients of {name[1:]}", gradient, made[name], within)
        return _Found(form, factor, dtypes)

    def _called(self, function: str, given: Named, like: Mapping[str, Tensor]) -> dict[str, _Made]:
        """What the sources make of all tensors, and give in place of those that are like it."""
        names = self._sources.functions[function]
        missing = [name for name in names if name not in given and name not in like]
        if missing:
            raise Failed(f"{function} takes {', '.join(missing)}, too")
        room = {name: torch.zeros_like(t) for name, t in like.items() if name in names}
        results = self._sources.call(function, [{**given, **room}[name] for name in names])
        tensors = [name for name in names if isinstance({**given, **room}[name], Tensor)]
        returned = [name for name in like if name not in names]
        if len(results) != len(tensors) + len(returned):
            raise Failed(f"{function} gives {len(results) - len(tensors)} results")
        return dict(zip([*tensors, *returned], results, strict=True))


class _Differs(Exception):
    """Sources compute something else."""


def _shaped(given: Named, shapes: Mapping[str, str]) -> Named:
    """With inputs in their shapes, and all sizes: those that are given, or that inputs have."""
    sizes = {name: value for name, value in given.items() if name in _SIZES}
    for name, shape in shapes.items():
        if given[name].dim() == len(shape):
            sizes = dict(zip(shape, given[name].shape, strict=True)) | sizes
    if "H" in sizes and "C" in sizes:
        sizes["N"] = sizes["C"] // sizes["H"]
    shaped = {name: given[name].reshape([sizes[s] for s in shapes[name]]) for name in shapes}
    return {**given, **sizes, **shaped}


def _dtypes(made: Mapping[str, _Made]) -> dict[str, torch.dtype]:
    return {name: dtype for name, (_, dtype) in made.items()}


def _gradients(
    family: Family, form: Form, given: Named, cotangent: Tensor
) -> dict[str, list[Tensor]]:
    """Of each input, by samples: also of those that all samples have in common."""
    shapes = {**family.shapes, **form.shapes}
    names = [*shapes]
    parts: dict[str, list[Tensor]] = {name: [] for name in names}
    cotangents = cotangent.reshape(given["B"], given["T"], -1)
    for at in range(given["B"]):
        inputs = [given[n][at : at + 1] if "B" in shapes[n] else given[n] for n in names]

        def again(*values: Tensor) -> Tensor:
            return form.compute({**given, **dict(zip(names, values, strict=True)), "B": 1})

        found = differentiated(again, inputs, cotangents[at : at + 1])
        for name, gradient in zip(names, found, strict=True):
            parts[name].append(gradient[0] if "B" in shapes[name] else gradient)
    return parts


def _factor(given: Named, ours: Tensor, theirs: _Made) -> tuple[str, ...]:
    """What the gradient of w is multiplied by: kernels may have that of what w is computed from."""
    factors = [(), ("w",), ("w", "ww")] if "ww" in given else [(), ("w",)]
    for factor in factors[:-1]:
        try:
            _hold("the gradient of w", ours * _product(given, factor), theirs)
        except _Differs:
            continue
        return factor
    _hold("the gradient of w", ours * _product(given, factors[-1]), theirs)
    return factors[-1]


def _product(given: Named, names: Sequence[str]) -> Tensor:
    one = torch.ones((), dtype=given["w"].dtype, device=given["w"].device)
    for name in names:
        one = one * given[name].reshape(given["w"].shape)
    return one


def _hold(what: str, ours: Tensor, theirs: _Made, within: float = 0.0) -> None:
    """Raise `_Differs` unless they agree; ours may be of each sample, and theirs their sum."""
    found, dtype = theirs
    ours = ours.sum(0) if found.numel() * _SIZES["B"] == ours.numel() else ours
    if found.numel() != ours.numel():
        raise _Differs(f"{what} are {found.numel()} numbers, and not {ours.numel()}")
    error = (ours.flatten() - found).abs().max()
    if not error <= max(within, _WITHIN.get(dtype, 1e-4)) * ours.abs().max():
        raise _Differs(f"{what} differ by up to {error:.2g} of {ours.abs().max():.2g}")


@contextmanager
def _small() -> Iterator[None]:
    """Tensors are tensors, also in the middle of a capture."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield
