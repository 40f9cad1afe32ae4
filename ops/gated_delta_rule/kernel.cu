// The kernels for CUDA, for all dtypes; ops/cuda.py compiles this file with nvcc.
#include "gated_delta_rule/cuda_backward.cuh"
#include "gated_delta_rule/cuda_chunks_backward.cuh"

namespace fuseport::gated_delta_rule::cuda {

int64_t forward_scratch(const Problem& p) { return in_chunks(p) ? chunks_scratch(p) : 0; }

const char* forward(const Problem& p, const Forward& to, void* scratch, void* stream) {
  if (in_chunks(p))
    return with_keys(p, [&](auto stored, auto keys) {
      constexpr int N = decltype(keys)::value;
      return run_chunks<decltype(stored), N>(p, to, {}, (Prepared*)scratch, stream);
    });
  return with_dtype(p.dtype, [&](auto stored) {
    Walk walk;
    walk.out = to.out;
    walk.running = to.final_state;
    return run_walk<decltype(stored), false>(p, walk, stream);
  });
}

int64_t backward_scratch(const Problem& p) {
  if (back_in_chunks(p)) return ChunksScratch(p, nullptr).bytes;
  return p.dtype == Dtype::float64 ? BackwardScratch<double>(p, nullptr).bytes
                                   : BackwardScratch<float>(p, nullptr).bytes;
}

const char* backward(const Problem& p, const Backward& to, void* scratch, void* stream) {
  if (back_in_chunks(p)) return run_backward_in_chunks(p, to, {p, scratch}, stream);
  return with_dtype(p.dtype, [&](auto stored) {
    using Stored = decltype(stored);
    return run_backward<Stored>(p, to, BackwardScratch<Real<Stored>>(p, scratch), stream);
  });
}

}  // namespace fuseport::gated_delta_rule::cuda
