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

const char* carry(const Problem& p, const Steps& s, const Segments& segments, const Walk& walk,
                  void* stream) {
  return run_carry(p, s, segments, walk, stream);
}

const char* mix(const Problem& p, const Steps& s, const Forward& f, void* stream) {
  const int64_t count = heads_of(p) * T * T / 4;
  return p.dtype == Dtype::float64 ? over(count, mix_kernel<double>, stream, p, s, f)
                                   : over(count, mix_kernel<float>, stream, p, s, f);
}

const char* finish(const Problem& p, const Steps& s, const Forward& f, void* stream) {
  return run_finish(p, s, f, stream);
}

const char* spread_back(const Problem& p, const Steps& s, const Backward& b, void* stream) {
  return run_spread_back(p, s, b, stream);
}

const char* mix_back(const Problem& p, const Steps& s, const Backward& b, void* stream) {
  return run_mix_back(p, s, b, stream);
}

const char* finish_back(const Problem& p, const Steps& s, const Backward& b, void* stream) {
  return run_finish_back(p, s, b, stream);
}

const char* multiply(const Problem& p, const Product& product, void* stream) {
  return p.dtype == Dtype::float64 ? run_multiply<double>(product, stream)
                                   : run_multiply<float>(product, stream);
}

const char* sum_of_Q(const Problem& p, const Backward& b, void* to, void* stream) {
  const int64_t count = p.batches * p.chunks() * p.groups * T * T;
  return p.dtype == Dtype::float64 ? over(count, sum_of_Q_kernel<double>, stream, p, b, to)
                                   : over(count, sum_of_Q_kernel<float>, stream, p, b, to);
}

const char* join(const Problem& p, const void* of_chunks, int64_t parts, void* to, void* stream) {
  const int64_t count = p.batches * p.length * p.groups * p.states;
  return with_dtype(p.dtype, [&](auto stored) {
    return over(count, join_kernel<decltype(stored)>, stream, p, of_chunks, parts, to);
  });
}

const char* sum_of_chunks(const Problem& p, const double* from, int64_t count, void* to,
                          void* stream) {
  if (count == 0) return nullptr;
  const auto run = [&](auto kernel) {
    return launch(kernel, part_blocks(count), PART_THREADS, PART_SHARED, stream, from,
                  p.batches * p.chunks(), count, to);
  };
  return p.dtype == Dtype::float64 ? run(sum_of_chunks_kernel<double>)
                                   : run(sum_of_chunks_kernel<float>);
}

bool walks(const Problem& p) {
  return p.dtype != Dtype::float64 && p.states > 0 && p.states <= MOST_STATES && walks_fit(p);
}

Segments segments(const Problem& p) { return segments_of(p); }

const char* add_up(const Problem& p, const Steps& s, const Segments& segments, const Walk& walk,
                   void* stream) {
  return walk.back ? run_walk<Walks::add_up, true>(p, s, segments, walk, stream)
                   : run_walk<Walks::add_up, false>(p, s, segments, walk, stream);
}

const char* walk(const Problem& p, const Steps& s, const Segments& segments, const Walk& walk,
                 void* stream) {
  if (walk.back) return run_walk<Walks::keep, true>(p, s, segments, walk, stream);
  if (walk.dy) return run_walk<Walks::gate, false>(p, s, segments, walk, stream);
  if (walk.kept) return run_walk<Walks::keep, false>(p, s, segments, walk, stream);
  return run_walk<Walks::out, false>(p, s, segments, walk, stream);
}

bool has_gradients(const Problem& p) { return walks(p) && gradients_fit(p); }

int64_t sums_of_heads(const Problem& p) {
  return (p.heads_per_group() + heads_together(p) - 1) / heads_together(p);
}

const char* gradients(const Problem& p, const Steps& s, const Backward& b, void* stream) {
  return run_gradients(p, s, b, stream);
}

}  // namespace fuseport::ssd_chunk_scan::cuda
