// What the convolution on CUDA copies and sums up besides: images channels last and back, the weight in
// the order of terms and its gradient back from there, the gradient of the bias.
#pragma once

#include "deform_conv2d/cuda_samples.cuh"

namespace fuseport::deform_conv2d::cuda {

// Of each of `batches` matrices (rows, columns), the transpose: a tile at a time in shared memory.
template <class Stored>
__global__ void __launch_bounds__(THREADS)
    transpose_kernel(const Stored* from, Stored* to, int64_t batches, int64_t rows,
                     int64_t columns) {
  constexpr int SIDE = 32, LINE = SIDE + 1, AT_ONCE = THREADS / SIDE;
  FUSEPORT_SHARED(memory);
  Stored* const tile = (Stored*)memory;
  const int64_t down = (rows + SIDE - 1) / SIDE, across = (columns + SIDE - 1) / SIDE;
  const int lane = (int)threadIdx.x % SIDE, line = (int)threadIdx.x / SIDE;
  for (int64_t unit = blockIdx.x; unit < batches * down * across; unit += gridDim.x) {
    const int64_t batch = unit / (down * across), number = unit % (down * across);
    const int64_t row = number / across * SIDE, column = number % across * SIDE;
    const int64_t first = batch * rows * columns;
    __syncthreads();  // the tile before has been read
    for (int i = line; i < SIDE; i += AT_ONCE)
      if (row + i < rows && column + lane < columns)
        tile[i * LINE + lane] = from[first + (row + i) * columns + column + lane];
    __syncthreads();
    for (int i = line; i < SIDE; i += AT_ONCE)
      if (column + i < columns && row + lane < rows)
        to[first + (column + i) * rows + row + lane] = tile[lane * LINE + i];
  }
}

template <class Stored>
const char* run_transpose(const Stored* from, Stored* to, int64_t batches, int64_t rows,
                          int64_t columns, void* stream) {
  const int64_t units = batches * ((rows + 31) / 32) * ((columns + 31) / 32);
  if (units == 0) return nullptr;
  return launch(transpose_kernel<Stored>, units, THREADS, 32 * 33 * sizeof(Stored), stream, from, to,
                batches, rows, columns);
}

// (o, c/g, taps) → (o, taps, c/g).
template <class Stored>
__global__ void __launch_bounds__(THREADS) reorder_kernel(Problem p, Stored* to) {
  const int64_t count = p.outputs * p.terms(), each = p.of_group(), taps = p.taps();
  for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < count;
       i += gridDim.x * (int64_t)THREADS) {
    const int64_t row = quotient_of(i, each), output = quotient_of(row, taps);
    const int64_t from = (output * each + i - row * each) * taps + row - output * taps;
    to[i] = ((const Stored*)p.weight)[from];
  }
}

template <class Stored>
const char* run_reorder(const Problem& p, Stored* to, void* stream) {
  const int64_t count = p.outputs * p.terms();
  if (count == 0) return nullptr;
  return launch(reorder_kernel<Stored>, (count + THREADS - 1) / THREADS, THREADS, 0, stream, p, to);
}

// The sum of parts (parts, o, taps, c/g), as (o, c/g, taps).
template <class Stored>
__global__ void __launch_bounds__(PART_THREADS)
    filter_kernel(Problem p, Backward b, const Real<Stored>* from, int64_t parts) {
  FUSEPORT_SHARED(memory);
  const int64_t each = p.of_group(), taps = p.taps();
  sum_parts(from, parts, p.outputs * p.terms(), (double*)memory, [&](int64_t i, double sum) {
    const int64_t row = quotient_of(i, each), output = quotient_of(row, taps);
    const int64_t at = (output * each + i - row * each) * taps + row - output * taps;
    from_real((Real<Stored>)sum, (Stored*)b.dweight + at);
  });
}

template <class Stored>
const char* run_filter_sum(const Problem& p, const Backward& b, const Real<Stored>* from,
                           int64_t parts, void* stream) {
  const int64_t count = p.outputs * p.terms();
  if (count == 0) return nullptr;
  return launch(filter_kernel<Stored>, part_blocks(count), PART_THREADS, PART_SHARED, stream, p, b,
                from, parts);
}

// A block for each output channel: threads take places in turn.
template <class Stored>
__global__ void __launch_bounds__(THREADS) bias_kernel(Problem p, Backward b) {
  FUSEPORT_SHARED(memory);
  double* const sums = (double*)memory;
  const int thread = (int)threadIdx.x;
  for (int64_t output = blockIdx.x; output < p.outputs; output += gridDim.x) {
    double sum = 0;
    for (int64_t batch = 0; batch < p.batches; ++batch) {
      const Stored* const from = (const Stored*)b.dout + (batch * p.outputs + output) * p.places();
      for (int64_t place = thread; place < p.places(); place += THREADS)
        sum += (double)to_real(from[place]);
    }
    for (int half = THREADS / 2; half > 0; half /= 2) {
      __syncthreads();
      if (thread >= half && thread < 2 * half) sums[thread - half] = sum;
      __syncthreads();
      if (thread < half) sum += sums[thread];
    }
    if (thread == 0) from_real((Real<Stored>)sum, (Stored*)b.dbias + output);
  }
}

template <class Stored>
const char* run_bias(const Problem& p, const Backward& b, void* stream) {
  if (p.outputs == 0) return nullptr;
  return launch(bias_kernel<Stored>, p.outputs, THREADS, THREADS / 2 * sizeof(double), stream, p, b);
}

}  // namespace fuseport::deform_conv2d::cuda
