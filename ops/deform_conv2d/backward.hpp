// The backward kernels, of a block of channels of one offset group each. Compiled once per instruction
// set.
#pragma once

#include "deform_conv2d/samples.hpp"
#include "native/lanes.hpp"
#include "native/products.hpp"

namespace fuseport::deform_conv2d::FUSEPORT_ISA {

constexpr int64_t TILES = 16;  // whose sums are added up in float32: errors of more would grow

// Channels, and the outputs that they have a part in: those of whole groups.
struct Block {
  int64_t offset_group, first, count, row;  // row: of count, whole vectors
  int64_t column;                           // of the first, in a row of the table
  int64_t group, output, outputs;           // the first group and its first output; how many outputs

  Block(const Problem& p, int64_t number) {
    const int64_t each = p.of_offset_group();
    offset_group = number / p.blocks_of_offset_group();
    column = number % p.blocks_of_offset_group() * BLOCK;
    first = offset_group * each + column;
    count = least(BLOCK, each - column);
    row = p.padded(count);
    group = first / p.of_group();
    output = group * p.outputs_of_group();
    outputs = ((first + count - 1) / p.of_group() + 1 - group) * p.outputs_of_group();
  }
  // Of a matrix (outputs of the group, channels of the run, in whole vectors), for each run.
  int64_t weights(const Problem& p) const {
    int64_t sum = 0;
    each_run(p, first, count, [&](int64_t, int64_t, int channels) {
      sum += p.outputs_of_group() * p.padded(channels);
    });
    return sum;
  }
};

// A row of a matrix of samples: products read and write whole vectors from any channel on.
FUSEPORT_INLINE int64_t sample_row(const Problem& p, const Block& block) {
  return block.row + p.padded(1);
}

// dout of a tile, as rows of TILE for the outputs of a block; zeros beyond.
template <class F, class Stored>
static void load_cotangent(const Problem& p, const Backward& b, const Block& block, int64_t batch,
                           const Tile& tile, typename F::Real* to) {
  load_block<F>((const Stored*)b.dout + (batch * p.outputs + block.output) * p.places() + tile.first,
                p.places(), 1, (int)block.outputs, tile.count, to, TILE);
}

template <class F>
struct ImageScratch {
  using Real = typename F::Real;
  Samples<F>* samples;
  Real *weight, *cotangent, *dsamples, *dtable, *dots;
  int64_t bytes;

  ImageScratch(const Problem& p, const Block& block, void* base) {
    Scratch s{(char*)base};
    s.take(1, &samples);
    s.take(p.taps() * block.weights(p), &weight);  // (taps, weights)
    s.take(block.outputs * TILE, &cotangent);
    s.take(TILE * sample_row(p, block), &dsamples);
    s.take(p.table_rows() * block.row, &dtable);  // (table_rows, row)
    s.take(4 * TILE, &dots);
    bytes = s.used;
  }
};

// The weights of a block, those of each tap together, whose channels are rows' numbers.
template <class F, class Stored>
static void load_weights(const Problem& p, const Block& block, typename F::Real* to) {
  const int64_t taps = p.taps(), each = p.outputs_of_group(), terms = p.of_group() * taps;
  memset(to, 0, taps * block.weights(p) * sizeof *to);
  for (int64_t tap = 0; tap < taps; ++tap)
    each_run(p, block.first, block.count, [&](int64_t group, int64_t channel, int channels) {
      const Stored* const from = (const Stored*)p.weight + group * each * terms +
                                 (channel - group * p.of_group()) * taps + tap;
      load_block<F>(from, terms, taps, (int)each, channels, to, (int)p.padded(channels));
      to += each * p.padded(channels);
    });
}

// The cotangents of the samples of a tap, before the mask: rows of outputs, zeros after the channels.
template <class F>
static void cotangents_of_samples(const Problem& p, const Block& block, const ImageScratch<F>& s,
                                  int64_t tap, int count) {
  using Real = typename F::Real;
  const int64_t each = p.outputs_of_group(), stride = sample_row(p, block);
  const Real* weight = s.weight + tap * block.weights(p);
  const Real* cotangent = s.cotangent;
  each_run(p, block.first, block.count, [&](int64_t, int64_t channel, int channels) {
    const int64_t row = p.padded(channels);
    multiply<F>({{cotangent, 1, TILE}, weight, row, s.dsamples + channel - block.first, stride,
                 count, (int)row, (int)each});
    weight += each * row;
    cotangent += each * TILE;
  });
  for (int j = 0; j < count; ++j)
    memset(s.dsamples + j * stride + block.count, 0, (block.row - block.count) * sizeof(Real));
}

// Adds what samples give to their pixels, and makes the products of their pixels and cotangents.
template <class F>
static void give(const Samples<F>& at, const typename F::Real* table, int64_t table_row,
                 const typename F::Real* dsamples, int64_t stride, int row,
                 typename F::Real* dtable, typename F::Real* dots) {
  using Real = typename F::Real;
  using Vector = typename F::Vector;
  for (int k = 0; k < 4; ++k)
    for (int begin = 0; begin < at.count; begin += F::LANES) {
      Vector sums[F::LANES];
#pragma GCC unroll 4
      for (int i = 0; i < F::LANES; ++i) {
        const int j = begin + i;
        sums[i] = Vector{};
        if (j >= at.count) continue;
        const int64_t index = at.index[k * TILE + j];
        const Real* const from = table + index * table_row;
        const Real* const g = dsamples + j * stride;
        Real* const to = dtable + index * row;
        const Vector share = splat<F>(at.share[k * TILE + j] * at.mask[j]);
        for (int c = 0; c < row; c += F::LANES) {
          const Vector gradient = load<F>(g + c);
          sums[i] += gradient * load<F>(from + c);
          store<F>(to + c, load<F>(to + c) + share * gradient);
        }
      }
      store<F>(dots + k * TILE + begin, sums_of_lanes<F>(sums));
    }
}

// What the channels of a block give the gradients of dy, of dx and of the mask, in three rows.
template <class F>
static void put_parts(const Samples<F>& at, const typename F::Real* dots, int64_t places,
                      typename F::Real* to) {
  using Real = typename F::Real;
  using Vector = typename F::Vector;
  each_vector<F>(at.count, [&](int64_t j, const auto part) {
    const Vector x = load<F>(at.share_x + j), y = load<F>(at.share_y + j);
    Vector dot[4], mask{};
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      dot[k] = load<F>(dots + k * TILE + j);
      mask += load<F>(at.share + k * TILE + j) * dot[k];
    }
    part.store(((Real)1 - x) * (dot[2] - dot[0]) + x * (dot[3] - dot[1]), to + j);
    part.store(((Real)1 - y) * (dot[1] - dot[0]) + y * (dot[3] - dot[2]), to + places + j);
    part.store(mask, to + 2 * places + j);
  });
}

