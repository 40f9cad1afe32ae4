"""Layouts of folders, one module each; see `checkpoint.registry`."""
