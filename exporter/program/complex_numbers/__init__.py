"""Programs of complex numbers, as programs of real ones."""
