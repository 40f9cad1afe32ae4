"""Layers made of several ops, as models have them: they export as those ops, and are no ops.

Import one from its own module: `from fuseport.ops.compositions.mamba_inner import mamba_inner_fn`.
"""
