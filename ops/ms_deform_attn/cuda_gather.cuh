// The gradient of value on CUDA: each pixel adds up what the samples of its four cells give it.
#pragma once

#include "ms_deform_attn/cuda_samples.cuh"

namespace fuseport::ms_deform_attn::cuda {

// Pairs of a batch entry and a head, whose samples are sorted at once.
struct Slice {
  int64_t first = 0, pairs = 0;
};

// Of all levels: cells of a pair.
FUSEPORT_DEVICE int64_t cells_before(const Problem& p, int64_t level) {
  int64_t count = 0;
  for (int64_t l = 0; l < level; ++l) count += Level(p, l).cells();
  return count;
}

// Sample `index` of a slice, of which each pair has all queries in a row.
struct Place {
  int64_t number, at;  // of its query and head, and its own, among all
  uint32_t level;

  FUSEPORT_DEVICE Place(const Problem& p, const Slice& slice, uint32_t index) {
    const auto samples = (uint32_t)(p.levels * p.points);
    const uint32_t row = index / samples, sample = index % samples;
    const auto queries = (uint32_t)p.queries, points = (uint32_t)p.points;
    const int64_t pair = slice.first + row / queries;
    number = (pair / p.heads * p.queries + row % queries) * p.heads + pair % p.heads;
    at = number * samples + sample;
    level = sample / points;
  }
};

// The cell of each sample of a slice, pair by pair, and its number.
template <class Stored>
__global__ void __launch_bounds__(THREADS)
    cells_kernel(Problem p, Slice slice, int64_t count, int32_t* cells, int32_t* samples) {
  const int64_t cells_of_pair = cells_before(p, p.levels);
  const int64_t of_pair = p.queries * p.levels * p.points;
  for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < count;
       i += gridDim.x * (int64_t)THREADS) {
    const Place place(p, slice, (uint32_t)i);
    const Level level(p, place.level);
    Sample<Real<Stored>> sample;
    sample.template read<Stored>(p, level, place.at);
    const int64_t cell = i / of_pair * cells_of_pair + cells_before(p, place.level) +
                         (int64_t)(sample.top + 1) * (level.width + 1) + sample.left + 1;
    cells[i] = sample.left < -1 || level.cells() == 0 ? OUTSIDE : (int32_t)cell;
    samples[i] = (int32_t)i;
  }
}

// A warp for each pixel of a head, and some of its channels: groups of lanes take samples in turn,
// and their sums are added up in a fixed order.
template <class Stored, int V>
__global__ void __launch_bounds__(THREADS, BLOCKS)
    gather_kernel(Problem p, Backward b, Slice slice, Deal deal, const int32_t* samples,
                  const int32_t* starts) {
  using Real = cuda::Real<Stored>;
  const int64_t parts = (p.channels + deal.lanes * V - 1) / (deal.lanes * V);
  const int64_t units = slice.pairs * p.positions * parts, cells = cells_before(p, p.levels);
  constexpr int WARPS = THREADS / WARP;
  const int lane = (int)threadIdx.x % WARP, slots = WARP / deal.lanes;
  for (int64_t unit = blockIdx.x * (int64_t)WARPS + threadIdx.x / WARP; unit < units;
       unit += gridDim.x * (int64_t)WARPS) {
    const int64_t of_pair = unit / parts / p.positions, position = unit / parts % p.positions;
    const int64_t pair = slice.first + of_pair;
    const int64_t c = (unit % parts * deal.lanes + lane % deal.lanes) * V;
    Real sums[V] = {};
    int64_t cells_of_level = of_pair * cells;
    for (int64_t l = 0; l < p.levels; ++l) {
      const Level level(p, l);
      const int64_t within = position - level.start;
      if (within >= 0 && within < (int64_t)level.height * level.width) {
        const int x = (int)(within % level.width), y = (int)(within / level.width);
        for (int below = 1; below >= 0; --below) {
          const int top = y - below;
          const int64_t cell = cells_of_level + (int64_t)(top + 1) * (level.width + 1) + x;
          const int64_t end = starts[cell + 2];
          for (int64_t i = starts[cell] + lane / deal.lanes; i < end; i += slots) {
            const Place place(p, slice, (uint32_t)samples[i]);
            Sample<Real> sample;
            sample.template read<Stored>(p, level, place.at);
            const Real share = sample.weighted_share(2 * below + (x - sample.left));
            Real g[V];
            load_channels<V>((const Stored*)b.dout + place.number * p.channels, true, c,
                             p.channels, g);
#pragma unroll
            for (int k = 0; k < V; ++k) sums[k] += share * g[k];
          }
        }
      }
      cells_of_level += level.cells();
    }
    for (int mask = deal.lanes; mask < WARP; mask *= 2)
#pragma unroll
      for (int k = 0; k < V; ++k) sums[k] += shuffled(sums[k], mask);
    if (lane >= deal.lanes || c >= p.channels) continue;
    const int64_t row = (pair / p.heads * p.positions + position) * p.heads + pair % p.heads;
    store_at_once<V>(sums, (Stored*)b.dvalue + row * p.channels + c);
  }
}

