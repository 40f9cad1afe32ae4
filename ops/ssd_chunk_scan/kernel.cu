// The kernels for CUDA, for all dtypes; ops/cuda.py compiles this file with nvcc.
#include "ssd_chunk_scan/kernel.cuh"

namespace fuseport::ssd_chunk_scan::cuda {

const char* find_steps(const Problem& p, const Steps& s, void* stream) {
  return with_dtype(p.dtype, [&](auto stored) {
    return over(heads_of(p), steps_kernel<decltype(stored)>, stream, p, s);
  });
}

const char* spread(const Problem& p, const Steps& s, const Forward& f, void* stream) {
  return run_spread(p, s, f, stream);
}

const char* carry(const Problem& p, const Steps& s, const Segments& segments, const Forward& f,
                  void* stream) {
  const int64_t count = p.batches * p.heads * p.width * p.states;
  return p.dtype == Dtype::float64 ? over(count, carry_kernel<double>, stream, p, s, segments, f)
                                   : over(count, carry_kernel<float>, stream, p, s, segments, f);
}

const char* mix(const Problem& p, const Steps& s, const Forward& f, void* stream) {
  const int64_t count = heads_of(p) * T * T / 4;
  return p.dtype == Dtype::float64 ? over(count, mix_kernel<double>, stream, p, s, f)
                                   : over(count, mix_kernel<float>, stream, p, s, f);
}

const char* finish(const Problem& p, const Steps& s, const Forward& f, void* stream) {
  return run_finish(p, s, f, stream);
}

bool fused(const Problem& p) {
  return p.dtype == Dtype::bfloat16 && p.states > 0 && p.states <= MOST_FUSED;
}

Segments segments(const Problem& p) { return segments_of(p); }

const char* add_up(const Problem& p, const Steps& s, const Segments& segments, const Forward& f,
                   void* stream) {
  return run_fused<false>(p, s, segments, f, stream);
}

const char* walk(const Problem& p, const Steps& s, const Segments& segments, const Forward& f,
                 void* stream) {
  return run_fused<true>(p, s, segments, f, stream);
}

const char* spread_back(const Problem& p, const Steps& s, const Backward& b, void* stream) {
  return run_spread_back(p, s, b, stream);
}

const char* carry_back(const Problem& p, const Steps& s, const Backward& b, void* stream) {
  const int64_t count = p.batches * p.heads * p.width * p.states;
  return p.dtype == Dtype::float64 ? over(count, carry_back_kernel<double>, stream, p, s, b)
                                   : over(count, carry_back_kernel<float>, stream, p, s, b);
}

const char* mix_back(const Problem& p, const Steps& s, const Backward& b, void* stream) {
  return run_mix_back(p, s, b, stream);
}

const char* finish_back(const Problem& p, const Steps& s, const Backward& b, void* stream) {
  return run_finish_back(p, s, b, stream);
}

}  // namespace fuseport::ssd_chunk_scan::cuda
