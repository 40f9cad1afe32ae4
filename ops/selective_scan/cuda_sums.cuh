// Sums over blocks on CUDA, always in the order of the blocks.
#pragma once

#include "selective_scan/cuda_tiles.cuh"

namespace fuseport::selective_scan::cuda {

// Of `count` numbers each, `parts` in a row: their sums, in `dtype`.
template <class Real>
__global__ void __launch_bounds__(256)
    sum_kernel(const double* from, int64_t parts, int64_t count, Dtype dtype, void* total) {
  for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < count;
       i += gridDim.x * (int64_t)blockDim.x) {
    double sum = 0;
    for (int64_t part = 0; part < parts; ++part) sum += from[part * count + i];
    with_stored<Real>(dtype, [&](auto stored) {
      from_real((Real)sum, (decltype(stored)*)total + i);
    });
  }
}

// dB or dC of one that varies: (b, blocks, N, row) to (b, G, N, row), of numbers of `dtype`.
template <class Real>
__global__ void __launch_bounds__(256)
    sum_blocks_kernel(const Real* from, int64_t batches, int64_t groups, int64_t blocks,
                      int64_t count, Dtype dtype, void* total) {
  const int64_t all = batches * groups * count;
  for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < all;
       i += gridDim.x * (int64_t)blockDim.x) {
    const Real* first = from + i / count * blocks * count + i % count;
    double sum = 0;
    for (int64_t block = 0; block < blocks; ++block) sum += (double)first[block * count];
    with_stored<Real>(dtype, [&](auto stored) {
      from_real((Real)sum, (decltype(stored)*)total + i);
    });
  }
}

}  // namespace fuseport::selective_scan::cuda
