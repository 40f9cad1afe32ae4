// Walks over images on CUDA, and their sums. A block of threads does one square tile of a plane,
// which goes through shared memory, so that rows and columns are both read and written in order.
#pragma once

#include "cross_scan/cuda.hpp"
#include "native/cuda.cuh"

namespace fuseport::cross_scan::cuda {

using namespace fuseport::cuda;

constexpr int WARP = 32, WARPS = 8, THREADS = WARP * WARPS;

// A tile of 32·P rows and columns; a thread moves P numbers in a row at a time. Rows of the tile are
// one number longer, so that neither a row nor a column meets a bank of memory twice.
template <int P>
struct Tile {
  static constexpr int SIDE = WARP * P, ROW = SIDE + 1;
  int64_t batch, channel, row, column;  // the first of each

  static int64_t count(const Problem& p) {
    return p.planes() * ((p.height + SIDE - 1) / SIDE) * ((p.width + SIDE - 1) / SIDE);
  }

  FUSEPORT_DEVICE Tile(const Problem& p, int64_t unit) {
    const int64_t across = (p.width + SIDE - 1) / SIDE, down = (p.height + SIDE - 1) / SIDE;
    column = unit % across * SIDE;
    row = unit / across % down * SIDE;
    channel = unit / across / down % p.channels;
    batch = unit / across / down / p.channels;
  }
};

template <int P, class Number>
FUSEPORT_DEVICE Pack<Number, P> backwards(const Pack<Number, P>& pack) {
  Pack<Number, P> turned;
#pragma unroll
  for (int i = 0; i < P; ++i) turned.at[i] = pack.at[P - 1 - i];
  return turned;
}

// Where numbers of a walk are, and of the same walk from its end, of which `at` is the place ahead.
template <int P, class Number>
struct Walk {
  Number *ahead, *end;

