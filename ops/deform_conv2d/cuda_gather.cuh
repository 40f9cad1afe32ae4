// The gradients of the offsets, the mask and the input on CUDA, from the cotangents of samples: of some
// batch entries at a time, whose samples are in the order (b, G, taps, places).
#pragma once

#include <type_traits>

#include "deform_conv2d/cuda_samples.cuh"

namespace fuseport::deform_conv2d::cuda {

constexpr int BLOCKS = 2;  // of a multiprocessor, at least: with more, registers would be spilled

// Some batch entries, and the cotangents of their samples, (batches, places, taps, c).
template <class Real>
struct Slice {
  int64_t first = 0, batches = 0;
  const Real* dsamples = nullptr;

  FUSEPORT_DEVICE const Real* row(const Problem& p, int64_t batch, int64_t tap,
                                  int64_t place) const {
    return dsamples + ((batch * p.places() + place) * p.taps() + tap) * p.channels;
  }
};

// A sample of a slice by its number.
struct Place {
  int64_t batch, offset_group, tap, at;  // batch of the slice

  FUSEPORT_DEVICE Place(const Problem& p, int64_t number) {
    const int64_t row = quotient_of(number, p.places()), group = quotient_of(row, p.taps());
    at = number - row * p.places();
    tap = row - group * p.taps();
    batch = quotient_of(group, p.offset_groups);
    offset_group = group - batch * p.offset_groups;
  }
};

template <class Stored>
FUSEPORT_DEVICE Sample<Real<Stored>> sample_at(const Problem& p, int64_t first, const Place& place) {
  Sample<Real<Stored>> sample;
  const int64_t group = (first + place.batch) * p.offset_groups + place.offset_group;
  sample.template read<Stored>(p, group, place.tap, place.at);
  return sample;
}

// V reals in a row, 16 bytes at a time if they are aligned to them.
template <int V, class Real>
FUSEPORT_DEVICE void load_reals(const Real* from, Real* to) {
  constexpr int W = V < VECTOR<Real> ? V : VECTOR<Real>;
#pragma unroll
  for (int i = 0; i < V; i += W) load_at_once<W>(from + i, to + i);
}

// Gradients of offsets and mask. All lanes of a warp go through as many channels, since sums are
// made between them.
template <class Stored, int V>
__global__ void __launch_bounds__(THREADS, BLOCKS)
    samples_kernel(Problem p, Backward b, Slice<Real<Stored>> slice, Deal deal,
                   const Stored* table) {
  using Real = cuda::Real<Stored>;
  const int64_t each = p.of_offset_group(), groups = THREADS / deal.lanes;
  const int64_t units = slice.batches * p.offset_groups * p.taps() * p.places();
  const int lane = (int)threadIdx.x % deal.lanes;
  for (int64_t begin = blockIdx.x * groups; begin < units; begin += gridDim.x * groups) {
    const int64_t unit = begin + threadIdx.x / deal.lanes;
    const Place place(p, unit < units ? unit : units - 1);
    const int64_t batch = slice.first + place.batch;
    const Sample<Real> sample = sample_at<Stored>(p, slice.first, place);
    const Real* const gradient =
        slice.row(p, place.batch, place.tap, place.at) + place.offset_group * each;
    const Stored* const pixels =
        table + batch * p.pixels() * p.channels + place.offset_group * each;
    Real dots[4] = {};
    for (int64_t c = lane * V; c < each; c += deal.lanes * V) {
      Real g[V], numbers[V];
      load_reals<V>(gradient + c, g);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int64_t pixel = sample.pixel(p, k);
        load_channels<V>(pixels + pixel * p.channels, pixel >= 0, c, each, numbers);
#pragma unroll
        for (int i = 0; i < V; ++i) dots[k] += g[i] * numbers[i];
      }
    }
    for (int mask = deal.lanes / 2; mask > 0; mask /= 2)
#pragma unroll
      for (int k = 0; k < 4; ++k) dots[k] += shuffled(dots[k], mask);
    if (lane > 0 || unit >= units) continue;
    const int64_t row =
        (batch * p.offset_groups + place.offset_group) * p.taps() + place.tap;
    Stored* const doffset = (Stored*)b.doffset + 2 * row * p.places() + place.at;
    from_real(sample.slope_y(dots) * sample.mask, doffset);
    from_real(sample.slope_x(dots) * sample.mask, doffset + p.places());
    if (p.mask)
      from_real(sample.sample(dots), (Stored*)b.dmask + row * p.places() + place.at);
  }
}

// The cell of each sample of a slice, and its number.
template <class Stored>
__global__ void __launch_bounds__(THREADS)
    cells_kernel(Problem p, int64_t first, int64_t count, int32_t* cells, int32_t* samples) {
  const int64_t of_image = (p.height + 1) * (p.width + 1);
  for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < count;
       i += gridDim.x * (int64_t)THREADS) {
    const Place place(p, i);
    const Sample<Real<Stored>> sample = sample_at<Stored>(p, first, place);
    const int64_t cell = (place.batch * p.offset_groups + place.offset_group) * of_image +
                         (sample.top + 1) * (p.width + 1) + sample.left + 1;
    cells[i] = sample.left < -1 ? OUTSIDE : (int32_t)cell;
    samples[i] = (int32_t)i;
  }
}

