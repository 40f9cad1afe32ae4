"""Parts of the format ONNX, which is written by torch.onnx: what goes before and after it."""
