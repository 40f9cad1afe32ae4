// The convolution on CUDA, whatever the filter's width, the memory layout and its alignment are: a
// thread for each number, whose taps are read from the cache. What the other kernels leave to it is
// rare.
#pragma once

#include "causal_conv1d/cuda_taps.cuh"

namespace fuseport::causal_conv1d::cuda {

constexpr int PLAIN_THREADS = 256;

// Reads and writes numbers of the problem's dtype, or of its weights'.
template <class Real>
struct Numbers {
  const Problem& p;

  FUSEPORT_DEVICE Real read(const void* from, int64_t i) const {
    Real value = 0;
    with_stored<Real>(p.dtype,
                      [&](auto stored) { value = to_real(((const decltype(stored)*)from)[i]); });
    return value;
  }
  FUSEPORT_DEVICE Real read(const Sequence& s, int64_t batch, int64_t channel, int64_t t) const {
    return read(s.data, batch * s.batch + channel * s.channel + t * s.time);
  }
  FUSEPORT_DEVICE void write(Real value, void* to, int64_t i) const {
    with_stored<Real>(p.dtype, [&](auto stored) { from_real(value, (decltype(stored)*)to + i); });
  }
  FUSEPORT_DEVICE Real weight(const void* from, int64_t i) const {
    return p.wide_weight ? ((const Real*)from)[i] : read(from, i);
  }
  FUSEPORT_DEVICE void write_weight(Real value, void* to, int64_t i) const {
    if (p.wide_weight) {
      ((Real*)to)[i] = value;
    } else {
      write(value, to, i);
    }
  }
  FUSEPORT_DEVICE Real tap(int64_t channel, int64_t lag) const {
    return weight(p.weight, channel * p.width + p.width - 1 - lag);
  }

  // Whether the tap from step t to the one `lag` steps before it counts.
  FUSEPORT_DEVICE bool counts(int64_t batch, int64_t t, int64_t lag) const {
    if (!p.packed) return true;
    const int32_t sequence = sequence_at(p, batch, t);
    return sequence >= 0 && sequence == sequence_at(p, batch, t - lag);
  }

  FUSEPORT_DEVICE Real input(int64_t batch, int64_t channel, int64_t t) const {
    return t >= 0 ? read(p.x, batch, channel, t)
                  : read(p.initial, batch, channel, t + p.width - 1);
  }

  // What goes into the activation, and its cotangent.
  FUSEPORT_DEVICE Real filtered(int64_t batch, int64_t channel, int64_t t) const {
    Real y = weight(p.bias, channel);
    for (int64_t lag = p.width - 1; lag >= 0; --lag)
      if (counts(batch, t, lag)) y += tap(channel, lag) * input(batch, channel, t - lag);
    return y;
  }
  FUSEPORT_DEVICE Real cotangent(const Gradients& k, int64_t batch, int64_t channel,
                                 int64_t t) const {
    if (!counts(batch, t, 0)) return 0;
    const Real dout = read(k.dout, batch, channel, t);
    if (!p.silu) return dout;
    const Real y = filtered(batch, channel, t), sigma = logistic(y);
    return dout * (sigma * (1 + y * (1 - sigma)));
  }

  // Writes the gradient of the input at step t, of an initial state if t < 0. `dy(t)` is the
  // cotangent of what goes into the activation.
  template <class Cotangent>
  FUSEPORT_DEVICE void write_gradient(const Gradients& k, int64_t batch, int64_t channel,
                                      int64_t t, const Cotangent& dy) const {
    const int64_t halo = p.width - 1, state = t - (p.length - halo);
    Real dx = 0;
    for (int64_t lag = 0; lag < p.width && t + lag < p.length; ++lag)
      if (t + lag >= 0 && counts(batch, t + lag, lag)) dx += tap(channel, lag) * dy(t + lag);
    if (state >= 0 && (!p.packed || in_last(p, batch, t)))
      dx += read(k.dfinal, batch, channel, state);
    if (t < 0) {
      write(dx, k.dinitial, (batch * p.channels + channel) * halo + t + halo);
    } else {
      write(dx, k.dx.data, batch * k.dx.batch + channel * k.dx.channel + t * k.dx.time);
    }
  }
};

// Number `index` of (b, d, l), counted as outputs lie.
struct Spot {
  int64_t batch, channel, t;

  FUSEPORT_DEVICE Spot(const Problem& p, int64_t index) {
    const int64_t inner = p.time_last ? p.length : p.channels;
    const int64_t outer = p.time_last ? p.channels : p.length;
    const int64_t rest = quotient_of(index, inner), i = index - rest * inner;
    batch = quotient_of(rest, outer);
    channel = p.time_last ? rest - batch * outer : i;
    t = p.time_last ? i : rest - batch * outer;
  }
};

FUSEPORT_DEVICE int64_t index_of(const Problem& p, int64_t batch, int64_t channel, int64_t t) {
  return p.time_last ? (batch * p.channels + channel) * p.length + t
                     : (batch * p.length + t) * p.channels + channel;
}

// Calls work(i) for all i < count, over all threads.
template <class Work>
FUSEPORT_DEVICE void for_all(int64_t count, const Work& work) {
  for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < count;
       i += gridDim.x * (int64_t)blockDim.x)
    work(i);
}

