// How many exponentials a GPU does: what benchmarks hold kernels against.
#include "native/cuda.cuh"

namespace {

constexpr int THREADS = 256, CHAINS = 8;

__global__ void __launch_bounds__(THREADS) exponentials(int64_t rounds, float* to) {
  float x[CHAINS];
  for (int i = 0; i < CHAINS; ++i) x[i] = (float)threadIdx.x * -0.001f - (float)i;
  for (int64_t round = 0; round < rounds; ++round)
    for (int i = 0; i < CHAINS; ++i) x[i] = fuseport::cuda::exp2_of(x[i]);
  float sum = 0;
  for (int i = 0; i < CHAINS; ++i) sum += x[i];
  to[blockIdx.x * (int64_t)THREADS + threadIdx.x] = sum;
}

}  // namespace

// Numbers that `to` must hold, and exponentials of a launch, of `rounds` each.
extern "C" __attribute__((visibility("default"))) int64_t exponentials_threads() {
  return 32 * THREADS * (int64_t)fuseport::cuda::multiprocessors();
}

extern "C" __attribute__((visibility("default"))) int64_t exponentials_launch(int64_t rounds,
                                                                              float* to,
                                                                              void* stream) {
  const int64_t blocks = exponentials_threads() / THREADS;
  const char* error = fuseport::cuda::launch(exponentials, blocks, THREADS, 0, stream, rounds, to);
  return error ? -1 : blocks * THREADS * CHAINS * rounds;
}
