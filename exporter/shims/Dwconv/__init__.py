"""Stands in for `Dwconv`, depthwise convolutions with large filters: Spatial-Mamba calls them."""