template <class Real>
__global__ void __launch_bounds__(PLAIN_THREADS) forward_plain_kernel(Problem p, Forward f) {
  const Numbers<Real> numbers{p};
  for_all(p.batches * p.channels * p.length, [&](int64_t index) {
    const Spot s(p, index);
    Real y = 0;
    if (numbers.counts(s.batch, s.t, 0)) {
      y = numbers.filtered(s.batch, s.channel, s.t);
      if (p.silu) y *= logistic(y);
    }
    numbers.write(y, f.out.data,
                  s.batch * f.out.batch + s.channel * f.out.channel + s.t * f.out.time);
  });
  const int64_t halo = p.width - 1;
  for_all(p.batches * p.channels * halo, [&](int64_t i) {
    const int64_t row = quotient_of(i, halo), batch = quotient_of(row, p.channels);
    with_stored<Real>(p.dtype, [&](auto stored) {
      write_final_state<decltype(stored)>(p, f, batch, row - batch * p.channels, i - row * halo);
    });
  });
}

// The cotangents of what goes into the activation, for each number of x.
template <class Real>
__global__ void __launch_bounds__(PLAIN_THREADS)
    cotangents_kernel(Problem p, Gradients k, Real* dy) {
  const Numbers<Real> numbers{p};
  for_all(p.batches * p.channels * p.length, [&](int64_t index) {
    const Spot s(p, index);
    dy[index] = numbers.cotangent(k, s.batch, s.channel, s.t);
  });
}

template <class Real>
__global__ void __launch_bounds__(PLAIN_THREADS)
    inputs_kernel(Problem p, Gradients k, const Real* dy) {
  const Numbers<Real> numbers{p};
  for_all(p.batches * p.channels * p.length, [&](int64_t index) {
    const Spot s(p, index);
    numbers.write_gradient(k, s.batch, s.channel, s.t, [&](int64_t t) {
      return dy[index_of(p, s.batch, s.channel, t)];
    });
  });
}

// A block sums one tap, or the bias, of one channel, or, where they lie in a row, of 32.
template <class Real>
__global__ void __launch_bounds__(PLAIN_THREADS)
    weights_kernel(Problem p, Gradients k, const Real* dy) {
  FUSEPORT_SHARED(memory);
  double* const shared = (double*)memory;
  const Numbers<Real> numbers{p};
  const int columns = p.time_last ? 1 : 32, column = (int)threadIdx.x % columns;
  const int64_t blocks = (p.channels + columns - 1) / columns;
  for (int64_t unit = blockIdx.x; unit < blocks * (p.width + 1); unit += gridDim.x) {
    const int64_t lag = unit / blocks, channel = unit % blocks * columns + column;
    const bool bias = lag == p.width;
    double sum = 0;
    if (channel < p.channels)
      for (int64_t i = (int)threadIdx.x / columns; i < p.batches * p.length;
           i += PLAIN_THREADS / columns) {
        const int64_t batch = quotient_of(i, p.length), t = i - batch * p.length;
        const Real d = dy[index_of(p, batch, channel, t)];
        if (bias) {
          sum += (double)d;
        } else if (numbers.counts(batch, t, lag)) {
          sum += (double)(d * numbers.input(batch, channel, t - lag));
        }
      }
    __syncthreads();
    shared[threadIdx.x] = sum;
    for (int half = PLAIN_THREADS / 2; half >= columns; half /= 2) {
      __syncthreads();
      if ((int)threadIdx.x < half) shared[threadIdx.x] += shared[threadIdx.x + half];
    }
    if ((int)threadIdx.x >= columns || channel >= p.channels) continue;
    const int64_t at = bias ? channel : channel * p.width + p.width - 1 - lag;
    numbers.write_weight((Real)shared[threadIdx.x], bias ? k.dbias : k.dweight, at);
  }
}

// The gradients of initial states, and of inputs that are in the final states.
template <class Real>
__global__ void __launch_bounds__(PLAIN_THREADS) states_kernel(Problem p, Gradients k) {
  const Numbers<Real> numbers{p};
  const int64_t halo = p.width - 1, lead = p.packed ? 0 : halo;
  const int64_t last = p.length < halo ? p.length : halo;
  for_all(p.batches * p.channels * (lead + last), [&](int64_t i) {
    const int64_t row = quotient_of(i, lead + last), step = i - row * (lead + last);
    const int64_t batch = quotient_of(row, p.channels), channel = row - batch * p.channels;
    const int64_t t = step < lead ? step - lead : p.length - last + step - lead;
    numbers.write_gradient(k, batch, channel, t, [&](int64_t at) {
      return numbers.cotangent(k, batch, channel, at);
    });
  });
}

// Adds up parts, (parts, SUMS, d), to the gradients of weight and bias.
template <class Real>
__global__ void __launch_bounds__(PART_THREADS)
    sum_weights_kernel(Problem p, Gradients k, const Real* parts, int64_t count) {
  FUSEPORT_SHARED(memory);
  const Numbers<Real> numbers{p};
  sum_parts(parts, count, SUMS * p.channels, (double*)memory, [&](int64_t i, double sum) {
    const int64_t lag = quotient_of(i, p.channels), c = i - lag * p.channels;
    if (lag < T && lag >= p.width) return;
    numbers.write_weight((Real)sum, lag < T ? k.dweight : k.dbias,
                         lag < T ? c * p.width + p.width - 1 - lag : c);
  });
}

}  // namespace fuseport::causal_conv1d::cuda
