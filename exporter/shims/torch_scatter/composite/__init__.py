"""What is made of several reductions."""

from .logsumexp import scatter_logsumexp
from .softmax import scatter_log_softmax, scatter_softmax
from .std import scatter_std

__all__ = ["scatter_log_softmax", "scatter_logsumexp", "scatter_softmax", "scatter_std"]
