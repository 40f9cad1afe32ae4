"""Sequences of many lengths, packed or one by one, and recurrent layers over them."""
