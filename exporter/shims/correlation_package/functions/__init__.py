"""The correlations as functions."""