// Whether dvalue needs no sort: it has no numbers, or no samples.
inline bool nothing_to_sort(const Problem& p) {
  return p.pairs() == 0 || p.positions == 0 || p.channels == 0 || p.queries * p.samples() == 0;
}

// A level of height H and width W has (H + 1)·(W + 1) ≤ 2·(H·W + 1) cells.
inline int64_t most_cells(const Problem& p) { return p.levels * 2 * (p.positions + 1); }

inline int64_t most_pairs(const Problem& p) {
  if (nothing_to_sort(p)) return 1;
  constexpr int64_t LIMIT = OUTSIDE - 1;
  const int64_t samples = p.queries * p.samples(), cells = most_cells(p);
  const int64_t pairs = LIMIT / (samples > cells ? samples : cells);
  return pairs < p.pairs() ? pairs : p.pairs();
}

// Of a slice, which that of fewer pairs has room in.
inline Cells cells_of(const Problem& p, int64_t pairs) {
  return {pairs * p.queries * p.samples(), pairs * most_cells(p)};
}

inline const char* run_slice(const Problem& p, const Backward& b, const Slice& slice,
                             Cells& cells, void* scratch, void* stream) {
  const int64_t count = slice.pairs * p.queries * p.samples();
  const auto put = [&](int32_t* of_samples, int32_t* samples) {
    return with_dtype(p.dtype, [&](auto stored) {
      return launch(cells_kernel<decltype(stored)>, (count + THREADS - 1) / THREADS, THREADS, 0,
                    stream, p, slice, count, of_samples, samples);
    });
  };
  if (const char* error = cells.sort(count, scratch, stream, put)) return error;
  return with_channels(
      p,
      [&](auto stored, auto v) {
        constexpr int V = decltype(v)::value, WARPS = THREADS / WARP;
        const Deal deal(p.channels, V);
        const int64_t parts = (p.channels + deal.lanes * V - 1) / (deal.lanes * V);
        const int64_t units = slice.pairs * p.positions * parts;
        return launch(gather_kernel<decltype(stored), V>, (units + WARPS - 1) / WARPS, THREADS, 0,
                      stream, p, b, slice, deal, cells.samples, cells.starts);
      },
      b.dout, (const void*)b.dvalue);
}

inline const char* run_gather(const Problem& p, const Backward& b, int64_t at_once, void* scratch,
                              void* stream) {
  if (nothing_to_sort(p)) {
    const int64_t numbers = p.pairs() * p.positions * p.channels;
    if (numbers == 0) return nullptr;
    return with_dtype(p.dtype, [&](auto stored) {
      return set_to_zero(b.dvalue, numbers * (int64_t)sizeof(stored), stream);
    });
  }
  Cells cells = cells_of(p, at_once);
  const char* error = cells.error;
  for (int64_t first = 0; first < p.pairs() && !error; first += at_once) {
    const int64_t left = p.pairs() - first;
    const Slice slice{first, at_once < left ? at_once : left};
    error = run_slice(p, b, slice, cells, scratch, stream);
  }
  return error;
}

}  // namespace fuseport::ms_deform_attn::cuda
