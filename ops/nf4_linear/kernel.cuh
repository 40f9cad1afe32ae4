// The weight on CUDA. Values are looked up in a table in shared memory, of which each has a bank of its
// own: no lanes wait for each other. cuda_few.cuh has the product of few rows as layers mostly are,
// native/cuda_stored*.cuh all others.
#pragma once

#include "native/cuda_stored.cuh"
#include "nf4_linear/code.hpp"
#include "nf4_linear/cuda.hpp"

namespace fuseport::nf4_linear::cuda {

using namespace stored::cuda;

__device__ constexpr float VALUES[][16] = FUSEPORT_CODES;

template <class Real>
struct Code {
  Real* at;

  // All threads of a block call it, and wait.
  FUSEPORT_DEVICE Code(const Problem& p, char* memory) : at((Real*)memory) {
    if (threadIdx.x < 16) at[threadIdx.x] = VALUES[p.quant_type][threadIdx.x];
    __syncthreads();
  }

  // The value at a place in the flattened weight.
  FUSEPORT_DEVICE Real one(const Problem& p, int64_t place) const {
    const int byte = p.packed[place >> 1], index = place & 1 ? byte & 15 : byte >> 4;
    return at[index] * ((const Real*)p.absmax)[place >> p.block_shift];
  }

  // RUN values that are not decoded yet.
  struct Asked {
    Pack<uint8_t, RUN / 2> bytes;
    Real scale;
  };

  // From a multiple of RUN on; packed is aligned to their eight bytes.
  static FUSEPORT_DEVICE Asked ask(const Problem& p, int64_t place) {
    return {*(const Pack<uint8_t, RUN / 2>*)(p.packed + (place >> 1)),
            ((const Real*)p.absmax)[place >> p.block_shift]};
  }

  FUSEPORT_DEVICE void decode(const Asked& asked, Real* to) const {
#pragma unroll
    for (int i = 0; i < RUN; ++i) {
      const int byte = asked.bytes.at[i / 2];
      to[i] = at[i & 1 ? byte & 15 : byte >> 4] * asked.scale;
    }
  }
};

// As native/cuda_stored.cuh wants it.
template <class Real>
struct Weight {
  static constexpr int BYTES = 16 * sizeof(Real);
  using Asked = typename Code<Real>::Asked;

  const Problem& p;
  const Code<Real> code;

  FUSEPORT_DEVICE Weight(const Problem& problem, char* memory) : p(problem), code(p, memory) {}

  FUSEPORT_DEVICE Real one(int64_t row, int64_t column) const {
    return code.one(p, row * p.in + column);
  }

  FUSEPORT_DEVICE Asked ask(int64_t row, int64_t column) const {
    return code.ask(p, row * p.in + column);
  }

  FUSEPORT_DEVICE void decode(const Asked& asked, Real* to) const { code.decode(asked, to); }

  static bool in_runs(const Problem& p, int64_t column, int64_t columns) {
    return p.in % RUN == 0 && column % RUN == 0 && columns % RUN == 0 &&
           (uintptr_t)p.packed % (RUN / 2) == 0;
  }
};

}  // namespace fuseport::nf4_linear::cuda
