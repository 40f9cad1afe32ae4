"""What does a whole Mamba-130M spend beside its matrix products?

    python tests/benchmarks/model.py [--length L] [--rounds R]

Random weights in the shape of state-spaces' mamba-130m, float32, eager, with fuseport's scan. The
matrix products of one forward pass are recorded, and done again alone, on tensors of their shapes
and strides; both take turns. Prints medians, their ratio, and what the ops beside the products take
by torch's own profiler.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from fuseport import ops
from fuseport.exporter.models.mamba import MambaConfig, MambaLM

MAMBA_130M = MambaConfig(
    d_model=768, n_layer=24, vocab_size=50280, d_state=16, d_conv=4, d_inner=1536, dt_rank=48
)
_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}


class Recorder(TorchDispatchMode):
    """Keeps each matrix product with tensors like those that it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[tuple[Any, list[Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PRODUCTS:
            self.products.append((func, [self._alike(a) for a in args]))
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _alike(value: Any) -> Any:
        return torch.empty_like(value).normal_() if isinstance(value, Tensor) else value


def seconds(run: Callable[[], Any]) -> float:
    """Of one call."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    ops.register()
    torch.manual_seed(0)
    model = MambaLM(MAMBA_130M).eval()
    ids = torch.randint(0, MAMBA_130M.vocab_size, (1, arguments.length))
    with torch.no_grad():
        recorder = Recorder()
        with recorder:
            model(ids)
        products = recorder.products

        def alone() -> None:
            for product, inputs in products:
                product(*inputs)

        whole, part = [], []
        for _ in range(arguments.rounds):
            whole.append(seconds(lambda: model(ids)))
            part.append(seconds(alone))
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            model(ids)
    ratio = statistics.median(w / p for w, p in zip(whole, part, strict=True))
    print(
        f"length {arguments.length}, {torch.get_num_threads()} threads: model "
        f"{statistics.median(whole) * 1e3:.0f} ms, its {len(products)} matrix products alone "
        f"{statistics.median(part) * 1e3:.0f} ms, ratio {ratio:.2f}"
    )
    print(profiled.key_averages().table(sort_by="self_cpu_time_total", row_limit=12))


if __name__ == "__main__":
    main()
