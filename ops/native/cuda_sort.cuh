// Sorting on the device, by CUB: of CUDA's headers the largest by far, which only kernels that sort
// pull in. The header of tests has the same functions.
#pragma once

#include "native/cuda.cuh"

#if defined(__CUDACC__)

#if !__has_include(<cub/device/device_radix_sort.cuh>)
#error "CUB's headers are not beside nvcc: apt install cuda-cccl, or pip install nvidia-cuda-cccl"
#endif
#define CCCL_DISABLE_NVTX  // marks for profilers, which take a sixth of CUB's time to compile
#include <cub/device/device_radix_sort.cuh>

#include <utility>

namespace fuseport::cuda {

// How many bytes of scratch memory sort_pairs takes for so many pairs, or fewer; null, or what went
// wrong.
inline const char* sort_scratch(int64_t count, int bits, int64_t* bytes) {
  cub::DoubleBuffer<int32_t> keys, values;
  size_t taken = 0;
  const cudaError_t error =
      cub::DeviceRadixSort::SortPairs(nullptr, taken, keys, values, (int)count, 0, bits);
  *bytes = (int64_t)taken;
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// Sorts pairs by the lowest `bits` bits of their keys, which are not negative; those with one key
// stay in their order. They are in keys[0] and values[0], also afterwards: where they went to the
// arrays beside, pointers are swapped. Null, or what went wrong. It does not wait.
inline const char* sort_pairs(int32_t* (&keys)[2], int32_t* (&values)[2], int64_t count, int bits,
                              void* scratch, int64_t bytes, void* stream) {
  cub::DoubleBuffer<int32_t> k(keys[0], keys[1]), v(values[0], values[1]);
  auto given = (size_t)bytes;
  const cudaError_t error = cub::DeviceRadixSort::SortPairs(scratch, given, k, v, (int)count, 0,
                                                            bits, (cudaStream_t)stream);
  if (k.selector) std::swap(keys[0], keys[1]);
  if (v.selector) std::swap(values[0], values[1]);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace fuseport::cuda

#endif
