"""Blocks of networks."""
