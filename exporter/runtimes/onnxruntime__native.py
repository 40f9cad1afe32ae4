"""ONNX Runtime, on files whose fused ops are operators of ONNX or of its own."""

from fuseport.exporter.runtimes._onnxruntime import PROVIDERS, load, missing

__all__ = ["AUTOGRAD", "DEVICES", "FORMAT", "OPTIMISES", "load", "missing"]

FORMAT = "onnx_native"
AUTOGRAD = False
DEVICES = PROVIDERS
OPTIMISES = True