// The gradient of a block's channels of the image of one batch entry.
template <class F, class Stored>
static void image_unit(const Problem& p, const Backward& b, const Shared& shared, int64_t unit,
                       void* scratch) {
  using Real = typename F::Real;
  const int64_t batch = unit / p.blocks();
  const Block block(p, unit % p.blocks());
  const ImageScratch<F> s(p, block, scratch);
  const int64_t group = batch * p.offset_groups + block.offset_group;
  const Real* const table = table_of<F>(p, shared, group) + block.column;
  Real* const parts = (Real*)shared.other + unit * p.taps() * 3 * p.places();
  load_weights<F, Stored>(p, block, s.weight);
  memset(s.dtable, 0, p.table_rows() * block.row * sizeof(Real));
  for (int64_t number = 0; number < p.tiles(); ++number) {
    const Tile tile(p, number);
    s.samples->set(p, tile);
    load_cotangent<F, Stored>(p, b, block, batch, tile, s.cotangent);
    for (int64_t tap = 0; tap < p.taps(); ++tap) {
      s.samples->template read<Stored>(p, tile, group, tap);
      cotangents_of_samples<F>(p, block, s, tap, tile.count);
      give<F>(*s.samples, table, p.table_row(), s.dsamples, sample_row(p, block), (int)block.row,
              s.dtable, s.dots);
      put_parts<F>(*s.samples, s.dots, p.places(), parts + tap * 3 * p.places() + tile.first);
    }
  }
  Stored* const dinput = (Stored*)b.dinput + (batch * p.channels + block.first) * p.pixels();
  for (int64_t pixel = 0; pixel < p.pixels(); pixel += PIXELS)
    store_block<F>(s.dtable + pixel * block.row, (int)block.row,
                   (int)least(PIXELS, p.pixels() - pixel), (int)block.count, dinput + pixel, 1,
                   p.pixels());
}

template <class F>
struct FilterScratch {
  using Real = typename F::Real;
  Samples<F>* samples;
  Real *taken, *cotangent, *sums;
  double* totals;
  int64_t bytes;

  FilterScratch(const Problem& p, const Block& block, void* base) {
    Scratch s{(char*)base};
    s.take(1, &samples);
    s.take(TILE * sample_row(p, block), &taken);
    s.take(block.outputs * TILE, &cotangent);
    s.take(block.weights(p), &sums);
    s.take(block.weights(p), &totals);
    bytes = s.used;
  }
};

