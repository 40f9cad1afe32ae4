"""The text of the script that `repro` writes."""

__all__ = ["SETTINGS", "TEXT", "WHAT"]

WHAT = "<what>"
"""Stands where the script says what it shows."""

SETTINGS = "# <settings>\n"
"""Stands where the script has what differs from one to another."""

TEXT = '''\
"""<what>: ends with 1 while the mismatch is there, with 0 once it is not.

It needs torch, and onnx or onnxruntime where it runs an ONNX file; nothing else.
"""

import json
import sys
from pathlib import Path

import torch

# <settings>

HERE = Path(__file__).resolve().parent
TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def read(file):
    """A safetensors file: a length, a header in JSON, and the tensors' bytes."""
    content = bytearray(file.read_bytes())
    begin = 8 + int.from_bytes(content[:8], "little")
    tensors = {}
    for name, entry in json.loads(content[8:begin]).items():
        if name == "__metadata__":
            continue
        dtype, (first, last) = TYPES[entry["dtype"]], entry["data_offsets"]
        tensor = torch.empty(entry["shape"], dtype=dtype)
        if last > first:
            flat = torch.frombuffer(
                content, dtype=torch.uint8, offset=begin + first, count=last - first
            )
            tensor = flat.clone().view(dtype).reshape(entry["shape"])
        tensors[name] = tensor
    return tensors


def array(tensor):
    """For ONNX; numpy itself has no bfloat16."""
    if tensor.dtype != torch.bfloat16:
        return tensor.numpy()
    import ml_dtypes

    return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)


def run(inputs):
    """Outputs by name."""
    if KIND == "onnxruntime":
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        for library in LIBRARIES:
            options.register_custom_ops_library(str(HERE / library))
        session = onnxruntime.InferenceSession(
            str(HERE / FILE), options, providers=["CPUExecutionProvider"]
        )
        names = [output.name for output in session.get_outputs()]
        results = session.run(names, {name: array(t) for name, t in inputs.items()})
        return {n: torch.from_numpy(r) for n, r in zip(names, results)}
    if KIND == "onnx_reference":
        from onnx.reference import ReferenceEvaluator

        evaluator = ReferenceEvaluator(str(HERE / FILE))
        results = evaluator.run(None, {name: array(t) for name, t in inputs.items()})
        return {n: torch.from_numpy(r) for n, r in zip(evaluator.output_names, results)}
    module = loaded()
    if COTANGENTS is None:
        with torch.no_grad():
            return named(module(*inputs.values()))
    leaves = {n: t.requires_grad_() if t.is_floating_point() else t for n, t in inputs.items()}
    outputs = named(module(*leaves.values()))
    wanted = {name: t for name, t in leaves.items() if t.requires_grad}
    wanted.update((n, p) for n, p in module.named_parameters() if p.requires_grad)
    found = torch.autograd.grad(
        [outputs[name] for name in COTANGENTS],
        list(wanted.values()),
        [data[f"cotangent/{name}"] for name in COTANGENTS],
        allow_unused=True,
    )
    return {**outputs, **{f"grad/{n}": g for n, g in zip(wanted, found) if g is not None}}


def loaded():
    """The file as a module of torch's."""
    for library in LIBRARIES:
        torch.ops.load_library(str(HERE / library))
    if KIND == "torchscript":
        return torch.jit.load(str(HERE / FILE))
    if KIND == "exported_program":
        return torch.export.load(HERE / FILE).module()
    from torch._inductor import aoti_load_package

    return aoti_load_package(str(HERE / FILE))


def named(result):
    """What a module returned, by name: one tensor stands for the only output there is."""
    if isinstance(result, dict):
        return result
    names = COTANGENTS or [name for name in BOUNDS]
    leaves = [result] if isinstance(result, torch.Tensor) else list(result)
    return dict(zip(names, leaves))


data = read(HERE / "data.safetensors")
results = run({name: data[f"input/{name}"] for name in INPUTS})
wrong = False
for name, (bound, rms_bound, dtype) in BOUNDS.items():
    truth, value = data[f"truth/{name}"], results.get(name)
    if value is None:
        print(f"MISMATCH {name}: it is not given")
        wrong = True
        continue
    error = (value.detach().double() - truth.double()).abs()
    largest = float(error.max()) if error.numel() else 0.0
    rms = float(error.square().mean().sqrt()) if error.numel() else 0.0
    right = largest <= bound and rms <= rms_bound and str(value.dtype) == f"torch.{dtype}"
    wrong = wrong or not right
    print(
        f"{'right   ' if right else 'MISMATCH'} {name}: off by {largest:.3g} where {bound:.3g} is "
        f"allowed, {rms:.3g} in root mean square where {rms_bound:.3g} is; {value.dtype}"
    )
sys.exit(1 if wrong else 0)
'''