  FUSEPORT_DEVICE void put(int64_t at, const Pack<Number, P>& pack) const {
    *(Pack<Number, P>*)(ahead + at) = pack;
    *(Pack<Number, P>*)(end - at - P) = backwards<P>(pack);
  }
};

// Calls work(line of the tile, the first of P places in it), each by one thread.
template <int P, class Work>
FUSEPORT_DEVICE void for_each_pack_of_tile(const Work& work) {
  const int lane = (int)threadIdx.x % WARP;
  for (int line = (int)threadIdx.x / WARP; line < Tile<P>::SIDE; line += WARPS)
    work(line, lane * P);
}

template <class Number, int P>
__global__ void __launch_bounds__(THREADS) scan_kernel(Problem p, Scan s, int64_t tiles) {
  constexpr int ROW = Tile<P>::ROW;
  FUSEPORT_SHARED(memory);
  Number* const tile = (Number*)memory;
  const int64_t pixels = p.height * p.width, walk = p.channels * pixels;
  for (int64_t unit = blockIdx.x; unit < tiles; unit += gridDim.x) {
    const Tile<P> t(p, unit);
    const Number* const x = (const Number*)s.x + t.batch * s.batch_stride +
                            t.channel * s.channel_stride;
    Number* const first = (Number*)s.out + t.batch * 4 * walk + t.channel * pixels;
    const Walk<P, Number> rows{first, first + 2 * walk + pixels};
    const Walk<P, Number> columns{first + walk, first + 3 * walk + pixels};
    __syncthreads();
    for_each_pack_of_tile<P>([&](int line, int place) {
      const int64_t h = t.row + line, w = t.column + place;
      if (h >= p.height || w >= p.width) return;
      const auto pack = *(const Pack<Number, P>*)(x + h * s.row_stride + w);
      rows.put(h * p.width + w, pack);
#pragma unroll
      for (int i = 0; i < P; ++i) tile[line * ROW + place + i] = pack.at[i];
    });
    __syncthreads();
    for_each_pack_of_tile<P>([&](int line, int place) {
      const int64_t h = t.row + place, w = t.column + line;
      if (h >= p.height || w >= p.width) return;
      Pack<Number, P> pack;
#pragma unroll
      for (int i = 0; i < P; ++i) pack.at[i] = tile[(place + i) * ROW + line];
      columns.put(w * p.height + h, pack);
    });
  }
}

// The four walks at one pixel are added as two by rows, two by columns, and both sums.
template <class Real, class Stored, int P>
__global__ void __launch_bounds__(THREADS) merge_kernel(Problem p, Merge m, int64_t tiles) {
  constexpr int ROW = Tile<P>::ROW;
  FUSEPORT_SHARED(memory);
  Real* const tile = (Real*)memory;
  const int64_t pixels = p.height * p.width;
  for (int64_t unit = blockIdx.x; unit < tiles; unit += gridDim.x) {
    const Tile<P> t(p, unit);
    const Stored* const first = (const Stored*)m.ys + t.batch * m.batch_stride +
                                t.channel * m.channel_stride;
    Stored* const out = (Stored*)m.out + (t.batch * p.channels + t.channel) * pixels;
    const auto sums = [&](const Stored* ahead, int64_t at, Real* to) {
      const Stored* const end = ahead + 2 * m.walk_stride + pixels;
      const auto one = *(const Pack<Stored, P>*)(ahead + at);
      const auto other = backwards<P>(*(const Pack<Stored, P>*)(end - at - P));
#pragma unroll
      for (int i = 0; i < P; ++i) to[i] = to_real(one.at[i]) + to_real(other.at[i]);
    };
    __syncthreads();
    for_each_pack_of_tile<P>([&](int line, int place) {
      const int64_t h = t.row + place, w = t.column + line;
      if (h >= p.height || w >= p.width) return;
      Real sum[P];
      sums(first + m.walk_stride, w * p.height + h, sum);
#pragma unroll
      for (int i = 0; i < P; ++i) tile[(place + i) * ROW + line] = sum[i];
    });
    __syncthreads();
    for_each_pack_of_tile<P>([&](int line, int place) {
      const int64_t h = t.row + line, w = t.column + place;
      if (h >= p.height || w >= p.width) return;
      Real sum[P];
      sums(first, h * p.width + w, sum);
      Pack<Stored, P> pack;
#pragma unroll
      for (int i = 0; i < P; ++i) from_real(sum[i] + tile[line * ROW + place + i], &pack.at[i]);
      *(Pack<Stored, P>*)(out + h * p.width + w) = pack;
    });
  }
}

// Whether numbers of two bytes can be moved in pairs.
inline bool in_pairs(const Problem& p, const void* from, int64_t strides) {
  return p.height % 2 == 0 && p.width % 2 == 0 && strides % 2 == 0 && (uintptr_t)from % 4 == 0;
}

template <class Number, int P>
const char* launch_scan(const Problem& p, const Scan& s, void* stream) {
  const int64_t tiles = Tile<P>::count(p), shared = Tile<P>::SIDE * Tile<P>::ROW * sizeof(Number);
  return launch(scan_kernel<Number, P>, tiles, THREADS, shared, stream, p, s, tiles);
}

template <class Real, class Stored, int P>
const char* launch_merge(const Problem& p, const Merge& m, void* stream) {
  const int64_t tiles = Tile<P>::count(p), shared = Tile<P>::SIDE * Tile<P>::ROW * sizeof(Real);
  return launch(merge_kernel<Real, Stored, P>, tiles, THREADS, shared, stream, p, m, tiles);
}

inline const char* run_scan(const Problem& p, const Scan& s, void* stream) {
  if (p.empty()) return nullptr;
  switch (p.dtype) {
    case Dtype::float64:
      return launch_scan<uint64_t, 1>(p, s, stream);
    case Dtype::float32:
      return launch_scan<uint32_t, 1>(p, s, stream);
    default:
      return in_pairs(p, s.x, s.batch_stride | s.channel_stride | s.row_stride)
                 ? launch_scan<uint16_t, 2>(p, s, stream)
                 : launch_scan<uint16_t, 1>(p, s, stream);
  }
}

template <class Stored>
const char* merge_halves(const Problem& p, const Merge& m, void* stream) {
  return in_pairs(p, m.ys, m.batch_stride | m.walk_stride | m.channel_stride)
             ? launch_merge<float, Stored, 2>(p, m, stream)
             : launch_merge<float, Stored, 1>(p, m, stream);
}

inline const char* run_merge(const Problem& p, const Merge& m, void* stream) {
  if (p.empty()) return nullptr;
  switch (p.dtype) {
    case Dtype::float64:
      return launch_merge<double, double, 1>(p, m, stream);
    case Dtype::float32:
      return launch_merge<float, float, 1>(p, m, stream);
    case Dtype::float16:
      return merge_halves<Half>(p, m, stream);
    default:
      return merge_halves<BFloat16>(p, m, stream);
  }
}

}  // namespace fuseport::cross_scan::cuda
