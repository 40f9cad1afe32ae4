// The forward kernel: a tile of outputs, tap by tap. Compiled once per instruction set.
#pragma once

#include "deform_conv2d/samples.hpp"
#include "native/products.hpp"

namespace fuseport::deform_conv2d::FUSEPORT_ISA {

constexpr int64_t DEEP = 64;  // rows of a strip of the weight that stay in the nearest cache

template <class F>
struct ForwardScratch {
  using Real = typename F::Real;
  Samples<F>* samples;
  Real *taken, *sums, *row;  // (TILE, table_row), (TILE, sums_row), (row_of_sums,)
  // Sums are of so many runs of outputs in a row, each from a whole vector on: of groups, or of the
  // offset groups of a depthwise convolution.
  int64_t runs, outputs, row_of_run, sums_row, bytes;

  ForwardScratch(const Problem& p, void* base)
      : runs(p.depthwise() ? p.offset_groups : p.groups),
        outputs(p.outputs / runs),
        row_of_run(p.depthwise() ? p.table_row() : p.strips() * p.strip_row()),
        sums_row(runs * row_of_run) {
    Scratch s{(char*)base};
    s.take(1, &samples);
    s.take(TILE * p.table_row(), &taken);
    s.take(TILE * sums_row, &sums);
    s.take(row_of_run, &row);
    bytes = s.used;
  }
};

// A strip: the weights of some outputs of a group, for each tap and channel of the group.
template <class F, class Stored>
static void copy_weight_unit(const Problem& p, const Shared& s, int64_t unit) {
  using Real = typename F::Real;
  const int64_t group = unit / p.strips(), first = unit % p.strips() * STRIP;
  const int64_t taps = p.taps(), terms = p.of_group() * taps, row = p.strip_row();
  const int count = (int)least(row, p.outputs_of_group() - first);
  const Stored* const from =
      (const Stored*)p.weight + (group * p.outputs_of_group() + first) * terms;
  Real* const to = (Real*)(s.other + unit * p.strip_bytes());
  if (count < row) memset(to, 0, p.strip_bytes());
  for (int64_t tap = 0; tap < taps; ++tap)
    load_block<F>(from + tap, taps, terms, (int)p.of_group(), count,
                  to + tap * p.of_group() * row, (int)row);
}

// sums += taken · weights, of a tap and the channels of an offset group.
template <class F>
static void add_products(const Problem& p, const Shared& shared, const ForwardScratch<F>& s,
                         int64_t offset_group, int64_t tap, int count) {
  using Real = typename F::Real;
  const int64_t begin = offset_group * p.of_offset_group(), row = p.strip_row();
  each_run(p, begin, p.of_offset_group(), [&](int64_t group, int64_t channel, int channels) {
    for (int64_t strip = 0; strip < p.strips(); ++strip) {
      const int64_t number = group * p.strips() + strip;
      const Real* const weights = (const Real*)(shared.other + number * p.strip_bytes()) +
                                  (tap * p.of_group() + channel - group * p.of_group()) * row;
      for (int k = 0; k < channels; k += DEEP)
        multiply<F>({{s.taken + channel - begin + k, p.table_row(), 1}, weights + k * row, row,
                     s.sums + number * row, s.sums_row, count, (int)row,
                     (int)least(DEEP, channels - k), 1});
    }
  });
}

// The same of a depthwise convolution: of each channel one product.
template <class F, class Stored>
static void add_depthwise(const Problem& p, const ForwardScratch<F>& s, int64_t offset_group,
                          int64_t tap, int count) {
  using Real = typename F::Real;
  const int64_t row = p.table_row(), each = p.of_offset_group();
  const Stored* const weight = (const Stored*)p.weight + offset_group * each * p.taps() + tap;
  load_block<F>(weight, 0, p.taps(), 1, (int)each, s.row, 0);
  for (int j = 0; j < count; ++j) {
    const Real* const taken = s.taken + j * row;
    Real* const sums = s.sums + j * s.sums_row + offset_group * row;
    for (int64_t c = 0; c < row; c += F::LANES)
      store<F>(sums + c, load<F>(sums + c) + load<F>(taken + c) * load<F>(s.row + c));
  }
}

template <class F, class Stored>
static void forward_unit(const Problem& p, const Forward& f, const Shared& shared, int64_t unit,
                         void* scratch) {
  using Real = typename F::Real;
  const ForwardScratch<F> s(p, scratch);
  const int64_t batch = unit / p.tiles(), each = s.outputs;
  const Tile tile(p, unit % p.tiles());
  s.samples->set(p, tile);
  memset(s.sums, 0, TILE * s.sums_row * sizeof(Real));
  for (int64_t offset_group = 0; offset_group < p.offset_groups; ++offset_group) {
    const int64_t number = batch * p.offset_groups + offset_group;
    for (int64_t tap = 0; tap < p.taps(); ++tap) {
      s.samples->template read<Stored>(p, tile, number, tap);
      s.samples->take(table_of<F>(p, shared, number), p.table_row(), (int)p.table_row(), s.taken,
                      p.table_row());
      if (p.depthwise()) add_depthwise<F, Stored>(p, s, offset_group, tap, tile.count);
      else add_products<F>(p, shared, s, offset_group, tap, tile.count);
    }
  }
  for (int64_t run = 0; run < s.runs; ++run) {
    Real* const sums = s.sums + run * s.row_of_run;
    const int64_t output = run * each;
    load_block<F>((const Stored*)p.bias + output, 0, 1, 1, (int)each, s.row, 0);
    for (int j = 0; j < tile.count; ++j)
      for (int64_t c = 0; c < each; c += F::LANES)
        store<F>(sums + j * s.sums_row + c, load<F>(sums + j * s.sums_row + c) + load<F>(s.row + c));
    store_block<F>(sums, (int)s.sums_row, tile.count, (int)each,
                   (Stored*)f.out + (batch * p.outputs + output) * p.places() + tile.first, 1,
                   p.places());
  }
}

}  // namespace fuseport::deform_conv2d::FUSEPORT_ISA
