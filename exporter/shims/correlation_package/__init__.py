"""Stands in for `correlation_package`, which PWC-Net (NVlabs) is installed with."""
