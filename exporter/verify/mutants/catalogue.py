"""The catalogue of planted bugs, as data: every kind that the verifier has to see.

Kinds of kernels, gradients and fakes are derived for any op; an op's own are in its `cases.py`.
Kinds of lowerings edit the bodies of its ONNX nodes, those of artifacts the files of a bundle.
"""

from functools import partial

import torch

from fuseport.exporter.verify.mutants import edits, fakes, files, kernels, onnx_edits
from fuseport.exporter.verify.mutants.kinds import Kind

__all__ = ["CATALOGUE", "OWN_FORWARD", "OWN_GRADIENT"]

_VALUE = ("value", "gradcheck")
_BACKWARD = ("backward", "gradcheck")
_FAKE = ("fake", "inputs", "export", "opcheck")

_FORWARD = (
    Kind("wrong sign", "an output has the other sign", "forward", _VALUE,
         kernels.outputs(edits.negated)),
    Kind("dropped term", "an input is not read: it counts as zero", "forward", _VALUE,
         kernels.inputs(edits.zero)),
    Kind("inputs swapped", "two inputs, such as B and C, are taken for one another", "forward",
         _VALUE, kernels.swapped_inputs),
    Kind("wrong index", "an input's entries are read one channel or group further", "forward",
         _VALUE, kernels.inputs(edits.moved_by_one, lambda t: t.dim() > 0 and t.shape[
             min(1, t.dim() - 1)] > 1)),
    Kind("last step", "the last step of an output is that before it", "forward", _VALUE,
         kernels.outputs(edits.stale_last_step)),
    Kind("chunk edge", "the first step of the second chunk of 64 is the step before it", "forward",
         _VALUE, kernels.outputs(edits.at_chunk_edge, edits.has_edge)),
    Kind("last token dropped", "the last step is zero where l % chunk == 1", "forward", _VALUE,
         kernels.outputs(edits.chunks_last_dropped, edits.has_rest_of_one),
         "VMamba's selective_scan_easy"),
    Kind("first of the batch", "the first entry of a batch is returned for all", "forward", _VALUE,
         kernels.outputs(edits.first_for_all, lambda t: t.dim() > 1 and len(t) > 1)),
    Kind("off by 1 %", "one channel of an output is 1 % off", "forward", _VALUE,
         kernels.outputs(partial(edits.off_in_one_channel, by=1e-2))),
    Kind("off by 0.1 %", "one channel of an output is 0.1 % off", "forward", _VALUE,
         kernels.outputs(partial(edits.off_in_one_channel, by=1e-3))),
    Kind("output in half", "an output is rounded to bfloat16 on its way", "forward", _VALUE,
         kernels.outputs(edits.in_half)),
    Kind("input in half", "an input is rounded to bfloat16 before it is used", "forward", _VALUE,
         kernels.inputs(edits.in_half)),
    Kind("flag ignored", "a flag is hard-coded", "forward", _VALUE, kernels.flag_fixed),
    Kind("another eps", "a number such as an epsilon is ten times what is given", "forward",
         _VALUE, kernels.number_off),
    Kind("not contiguous", "memory that is not contiguous is read as if it were", "forward",
         _VALUE, kernels.inputs(edits.misread)),
    Kind("uninitialised", "one channel of an output is never written", "forward", _VALUE,
         kernels.outputs(edits.unwritten)),
    Kind("third call", "right twice, wrong in every third call", "forward",
         ("third call", "value"), kernels.third_call, "pytorch#108670"),
    Kind("race of threads", "the last bits depend on the number of threads", "forward",
         ("threads",), kernels.threads),
    Kind("race", "the last bits depend on the run", "forward", ("third call",),
         kernels.unrepeatable),
    Kind("stale result", "the results of an earlier call with these sizes are returned", "forward",
         ("third call", "gradcheck"), kernels.kept_results),
    Kind("input changed", "an input is written to", "forward", ("inputs",), kernels.input_changed),
    Kind("wrong dtype", "an output has another dtype", "forward", _VALUE,
         kernels.outputs(lambda t: t.to(
             torch.float32 if t.dtype != torch.float32 else torch.float64))),
    Kind("wrong shape", "an output has one dimension more", "forward", _VALUE,
         kernels.outputs(lambda t: t.unsqueeze(-1))),
)  # fmt: skip