// The gradient of the weight for one tap and a block's channels.
template <class F, class Stored>
static void filter_unit(const Problem& p, const Backward& b, const Shared& shared, int64_t unit,
                        void* scratch) {
  using Real = typename F::Real;
  const int64_t tap = unit / p.blocks(), each = p.outputs_of_group();
  const Block block(p, unit % p.blocks());
  const FilterScratch<F> s(p, block, scratch);
  const int64_t numbers = block.weights(p), stride = sample_row(p, block);
  memset(s.taken, 0, TILE * stride * sizeof(Real));
  memset(s.totals, 0, numbers * sizeof(double));
  for (int64_t batch = 0; batch < p.batches; ++batch) {
    const int64_t group = batch * p.offset_groups + block.offset_group;
    const Real* const table = table_of<F>(p, shared, group) + block.column;
    for (int64_t number = 0; number < p.tiles(); ++number) {
      const Tile tile(p, number);
      s.samples->set(p, tile);
      s.samples->template read<Stored>(p, tile, group, tap);
      s.samples->take(table, p.table_row(), (int)block.row, s.taken, stride);
      load_cotangent<F, Stored>(p, b, block, batch, tile, s.cotangent);
      const Real* cotangent = s.cotangent;
      Real* sums = s.sums;
      each_run(p, block.first, block.count, [&](int64_t, int64_t channel, int channels) {
        const int64_t row = p.padded(channels);
        multiply<F>({{cotangent, TILE, 1}, s.taken + channel - block.first, stride, sums, row,
                     (int)each, (int)row, tile.count, (Real)(number % TILES == 0 ? 0 : 1)});
        sums += each * row;
        cotangent += each * TILE;
      });
      if (number % TILES == TILES - 1 || number == p.tiles() - 1)
        for (int64_t i = 0; i < numbers; ++i) s.totals[i] += (double)s.sums[i];
    }
  }
  const double* total = s.totals;
  each_run(p, block.first, block.count, [&](int64_t group, int64_t channel, int channels) {
    const int64_t row = p.padded(channels), first = channel - group * p.of_group();
    for (int64_t output = 0; output < each; ++output, total += row) {
      const int64_t to = (group * each + output) * p.of_group() + first;
      for (int64_t c = 0; c < channels; ++c)
        from_real((Real)total[c], (Stored*)b.dweight + (to + c) * p.taps() + tap);
    }
  });
}

// The gradient of the bias of one output channel.
template <class F, class Stored>
static void bias_unit(const Problem& p, const Backward& b, int64_t output) {
  constexpr int64_t SUMMED = TILE * TILES;
  double total = 0;
  for (int64_t batch = 0; batch < p.batches; ++batch)
    for (int64_t first = 0; first < p.places(); first += SUMMED) {
      const Stored* const from =
          (const Stored*)b.dout + (batch * p.outputs + output) * p.places() + first;
      total += (double)summed<F>(least(SUMMED, p.places() - first),
                                 [&](int64_t i, const auto part) { return part.load(from + i); });
    }
  from_real((typename F::Real)total, (Stored*)b.dbias + output);
}

template <class F>
static int64_t backward_bytes(const Problem& p) {
  int64_t most = 0;
  for (int64_t number = 0; number < p.blocks(); ++number) {
    const Block block(p, number);
    const int64_t image = ImageScratch<F>(p, block, nullptr).bytes;
    const int64_t filter = FilterScratch<F>(p, block, nullptr).bytes;
    most = most < image ? image : most;
    most = most < filter ? filter : most;
  }
  return most;
}

template <class F, class Stored>
static void backward_unit(const Problem& p, const Backward& b, const Shared& shared, int64_t unit,
                          void* scratch) {
  if (unit < p.image_units()) return image_unit<F, Stored>(p, b, shared, unit, scratch);
  unit -= p.image_units();
  if (unit < p.filter_units()) return filter_unit<F, Stored>(p, b, shared, unit, scratch);
  bias_unit<F, Stored>(p, b, unit - p.filter_units());
}

// The gradients of the offsets and the mask of a tap of an offset group of a batch entry.
template <class F, class Stored>
static void sum_parts_unit(const Problem& p, const Backward& b, const Shared& shared, int64_t unit) {
  using Real = typename F::Real;
  using Vector = typename F::Vector;
  const int64_t tap = unit % p.taps(), first = unit / p.taps() * p.blocks_of_offset_group();
  const int64_t part_row = p.taps() * 3 * p.places(), places = p.places();
  const Real* const parts = (const Real*)shared.other + first * part_row + tap * 3 * places;
  const Stored* const mask = (const Stored*)p.mask + unit * places;
  each_vector<F>(places, [&](int64_t i, const auto part) {
    Vector sums[3] = {};
    for (int64_t block = 0; block < p.blocks_of_offset_group(); ++block)
#pragma GCC unroll 4
      for (int k = 0; k < 3; ++k) sums[k] += part.load(parts + block * part_row + k * places + i);
    if (p.mask) {
      const Vector factor = part.load(mask + i);
      sums[0] *= factor;
      sums[1] *= factor;
      part.store(sums[2], (Stored*)b.dmask + unit * places + i);
    }
    part.store(sums[0], (Stored*)b.doffset + 2 * unit * places + i);
    part.store(sums[1], (Stored*)b.doffset + (2 * unit + 1) * places + i);
  });
}

}  // namespace fuseport::deform_conv2d::FUSEPORT_ISA
