"""Stands in for the package `fast_hadamard_transform` of Dao-AILab."""

from .fast_hadamard_transform_interface import hadamard_transform

__all__ = ["hadamard_transform"]
