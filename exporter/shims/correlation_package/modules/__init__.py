"""The correlations as modules."""
