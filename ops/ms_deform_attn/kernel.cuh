// Deformable attention on CUDA: each query and head a group of threads, which have its channels.
#pragma once

#include "ms_deform_attn/cuda_samples.cuh"

namespace fuseport::ms_deform_attn::cuda {

// Calls work(level, number of the first sample of the level among all) for each level of a query
// and head.
template <class Work>
FUSEPORT_DEVICE void for_each_level(const Problem& p, int64_t number, const Work& work) {
  for (int64_t l = 0; l < p.levels; ++l)
    work(Level(p, l), (number * p.levels + l) * p.points);
}

// The first channel of the value of a query and head, at position 0.
template <class Stored>
FUSEPORT_DEVICE const Stored* value_of(const Problem& p, int64_t number) {
  const int64_t batch = number / p.heads / p.queries, head = number % p.heads;
  return (const Stored*)p.value + (batch * p.positions * p.heads + head) * p.channels;
}

template <class Stored, int V>
__global__ void __launch_bounds__(THREADS, BLOCKS) forward_kernel(Problem p, Forward f, Deal deal) {
  const int64_t parts = (p.channels + deal.lanes * V - 1) / (deal.lanes * V);
  const int64_t units = p.batches * p.heads * p.queries * parts;
  const int64_t stride = p.heads * p.channels, groups = THREADS / deal.lanes;
  for (int64_t unit = blockIdx.x * groups + threadIdx.x / deal.lanes; unit < units;
       unit += gridDim.x * groups) {
    const int64_t number = unit / parts;
    const int64_t c = (unit % parts * deal.lanes + threadIdx.x % deal.lanes) * V;
    if (c >= p.channels) continue;
    const Stored* const value = value_of<Stored>(p, number) + c;
    Real<Stored> sums[V] = {};
    for_each_level(p, number, [&](const Level& level, int64_t first) {
#pragma unroll 2
      for (int64_t j = 0; j < p.points; ++j) {
        Sample<Real<Stored>> sample;
        sample.template read<Stored>(p, level, first + j);
        Real<Stored> pixel[4][V];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const int64_t position = sample.position(level, k);
          load_channels<V>(value + position * stride, position >= 0, 0, 1, pixel[k]);
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const Real<Stored> share = sample.weighted_share(k);
#pragma unroll
          for (int i = 0; i < V; ++i) sums[i] += share * pixel[k][i];
        }
      }
    });
    store_at_once<V>(sums, (Stored*)f.out + number * p.channels + c);
  }
}

// Gradients of locations and weights. All lanes of a warp go through the same samples, since sums
// are made between them.
template <class Stored, int V>
__global__ void __launch_bounds__(THREADS, BLOCKS)
    samples_kernel(Problem p, Backward b, Deal deal) {
  using Real = cuda::Real<Stored>;
  const int64_t units = p.batches * p.heads * p.queries, groups = THREADS / deal.lanes;
  const int64_t stride = p.heads * p.channels;
  const int lane = (int)threadIdx.x % deal.lanes;
  for (int64_t begin = blockIdx.x * groups; begin < units; begin += gridDim.x * groups) {
    const int64_t unit = begin + threadIdx.x / deal.lanes;
    const int64_t number = unit < units ? unit : units - 1;
    const Stored* const value = value_of<Stored>(p, number);
    const Stored* const dout = (const Stored*)b.dout + number * p.channels;
    for_each_level(p, number, [&](const Level& level, int64_t first) {
      for (int64_t j = 0; j < p.points; ++j) {
        Sample<Real> sample;
        sample.template read<Stored>(p, level, first + j);
        Real dots[4] = {};
        for (int64_t c = lane * V; c < p.channels; c += deal.lanes * V) {
          Real g[V], pixel[V];
          load_channels<V>(dout, true, c, p.channels, g);
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const int64_t position = sample.position(level, k);
            load_channels<V>(value + position * stride, position >= 0, c, p.channels, pixel);
#pragma unroll
            for (int i = 0; i < V; ++i) dots[k] += g[i] * pixel[i];
          }
        }
        for (int mask = deal.lanes / 2; mask > 0; mask /= 2)
#pragma unroll
          for (int k = 0; k < 4; ++k) dots[k] += shuffled(dots[k], mask);
        if (lane > 0 || unit >= units) continue;
        const Real dx = sample.weight * (Real)level.width * sample.slope_x(dots);
        const Real dy = sample.weight * (Real)level.height * sample.slope_y(dots);
        const auto put = [&](void* to, int64_t at, Real number) {
          if (p.wide_points) ((Real*)to)[at] = number;
          else from_real(number, (Stored*)to + at);
        };
        put(b.dweights, first + j, sample.sample(dots));
        put(b.dlocations, 2 * (first + j), dx);
        put(b.dlocations, 2 * (first + j) + 1, dy);
      }
    });
  }
}

inline const char* run_forward(const Problem& p, const Forward& f, void* stream) {
  if (p.pairs() * p.queries * p.channels == 0) return nullptr;
  return with_channels(
      p,
      [&](auto stored, auto v) {
        constexpr int V = decltype(v)::value;
        const Deal deal(p.channels, V);
        const int64_t parts = (p.channels + deal.lanes * V - 1) / (deal.lanes * V);
        const int64_t units = p.pairs() * p.queries * parts, groups = THREADS / deal.lanes;
        return launch(forward_kernel<decltype(stored), V>, (units + groups - 1) / groups, THREADS,
                      0, stream, p, f, deal);
      },
      p.value, (const void*)f.out);
}

inline const char* run_samples(const Problem& p, const Backward& b, void* stream) {
  if (p.pairs() * p.queries * p.samples() == 0) return nullptr;
  return with_channels(
      p,
      [&](auto stored, auto v) {
        constexpr int V = decltype(v)::value;
        const Deal deal(p.channels, V);
        const int64_t units = p.pairs() * p.queries, groups = THREADS / deal.lanes;
        return launch(samples_kernel<decltype(stored), V>, (units + groups - 1) / groups, THREADS,
                      0, stream, p, b, deal);
      },
      p.value, b.dout);
}

}  // namespace fuseport::ms_deform_attn::cuda
