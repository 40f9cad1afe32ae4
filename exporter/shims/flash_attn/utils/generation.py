"""What models import to generate text: that of the stand-in for mamba_ssm."""

from fuseport.exporter.shims.mamba_ssm.utils.generation import (
    GenerationMixin,
    InferenceParams,
    decode,
    sample,
    update_graph_cache,
)

__all__ = ["GenerationMixin", "InferenceParams", "decode", "sample", "update_graph_cache"]
