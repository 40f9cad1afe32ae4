// Norms on CUDA, whatever the memory layout is and however long a group: a block for each group of a
// row, which is read twice.
#pragma once

#include "rms_norm/cuda_rows.cuh"

namespace fuseport::rms_norm::cuda {

constexpr int PLAIN_THREADS = 128;

template <class Real>
FUSEPORT_DEVICE Real read(Dtype dtype, const void* from, int64_t i) {
  Real value = 0;
  with_stored<Real>(dtype,
                    [&](auto stored) { value = to_real(((const decltype(stored)*)from)[i]); });
  return value;
}

template <class Real>
FUSEPORT_DEVICE void write(Dtype dtype, Real value, void* to, int64_t i) {
  with_stored<Real>(dtype, [&](auto stored) { from_real(value, (decltype(stored)*)to + i); });
}

template <class Real>
FUSEPORT_DEVICE Real read_row(const Problem& p, const Rows& rows, int64_t row, int64_t channel) {
  return read<Real>(p.dtype, rows.data, begin_of(p, rows, row) + channel * rows.channel_stride);
}

template <class Real, bool GATED>
FUSEPORT_DEVICE Number<Real, GATED> number_of(const Problem& p, int64_t row, int64_t channel) {
  return {p, read_row<Real>(p, p.x, row, channel),
          GATED ? read_row<Real>(p, p.z, row, channel) : 0,
          read<Real>(p.weight_dtype, p.weight, channel * p.weight_stride)};
}

template <class Real, bool GATED>
__global__ void __launch_bounds__(PLAIN_THREADS) forward_plain_kernel(Problem p, Forward f) {
  FUSEPORT_SHARED(memory);
  const int64_t groups = quotient_of(p.channels, p.group);
  for (int64_t nth = blockIdx.x; nth < p.rows * groups; nth += gridDim.x) {
    const int64_t row = quotient_of(nth, groups), begin = (nth - row * groups) * p.group;
    Real squares = 0;
    for (int64_t i = threadIdx.x; i < p.group; i += PLAIN_THREADS) {
      const Real v = number_of<Real, GATED>(p, row, begin + i).normalised();
      squares += v * v;
    }
    squares = sum_over_threads(squares, PLAIN_THREADS, (Real*)memory);
    const Real rstd = inverse_root(squares / (Real)p.group + (Real)p.eps);
    if (threadIdx.x == 0) ((Real*)f.rstd)[nth] = rstd;
    for (int64_t i = threadIdx.x; i < p.group; i += PLAIN_THREADS)
      write(p.dtype, number_of<Real, GATED>(p, row, begin + i).out(rstd), f.out,
            row * p.channels + begin + i);
  }
}

// A block has one group of every so many rows; a thread's sums of weight's gradient are in memory.
template <class Real, bool GATED>
__global__ void __launch_bounds__(PLAIN_THREADS)
    backward_plain_kernel(Problem p, Plan plan, Gradients b, Real* parts) {
  FUSEPORT_SHARED(memory);
  const int64_t groups = quotient_of(p.channels, p.group);
  for (int64_t unit = blockIdx.x; unit < plan.parts * groups; unit += gridDim.x) {
    const int64_t part = quotient_of(unit, groups), group = unit - part * groups;
    Real* const sums = parts + part * p.channels;
    for (int64_t row = part; row < p.rows; row += plan.parts) {
      Real sum = 0;
      const int64_t begin = group * p.group;
      for (int64_t c = begin + threadIdx.x; c < begin + p.group; c += PLAIN_THREADS)
        sum += number_of<Real, GATED>(p, row, c).product(read_row<Real>(p, b.dout, row, c));
      sum = sum_over_threads(sum, PLAIN_THREADS, (Real*)memory);
      const Real rstd = ((const Real*)b.rstd)[row * groups + group];
      const Real mean = sum * rstd / (Real)p.group;
      for (int64_t c = begin + threadIdx.x; c < begin + p.group; c += PLAIN_THREADS) {
        Real dx, dz;
        const Real share = number_of<Real, GATED>(p, row, c).back(
            read_row<Real>(p, b.dout, row, c), rstd, mean, &dx, &dz);
        sums[c] = row == part ? share : sums[c] + share;
        write(p.dtype, dx, b.dx, row * p.channels + c);
        if (GATED) write(p.dtype, dz, b.dz, row * p.channels + c);
      }
    }
  }
}

}  // namespace fuseport::rms_norm::cuda
