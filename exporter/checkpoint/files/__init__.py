"""Layouts of files that torch.save wrote, one module each; see `checkpoint.registry`."""
