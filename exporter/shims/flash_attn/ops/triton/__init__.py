"""What is written in Triton there and calls ops here, under the same names."""
