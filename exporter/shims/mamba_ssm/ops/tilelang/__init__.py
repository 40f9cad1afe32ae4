"""Served whole by its modules."""