// A warp for each pixel of an offset group, and some of its channels: groups of lanes take samples in
// turn, and their sums are added up in a fixed order. It gives (batches, H·W, c).
template <class Stored, int V>
__global__ void __launch_bounds__(THREADS, BLOCKS)
    gather_kernel(Problem p, Slice<Real<Stored>> slice, Deal deal, const int32_t* samples,
                  const int32_t* starts, Stored* to) {
  using Real = cuda::Real<Stored>;
  const int64_t each = p.of_offset_group(), of_image = (p.height + 1) * (p.width + 1);
  const int64_t parts = (each + deal.lanes * V - 1) / (deal.lanes * V);
  const int64_t groups = slice.batches * p.offset_groups, units = groups * p.pixels() * parts;
  constexpr int WARPS = THREADS / WARP;
  const int lane = (int)threadIdx.x % WARP, slots = WARP / deal.lanes;
  for (int64_t unit = blockIdx.x * (int64_t)WARPS + threadIdx.x / WARP; unit < units;
       unit += gridDim.x * (int64_t)WARPS) {
    const int64_t line = quotient_of(unit, parts), group = quotient_of(line, p.pixels());
    const int64_t pixel = line - group * p.pixels();
    const int64_t batch = group / p.offset_groups, offset_group = group % p.offset_groups;
    const int64_t c = ((unit - line * parts) * deal.lanes + lane % deal.lanes) * V;
    const int y = (int)(pixel / p.width), x = (int)(pixel % p.width);
    Real sums[V] = {};
    for (int below = 1; below >= 0; --below) {
      const int64_t cell = group * of_image + (y - below + 1) * (p.width + 1) + x;
      const int64_t end = starts[cell + 2];
      for (int64_t i = starts[cell] + lane / deal.lanes; i < end; i += slots) {
        const Place place(p, samples[i]);
        const Sample<Real> sample = sample_at<Stored>(p, slice.first, place);
        const Real share = sample.share(2 * below + (x - sample.left)) * sample.mask;
        Real g[V] = {};
        if (c < each)
          load_reals<V>(slice.row(p, batch, place.tap, place.at) + offset_group * each + c, g);
#pragma unroll
        for (int k = 0; k < V; ++k) sums[k] += share * g[k];
      }
    }
    for (int mask = deal.lanes; mask < WARP; mask *= 2)
#pragma unroll
      for (int k = 0; k < V; ++k) sums[k] += shuffled(sums[k], mask);
    if (lane >= deal.lanes || c >= each) continue;
    store_at_once<V>(sums,
                     to + (batch * p.pixels() + pixel) * p.channels + offset_group * each + c);
  }
}

// Calls call(std::integral_constant<int, V>{}) for V channels that can be moved at once; rows of the
// copies are aligned as these are.
template <class Stored, class Call>
const char* with_channels(const Problem& p, const Call& call) {
  constexpr int V = VECTOR<Stored>;
  if (p.of_offset_group() % V == 0) return call(std::integral_constant<int, V>{});
  return call(std::integral_constant<int, 1>{});
}

template <class Stored>
const char* run_samples(const Problem& p, const Backward& b, const Slice<Real<Stored>>& slice,
                        const Stored* table, void* stream) {
  const int64_t units = slice.batches * p.offset_groups * p.taps() * p.places();
  return with_channels<Stored>(p, [&](auto v) {
    constexpr int V = decltype(v)::value;
    const Deal deal(p.of_offset_group(), V);
    const int64_t groups = THREADS / deal.lanes;
    return launch(samples_kernel<Stored, V>, (units + groups - 1) / groups, THREADS, 0, stream, p,
                  b, slice, deal, table);
  });
}

inline int64_t samples_of(const Problem& p, int64_t batches) {
  return batches * p.offset_groups * p.taps() * p.places();
}
inline int64_t cells_of(const Problem& p, int64_t batches) {
  return batches * p.offset_groups * (p.height + 1) * (p.width + 1);
}

// The gradient of the input of a slice, channels last.
template <class Stored>
const char* run_gather(const Problem& p, const Slice<Real<Stored>>& slice, Cells& cells,
                       void* scratch, Stored* to, void* stream) {
  const int64_t count = samples_of(p, slice.batches);
  const auto put = [&](int32_t* of_samples, int32_t* samples) {
    return launch(cells_kernel<Stored>, (count + THREADS - 1) / THREADS, THREADS, 0, stream, p,
                  slice.first, count, of_samples, samples);
  };
  if (const char* error = cells.sort(count, scratch, stream, put)) return error;
  return with_channels<Stored>(p, [&](auto v) {
    constexpr int V = decltype(v)::value, WARPS = THREADS / WARP;
    const Deal deal(p.of_offset_group(), V);
    const int64_t parts = (p.of_offset_group() + deal.lanes * V - 1) / (deal.lanes * V);
    const int64_t units = slice.batches * p.offset_groups * p.pixels() * parts;
    return launch(gather_kernel<Stored, V>, (units + WARPS - 1) / WARPS, THREADS, 0, stream, p,
                  slice, deal, cells.samples, cells.starts, to);
  });
}

}  // namespace fuseport::deform_conv2d::cuda
