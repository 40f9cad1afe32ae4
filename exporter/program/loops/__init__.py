"""Loops of a program: turns of model code as one `scan`, and what its gradient needs of them."""
