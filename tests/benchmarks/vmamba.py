"""How many ONNX nodes has VMamba-T, and how fast are they, beside the same model unrolled?

    python tests/benchmarks/vmamba.py [--size PIXELS] [--unrolled PIXELS] [--rounds R] [--json FILE]

The model is VMamba-T ("s1l8") with random weights, float32, one image at a time. Its forward
program is exported as `fuseport export` does. `unrolled` is the same module with its scan as a
Python loop over time and its walks in plain torch, exported by torch's tracing exporter, as public
exports of VMamba are; at 224 pixels that would be 9,506 steps, some 90,000 nodes. In ONNX
Runtime all take turns: the file with fused kernels, the same file by its function bodies, and the
unrolled one. `--unrolled` gives that a smaller image; the other two are then timed there too, so
that like is compared with like.

Nodes are counted with their subgraphs: as the file has them, where a scan is one node and bodies of
functions stand once, uncounted; and expanded, with every call replaced by its body.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import onnx
import onnx.inliner
import onnxruntime
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from fuseport import ops
from fuseport.exporter import formats
from fuseport.exporter.api import capture
from fuseport.exporter.models import vmamba, weights
from fuseport.exporter.models.vmamba import VMamba, VMambaConfig

VMAMBA_T = VMambaConfig(
    depths=(2, 2, 8, 2), dims=(96, 192, 384, 768), d_inner=(96, 192, 384, 768),
    dt_rank=(6, 12, 24, 48), mlp=(384, 768, 1536, 3072), d_state=1, d_conv=3, conv_bias=False,
    gate=False, gated_mlp=False, channels=3, image_size=224, patch_kernel=3, patch_version=2,
    patch_norm=True, downsample=3, pos_embed=False, num_classes=1000,
)  # fmt: skip

# The best public ONNX export of VMamba-T at 224×224 that is known, on one server processor.
PUBLIC = {"nodes": 24388, "images_per_second": 2.17}


def state(size: int) -> dict[str, Tensor]:
    """Random weights; decays and step sizes as training begins with."""
    torch.manual_seed(0)
    module = VMamba(replace(VMAMBA_T, image_size=size))
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("A_logs"):
                parameter.zero_()
            elif name.endswith("dt_projs_bias"):
                parameter.uniform_(-6.9, -2.3)
            elif name.endswith("Ds"):
                parameter.fill_(1.0)
            elif name.endswith(("x_proj_weight", "dt_projs_weight")):
                parameter.uniform_(-0.1, 0.1)
    return module.state_dict()


def export_fused(size: int, folder: Path) -> Path:
    """The forward program as `fuseport export` writes it."""
    config = replace(VMAMBA_T, image_size=size)
    model = vmamba.model({"assumed": [], **asdict(config)})
    weights.fit(model.module, state(size), "random weights")
    model.module.eval()
    save_file(model.module.state_dict(), folder / "weights.safetensors")
    (program,) = capture(model, ["forward"])
    path = folder / f"fused_{size}.onnx"
    formats.get("onnx").write(program, path, formats.Options(folder / "weights.safetensors"))
    return path


def export_unrolled(size: int, folder: Path) -> Path:
    """The same module, its scan a loop over time, by torch's tracing exporter."""
    module = VMamba(replace(VMAMBA_T, image_size=size)).eval()
    module.load_state_dict(state(size))
    path = folder / f"unrolled_{size}.onnx"
    with plain_torch(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        image = torch.zeros(1, 3, size, size)
        torch.onnx.export(
            module, (image,), str(path), dynamo=False, opset_version=18, input_names=["x"],
            output_names=["logits"],
        )  # fmt: skip
    return path


@contextmanager
def plain_torch() -> Iterator[None]:
    """VMamba's ops as public code has them where its extension is not: plain torch, and loops."""
    own = {"cross_scan": walked, "cross_merge": merged, "selective_scan": looped}
    kept = {name: getattr(vmamba, name) for name in own}
    for name, function in own.items():
        setattr(vmamba, name, function)
    try:
        yield
    finally:
        for name, function in kept.items():
            setattr(vmamba, name, function)


def walked(x: Tensor) -> Tensor:
    """`cross_scan`."""
    forward = torch.stack([x.flatten(2), x.transpose(2, 3).flatten(2)], 1)
    return torch.cat([forward, forward.flip(3)], 1)


def merged(ys: Tensor, height: int, width: int) -> Tensor:
    """`cross_merge`."""
    rows, columns = (ys[:, :2] + ys[:, 2:].flip(3)).unbind(1)
    return rows + columns.unflatten(2, (width, height)).transpose(2, 3).flatten(2)


def looped(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, *,
    delta_bias: Tensor, delta_softplus: bool,
) -> Tensor:  # fmt: skip
    """`selective_scan` of four groups, a step of time at a time."""
    assert delta_softplus
    delta = F.softplus(delta + delta_bias[:, None])
    B, C = (t.repeat_interleave(u.shape[1] // t.shape[1], dim=1) for t in (B, C))
    decay = torch.exp(delta[:, :, None] * A[..., None])  # (b, d, N, l)
    added = (delta * u)[:, :, None] * B
    h, out = torch.zeros_like(added[..., 0]), []
    for t in range(u.shape[2]):
        h = decay[..., t] * h + added[..., t]
        out.append((h * C[..., t]).sum(-1))
    return torch.stack(out, 2) + D[:, None] * u


def nodes(path: Path) -> dict[str, int]:
    """As the file has them, and with every call of a function replaced by its body."""
    model = onnx.load(path, load_external_data=False)
    expanded = onnx.inliner.inline_local_functions(model) if model.functions else model
    return {"nodes": count(model.graph), "expanded": count(expanded.graph)}


def count(graph: onnx.GraphProto) -> int:
    """Nodes of a graph and of the graphs in it."""
    inner = [a.g for node in graph.node for a in node.attribute if a.HasField("g")]
    inner += [g for node in graph.node for a in node.attribute for g in a.graphs]
    return len(graph.node) + sum(map(count, inner))


def session(path: Path, *, library: bool) -> onnxruntime.InferenceSession:
    """With the library of fused kernels, or without."""
    options = onnxruntime.SessionOptions()
    if library:
        options.register_custom_ops_library(str(ops.onnxruntime_library()))
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def timed(sessions: dict[str, onnxruntime.InferenceSession], size: int, rounds: int) -> Any:
    """Median seconds of an image, all in turns; and how far outputs are from the first one's."""
    image = torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(1)).numpy()
    taken: dict[str, list[float]] = {name: [] for name in sessions}
    outputs = {name: one.run(None, {"x": image})[0] for name, one in sessions.items()}
    for _ in range(rounds):
        for name, one in sessions.items():
            begin = time.perf_counter()
            one.run(None, {"x": image})
            taken[name].append(time.perf_counter() - begin)
    first = next(iter(outputs.values()))
    return {
        name: {
            "seconds": statistics.median(times),
            "fastest": min(times),
            "images_per_second": 1 / statistics.median(times),
            "difference": float(abs(outputs[name] - first).max() / abs(first).max()),
        }
        for name, times in taken.items()
    }


def processor() -> str:
    """As the system calls it."""
    if platform.system() == "Linux":
        with Path("/proc/cpuinfo").open() as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    return platform.processor()


def main() -> None:
    """Print the figures, and write them where `--json` says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--unrolled", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    ops.register()
    result: dict[str, Any] = {
        "command": " ".join(["python", "tests/benchmarks/vmamba.py", *sys.argv[1:]]),
        "versions": {m.__name__: m.__version__ for m in (torch, onnx, onnxruntime)},
        "machine": {
            "processor": processor(),
            "cores": len(os.sched_getaffinity(0)),
            "system": platform.platform(aliased=True, terse=True),
        },
        "model": asdict(VMAMBA_T),
        "public": PUBLIC,
        "sizes": {},
    }
    sizes = dict.fromkeys((arguments.size, arguments.unrolled))
    with tempfile.TemporaryDirectory() as place:
        for size in sizes:
            begin = time.perf_counter()
            path = export_fused(size, Path(place))
            found: dict[str, Any] = {"fused export": time.perf_counter() - begin}
            found["fused file"] = nodes(path)
            sessions = {
                "fused kernels": session(path, library=True),
                "function bodies": session(path, library=False),
            }
            if size == arguments.unrolled:
                begin = time.perf_counter()
                path = export_unrolled(size, Path(place))
                found["unrolled export"] = time.perf_counter() - begin
                found["unrolled file"] = nodes(path)
                sessions["unrolled"] = session(path, library=False)
            found["runs"] = timed(sessions, size, arguments.rounds)
            result["sizes"][str(size)] = found
            print(size, json.dumps(found, indent=1), flush=True)
            if arguments.json:  # after each size: the unrolled export can take very long
                arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
