"""Which ops a built-in architecture needs: its model is run once on the meta device, in the worker.

Nothing is computed, and no weights are read: the configuration is enough.
"""

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fuseport.exporter import models
from fuseport.exporter.errors import FuseportError
from fuseport.exporter.program import one_line
from fuseport.ops.spec import NAMESPACE

__all__ = ["found"]


def found(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """`operators`, with how often each is called; or `reason`, why that cannot be told.

    `refused` beside it: no program can be made of this model, for that reason.
    """
    try:
        with torch.device("meta"), torch.no_grad():
            model = models.build(name, config)
            inputs = [
                torch.empty(
                    [dim if isinstance(dim, int) else model.sizes[dim] for dim in spec.dims],
                    dtype=spec.torch_dtype,
                )
                for spec in model.inputs
            ]
            recorder = _Recorder()
            model.module.eval()
            with model.fused(), recorder:
                model.module(*inputs)
    except FuseportError as error:
        return {"reason": str(error)}
    except NotImplementedError as error:  # as stand-ins say it of what has no form here
        if "fuseport" in str(error):
            return {"reason": one_line(error), "refused": True}
        return {"reason": f"the model does not run without data: {one_line(error)}"}
    except Exception as error:  # model code can raise anything where tensors have no data
        return {"reason": f"the model does not run without data: {one_line(error)}"}
    return {"operators": dict(recorder.counts)}


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == NAMESPACE:
            self.counts[func._schema.name] += 1
        if func is torch.ops.aten._local_scalar_dense.default:
            # A choice by a value: attention asks whether its mask is all true.
            return torch.ones((), dtype=args[0].dtype, device="cpu").item()
        return func(*args, **(kwargs or {}))
