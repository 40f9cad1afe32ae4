// What the kernels of norms on CUDA share: where rows are, sums over the threads of a group, gates.
#pragma once

#include "native/cuda_vectors.cuh"
#include "rms_norm/cuda.hpp"

namespace fuseport::rms_norm::cuda {

using namespace fuseport::cuda;

// Where a row begins, in numbers from the first: in a matrix, without a division.
FUSEPORT_DEVICE int64_t begin_of(const Problem& p, const Rows& rows, int64_t row) {
  const int64_t outer = p.rows == p.inner ? 0 : quotient_of(row, p.inner);
  return outer * rows.outer_stride + (row - outer * p.inner) * rows.inner_stride;
}

FUSEPORT_DEVICE float inverse_root(float x) { return 1 / ::sqrtf(x); }
FUSEPORT_DEVICE double inverse_root(double x) { return 1 / ::sqrt(x); }

// Sums over `lanes` threads in a row, a power of two; all threads of a block call it.
template <class Real>
FUSEPORT_DEVICE Real sum_over_threads(Real value, int lanes, Real* shared) {
  for (int mask = (lanes < 32 ? lanes : 32) / 2; mask > 0; mask /= 2)
    value += shuffled(value, mask);
  if (lanes <= 32) return value;
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  value = 0;
  const int first = (int)threadIdx.x / 32 & -(lanes / 32);
  for (int warp = 0; warp < lanes / 32; ++warp) value += shared[first + warp];
  return value;
}

// SiLU(z), and its derivative.
template <class Stored>
struct Gate {
  Real<Stored> silu, slope;

  FUSEPORT_DEVICE explicit Gate(Real<Stored> z) {
    const Real<Stored> sigmoid = logistic_of<Stored>(z);
    silu = z * sigmoid;
    slope = sigmoid * (1 + z * (1 - sigmoid));
  }
};

// One number of a row: what it is, what comes of it, and what its gradients are. Where the gate comes
// first, it is x·SiLU(z) that is normalised.
template <class Stored, bool GATED>
struct Number {
  using Value = Real<Stored>;
  Value x, weight;
  Gate<Stored> gate;
  bool gate_first;

  FUSEPORT_DEVICE Number(const Problem& p, Value x, Value z, Value weight)
      : x(x), weight(weight), gate(GATED ? z : 0), gate_first(p.mode == Mode::gate_first) {}

  FUSEPORT_DEVICE Value normalised() const { return GATED && gate_first ? x * gate.silu : x; }
  FUSEPORT_DEVICE Value out(Value rstd) const {
    const Value y = normalised() * rstd * weight;
    return GATED && !gate_first ? y * gate.silu : y;
  }
  // The cotangent of n·weight, and its product with what was normalised, times weight.
  FUSEPORT_DEVICE Value cotangent(Value dy) const {
    return GATED && !gate_first ? dy * gate.silu : dy;
  }
  FUSEPORT_DEVICE Value product(Value dy) const { return normalised() * (cotangent(dy) * weight); }
  // Writes dx and dz, and returns the share of dweight. `mean` is that of g·n.
  FUSEPORT_DEVICE Value back(Value dy, Value rstd, Value mean, Value* dx, Value* dz) const {
    const Value n = normalised() * rstd, dn = cotangent(dy);
    const Value dv = rstd * (dn * weight - n * mean);
    *dx = GATED && gate_first ? dv * gate.silu : dv;
    if (GATED) *dz = (gate_first ? dv * x : dy * n * weight) * gate.slope;
    return dn * n;
  }
};

// Adds up parts, (parts, d), to the gradient of weight.
template <class Real>
__global__ void __launch_bounds__(PART_THREADS)
    sum_weight_kernel(Problem p, const Real* parts, int64_t count, void* total) {
  FUSEPORT_SHARED(memory);
  sum_parts(parts, count, p.channels, (double*)memory, [&](int64_t i, double sum) {
    with_stored<Real>(p.weight_dtype, [&](auto stored) {
      from_real((Real)sum, (decltype(stored)*)total + i);
    });
  });
}

}  // namespace fuseport::rms_norm::cuda
