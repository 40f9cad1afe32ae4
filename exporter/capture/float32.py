"""Which parameters of the user's own model stay float32 in half precision."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from fuseport.exporter import models
from fuseport.exporter.capture.called import ops_called
from fuseport.exporter.errors import ExportFailed
from fuseport.exporter.models import Model
from fuseport.exporter.models.fresh import undoing
from fuseport.exporter.models.model import examples
from fuseport.exporter.program import one_line
from fuseport.ops import OPS

__all__ = ["Kept", "kept"]

_RATES = ("A_log", "A_logs", "A_b_log")
"""What a module of a scan has, whoever wrote it."""


@dataclass(frozen=True)
class Kept:
    """What stays.

    Attributes:
        ends: of the parameters' names.
        notes: what the user should know, a sentence each.
    """

    ends: tuple[str, ...]
    notes: tuple[str, ...] = ()


def kept(model: Model, dtype: torch.dtype, seed: int, cast: Callable[[Model], Model]) -> Kept:
    """The most that the model's code can take in float32, while the rest is of a half type.

    Norms, and the parameters of scans that published models keep: A_log, D and the biases of delta,
    by the names that these have, and D and those biases under any name if an op gets them as they
    are. And tables that its constructor makes, as of the frequencies of a rotary embedding.
    Where the forward does not take that, the norms are converted; where it does not take that
    either, all but what the ops that it calls want; and where it takes none of these, the tables.

    Args:
        model: in its own dtype; it stays as it is.
        dtype: to convert to.
        seed: of example inputs.
        cast: gives a model its inputs in `dtype`.

    Raises:
        ExportFailed: the model runs as it is, and in `dtype` in none of these ways.
    """
    inputs = examples(model, torch.Generator().manual_seed(seed))
    try:
        with model.fused(), torch.no_grad():
            call = undoing(model.module, model.module)
            called = ops_called(lambda: call(*inputs.values()), model.module)
    except Exception:  # of any type: the capture runs the same, and explains it
        return Kept(())
    ends = (end for op in called.ops for end in op.keeps_float32)
    wanted = tuple(dict.fromkeys((*ends, *(f".{name}" for name in called.float32))))
    ways: list[Kept] = [Kept((*wanted, *_scans(model.module), *_norms(model.module)))]
    said = f"the model's code does not take %s in float32 beside {dtype}: converted, too"
    if ways[0].ends != (*wanted, *_scans(model.module)):
        ways.append(Kept((*wanted, *_scans(model.module)), (said % "norms",)))
    if ways[-1].ends != wanted:
        ways.append(Kept(wanted, (said % "norms, A_log, D and biases of delta",)))
    if made := tuple(models.tables(model.module)):
        ways = [*(replace(way, ends=(*way.ends, *made)) for way in ways), *ways]
    for way in ways:
        trial = replace(model, module=copy.deepcopy(model.module), keeps_float32=way.ends)
        models.convert(trial, dtype)
        trial = cast(trial)
        inputs = examples(trial, torch.Generator().manual_seed(seed))
        try:
            with trial.fused(), torch.no_grad():
                trial.module(*inputs.values())
        except Exception as error:  # model code can raise anything
            last = error
        else:
            return way
    name = str(dtype).removeprefix("torch.")
    raise ExportFailed(
        f"--dtype {name}: the model's code does not run in it, with or without norms in float32:"
        f" {one_line(last)}; make its casts follow its inputs, or leave --dtype out"
    ) from last


def _scans(module: nn.Module) -> Iterator[str]:
    """Names by which ops know what stays, in models that have a scan's rates."""
    if any(name.rpartition(".")[2] in _RATES for name, _ in module.named_parameters()):
        yield from dict.fromkeys(end for op in OPS.values() for end in op.keeps_float32)


def _norms(module: nn.Module) -> Iterator[str]:
    """What modules hold whose class is a norm by its name, with vectors for weights."""
    for owner_name, owner in module.named_modules():
        if "norm" not in type(owner).__name__.lower():
            continue
        own = [*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False)]
        for leaf, tensor in own:
            if tensor.is_floating_point() and tensor.dim() <= 1:
                yield f"{owner_name}.{leaf}".lstrip(".")
