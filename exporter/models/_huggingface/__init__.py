"""Hugging Face's models: where their code is, fused ops, the decoding step, names in files."""
