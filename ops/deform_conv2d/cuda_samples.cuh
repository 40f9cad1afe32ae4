// Samples on CUDA: where a tap's is, and runs of its channels as parts of a tile in shared memory.
#pragma once

#include "deform_conv2d/cuda.hpp"
#include "native/cuda_bilinear.cuh"

namespace fuseport::deform_conv2d::cuda {

using namespace fuseport::cuda;

constexpr int THREADS = 256, WARP = 32;

template <class Real>
struct Sample : Bilinear<Real> {
  Real mask = 1;

  // Of a tap and an offset group, those of all batch entries being numbered together.
  template <class Stored>
  FUSEPORT_DEVICE void read(const Problem& p, int64_t group, int64_t tap, int64_t place) {
    const int64_t row = group * p.taps() + tap, places = p.places();
    const int64_t y = quotient_of(place, p.columns), x = place - y * p.columns;
    const int64_t tap_y = quotient_of(tap, p.kernel_w), tap_x = tap - tap_y * p.kernel_w;
    const Options& o = p.options;
    const Stored* const moved = (const Stored*)p.offset + 2 * row * places + place;
    const Real first_y = (Real)(y * o.stride_h - o.padding_h + tap_y * o.dilation_h);
    const Real first_x = (Real)(x * o.stride_w - o.padding_w + tap_x * o.dilation_w);
    this->set(first_x + to_real(moved[places]), first_y + to_real(moved[0]), (int)p.width,
              (int)p.height);
    if (p.mask) mask = to_real(((const Stored*)p.mask)[row * places + place]);
  }

  FUSEPORT_DEVICE int64_t pixel(const Problem& p, int corner) const {
    return Bilinear<Real>::pixel(corner, (int)p.width, (int)p.height);
  }
};

// Terms of an output: taps, and of each all channels of the group.
struct Term {
  int64_t tap, channel;  // of all

  FUSEPORT_DEVICE Term(const Problem& p, int64_t group, int64_t number) {
    tap = quotient_of(number, p.of_group());
    channel = group * p.of_group() + number - tap * p.of_group();
  }
};

constexpr int RUN = 8;  // terms in a row, of one tap and offset group if a problem is in runs

// The copy of the input, (b, H·W, c), and whether runs are read in packs of 16 bytes.
template <class Stored>
struct Table {
  const Stored* data;
  bool runs;
};

// COUNT terms of an output, all of one tap and offset group, to numbers of a tile that are `step`
// apart.
template <int COUNT, class Stored>
FUSEPORT_DEVICE void bring_run(const Problem& p, const Table<Stored>& table, int64_t batch,
                               int64_t group, int64_t place, int64_t first, Stored* to, int step) {
  using Real = cuda::Real<Stored>;
  constexpr int V = VECTOR<Stored> < COUNT ? VECTOR<Stored> : COUNT;
  const Term term(p, group, first);
  const int64_t offset_group = quotient_of(term.channel, p.of_offset_group());
  Sample<Real> sample;
  sample.template read<Stored>(p, batch * p.offset_groups + offset_group, term.tap, place);
  const Stored* const pixels = table.data + batch * p.pixels() * p.channels + term.channel;
  Real sums[COUNT] = {};
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const int64_t pixel = sample.pixel(p, k);
    const Real share = sample.share(k);
#pragma unroll
    for (int i = 0; i < COUNT; i += V) {
      Real numbers[V];
      load_channels<V>(pixels + pixel * p.channels + i, pixel >= 0, 0, 1, numbers);
#pragma unroll
      for (int j = 0; j < V; ++j) sums[i + j] += share * numbers[j];
    }
  }
#pragma unroll
  for (int i = 0; i < COUNT; ++i) from_real(sums[i] * sample.mask, to + i * step);
}

// Brings samples of PLACES outputs and TERMS terms to a tile, zeros beyond: of output i those from
// term j on to at(i, j), `step` apart.
template <int PLACES, int TERMS, class Stored, class At>
FUSEPORT_DEVICE void bring_samples(const Problem& p, const Table<Stored>& table, int64_t batch,
                                   int64_t group, int64_t place, int64_t term, Stored* to, int step,
                                   const At& at) {
  static_assert(TERMS % RUN == 0);
  const int each = table.runs ? RUN : 1;
#pragma unroll 1
  for (int number = (int)threadIdx.x * each; number < PLACES * TERMS;
       number += (int)blockDim.x * each) {
    const int i = number / TERMS, j = number % TERMS;
    Stored* const at_first = to + at(i, j);
    if (place + i >= p.places() || term + j >= p.terms()) {
      for (int k = 0; k < each; ++k) at_first[k * step] = Stored{};
    } else if (table.runs) {
      bring_run<RUN>(p, table, batch, group, place + i, term + j, at_first, step);
    } else {
      bring_run<1>(p, table, batch, group, place + i, term + j, at_first, step);
    }
  }
}

// Whether runs are of one tap and offset group, and packs of them aligned; on the host.
inline bool in_runs(const Problem& p) {
  return p.of_group() % RUN == 0 && p.of_offset_group() % RUN == 0;
}

}  // namespace fuseport::deform_conv2d::cuda
