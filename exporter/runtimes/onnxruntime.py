"""ONNX Runtime: custom ops run through their function bodies."""

from fuseport.exporter.runtimes._onnxruntime import PROVIDERS, load, missing

__all__ = ["AUTOGRAD", "DEVICES", "FORMAT", "OPTIMISES", "load", "missing"]

FORMAT = "onnx"
AUTOGRAD = False
DEVICES = PROVIDERS
OPTIMISES = True