_GRADIENT = (
    Kind("zero gradient", "a gradient is zero", "gradient", _BACKWARD,
         kernels.outputs(edits.zero)),
    Kind("detached gradient", "an input is cut off: it gets no gradient", "gradient", _BACKWARD,
         kernels.detached, key="AutogradCPU"),
    Kind("gradient's sign", "a gradient has the other sign", "gradient", _BACKWARD,
         kernels.outputs(edits.negated)),
    Kind("gradient's term", "an input of the backward is not read: it counts as zero", "gradient",
         _BACKWARD, kernels.inputs(edits.zero)),
    Kind("gradient's inputs swapped", "the backward takes two inputs for one another", "gradient",
         _BACKWARD, kernels.swapped_inputs),
    Kind("another's gradient", "two gradients are returned for one another", "gradient", _BACKWARD,
         kernels.another_gradient),
    Kind("passes through", "a cotangent is returned as a gradient", "gradient", _BACKWARD,
         kernels.as_the_cotangent, "entrenar: grad_input = grad_output; RMSNorm passes through"),
    Kind("missing reduction", "a sum over the batch has its first entry alone", "gradient",
         _BACKWARD, kernels.first_of_batch_alone),
    Kind("collapsed", "a gradient is its own sum throughout, a scalar", "gradient", _BACKWARD,
         kernels.outputs(edits.summed, lambda t: t.numel() > 1),
         "mamba_inner_fn with bias: mamba#37, mamba#203, transformers#38600"),
    Kind("gradient's index", "a gradient's entries are one channel or group further", "gradient",
         _BACKWARD, kernels.outputs(edits.moved_by_one, lambda t: t.dim() > 0 and t.shape[
             min(1, t.dim() - 1)] > 1)),
    Kind("cotangent of ones", "a cotangent counts as ones", "gradient", _BACKWARD,
         kernels.cotangent_of_ones),
    Kind("cotangent dropped", "of several cotangents one is forgotten", "gradient", _BACKWARD,
         kernels.first_cotangent_alone),
    Kind("gradient's last step", "the last step of a gradient is that before it", "gradient",
         _BACKWARD, kernels.outputs(edits.stale_last_step)),
    Kind("gradient's chunk edge", "a gradient's first step after 64 is the step before it",
         "gradient", _BACKWARD, kernels.outputs(edits.at_chunk_edge, edits.has_edge)),
    Kind("gradient off by 1 %", "one channel of a gradient is 1 % off", "gradient", _BACKWARD,
         kernels.outputs(partial(edits.off_in_one_channel, by=1e-2))),
    Kind("gradient off by 0.1 %", "one channel of a gradient is 0.1 % off", "gradient", _BACKWARD,
         kernels.outputs(partial(edits.off_in_one_channel, by=1e-3))),
    Kind("gradient in half", "a gradient is summed in bfloat16", "gradient", _BACKWARD,
         kernels.outputs(edits.in_half)),
    Kind("saved in half", "what the backward reads was rounded to bfloat16", "gradient", _BACKWARD,
         kernels.inputs(edits.in_half)),
    Kind("flag ignored in backward", "the backward has a flag hard-coded", "gradient", _BACKWARD,
         kernels.flag_fixed, "a public custom_op of the scan: softplus off in its backward"),
    Kind("another eps in backward", "the backward has ten times the epsilon given", "gradient",
         _BACKWARD, kernels.number_off),
    Kind("cotangent not contiguous", "the backward reads memory as if it were contiguous",
         "gradient", _BACKWARD, kernels.inputs(edits.misread)),
    Kind("gradient uninitialised", "one channel of a gradient is never written", "gradient",
         _BACKWARD, kernels.outputs(edits.unwritten)),
    Kind("gradient's third call", "right twice, wrong in every third call", "gradient",
         ("third call", "backward"), kernels.third_call,
         "pytorch#108670: outputs agree, gradients differ from the third call on"),
    Kind("gradient's race", "a gradient's last bits depend on the run", "gradient",
         ("third call",), kernels.unrepeatable),
    Kind("stale gradient", "the gradients of an earlier call with these sizes are returned",
         "gradient", ("gradcheck", "backward"), kernels.kept_results),
)  # fmt: skip

_FAKES = (
    Kind("fake's strides", "the fake's output is transposed in memory", "fake", _FAKE,
         fakes.outputs(lambda t: t.new_empty(t.shape[::-1]).permute(*range(t.dim())[::-1]), 2)),
    Kind("fake like an input", "the fake's output has the strides of an input", "fake", _FAKE,
         fakes.strides_of_input, "empty_like(u) under AOTInductor: silently wrong by 6.8"),
    Kind("fake's dtype", "the fake's output has another dtype", "fake", _FAKE,
         fakes.outputs(lambda t: torch.empty_strided(
             t.shape, t.stride(), device=t.device,
             dtype=torch.float64 if t.dtype != torch.float64 else torch.float32))),
    Kind("fake's shape", "the fake's output is one longer", "fake", _FAKE,
         fakes.outputs(lambda t: t.new_empty((*t.shape[:-1], t.shape[-1] + 1)), 1)),
    Kind("fake swaps outputs", "the fake returns two outputs for one another", "fake", _FAKE,
         fakes.swapped, "a public custom_op of the scan: its fake backward swaps dz and out_z"),
    Kind("fake's sizes baked in", "the fake keeps the sizes of its first call", "fake", _FAKE,
         fakes.baked_in),
    Kind("fake reads values", "the fake depends on values", "fake", _FAKE, fakes.reads_values),
    Kind("fake refuses nothing", "the fake takes inputs that the kernel refuses", "fake",
         ("inputs",), fakes.careless),
)  # fmt: skip

OWN_FORWARD = Kind("own", "a mistake that only this op can make", "forward", _VALUE)
OWN_GRADIENT = Kind("own, in backward", "the same in its backward", "gradient", _BACKWARD)
"""Those that ops declare themselves, `OpSpec.bugs`."""

CATALOGUE: tuple[Kind, ...] = (
    *_FORWARD,
    *_GRADIENT,
    *_FAKES,
    *onnx_edits.BODIES,
    *files.FILES,
)
"""Every kind, but for those of single ops."""
