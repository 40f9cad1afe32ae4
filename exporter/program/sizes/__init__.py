"""Sizes in a capture, and numbers that code computes of them, or reads of tensors, in Python."""
