// The binding of a stored weight's kernels for ONNX Runtime's CUDA provider, as stored_ort.hpp wants it.
#pragma once

#include "native/ort_cuda.hpp"
#include "native/stored_weight.hpp"

namespace fuseport::stored {

// By what an op's cuda.hpp has.
template <class Problem, int64_t (*FORWARD_SCRATCH)(const Problem&),
          const char* (*FORWARD)(const Problem&, const Forward&, void*, void*),
          int64_t (*BACKWARD_SCRATCH)(const Problem&),
          const char* (*BACKWARD)(const Problem&, const Backward&, void*, void*)>
struct OnCuda {
  using Context = ort::CudaContext;

  static void forward(const Context& context, const Problem& p, const Forward& f) {
    const auto scratch = context.scratch(FORWARD_SCRATCH(p));
    context.started(FORWARD(p, f, scratch.data(), context.stream()));
  }

  static void backward(const Context& context, const Problem& p, const Backward& b) {
    const auto scratch = context.scratch(BACKWARD_SCRATCH(p));
    context.started(BACKWARD(p, b, scratch.data(), context.stream()));
  }
};

}  // namespace fuseport::stored
