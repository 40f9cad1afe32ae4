// States, or their cotangents, of a head on their way from device memory into shared memory, as parts
// for tensor cores.
#pragma once

#include "ssd_chunk_scan/cuda_tiles.cuh"

namespace fuseport::ssd_chunk_scan::cuda {

constexpr int HALF = 64;  // states that are at once in shared memory
constexpr int STATE_ROW = HALF + PAD<BFloat16>;
using StateParts = BFloat16[3][COLUMNS * STATE_ROW];

// A thread's share of 64 columns of x and 64 states: four states in a row of each sixteenth column. All
// are asked for before the first is waited for.
struct StatesAsked {
  static constexpr int COUNT = 4, ACROSS = HALF / COUNT, DOWN = THREADS / ACROSS;
  static constexpr int ROWS = COLUMNS / DOWN;
  Pack<float, COUNT> packs[ROWS];

  // From `first` on, of which `columns` and p.states are there; zeros beyond.
  FUSEPORT_DEVICE void ask(const Problem& p, const float* from, int columns, int first) {
    const int q = (int)threadIdx.x / ACROSS, n = first + (int)threadIdx.x % ACROSS * COUNT;
    const int64_t left = p.states - n;
    const int count = left < 0 ? 0 : left < COUNT ? (int)left : COUNT;
    const float* at = from + q * p.states + n;
    if (p.states % COUNT == 0) {
#pragma unroll
      for (int i = 0; i < ROWS; ++i, at += DOWN * p.states)
        packs[i] = count > 0 && q + i * DOWN < columns ? *(const Pack<float, COUNT>*)at
                                                       : Pack<float, COUNT>{};
      return;
    }
#pragma unroll
    for (int i = 0; i < ROWS; ++i, at += DOWN * p.states)
      packs[i] = load_pack<COUNT>(at, 1, q + i * DOWN < columns ? count : 0, false);
  }

  FUSEPORT_DEVICE void put(StateParts& to) const {
    const int q = (int)threadIdx.x / ACROSS, n = (int)threadIdx.x % ACROSS * COUNT;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      uint32_t parts[2][3];
#pragma unroll
      for (int k = 0; k < 2; ++k) cut(packs[i].at[2 * k], packs[i].at[2 * k + 1], parts[k]);
#pragma unroll
      for (int part = 0; part < 3; ++part)
        *(Pack<uint32_t, 2>*)(to[part] + (q + i * DOWN) * STATE_ROW + n) = {parts[0][part],
                                                                           parts[1][part]};
    }
  }

  // The sum of products with another's.
  FUSEPORT_DEVICE double dot(const StatesAsked& other) const {
    double sum = 0;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      float products[COUNT];
#pragma unroll
      for (int k = 0; k < COUNT; ++k) products[k] = packs[i].at[k] * other.packs[i].at[k];
      sum += (double)((products[0] + products[1]) + (products[2] + products[3]));
    }
    return sum;
  }
};

}  // namespace fuseport::ssd_chunk_scan::cuda
