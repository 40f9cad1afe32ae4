// Tiles: a chunk of one unit's data as reals, whatever its dtype and strides. Vectors go along
// time, [channel][step], or along channels, [step][channel]; the taps of a step lie one or one row
// apart, so one text serves both. Compiled once per instruction set.
#pragma once

#include "causal_conv1d/kernel.hpp"
#include "native/blocks.hpp"

namespace fuseport::causal_conv1d::FUSEPORT_ISA {

using namespace fuseport::FUSEPORT_ISA;

// What a unit covers.
struct Unit {
  int64_t batch, channel;  // the first channel
  int channels;

  Unit(const Problem& p, int64_t unit) {
    batch = unit / p.blocks();
    channel = unit % p.blocks() * p.block();
    channels = (int)(p.channels - channel < p.block() ? p.channels - channel : p.block());
  }

  // Of each step: the sequence that it is of; null where sequences are not packed.
  FUSEPORT_INLINED const int32_t* sequences(const Problem& p) const {
    return p.packed ? p.seq_idx + batch * p.length : nullptr;
  }
};

template <class F>
struct Scratch {
  using Real = typename F::Real;
  using Mask = std::conditional_t<sizeof(Real) == 4, uint32_t, uint64_t>;
  int64_t row;                       // of a tile
  int64_t halo;                      // W-1
  int64_t block, mask_row;
  int64_t tile_bytes;
  Real *x, *dy;                      // tiles of chunk + W-1 steps
  Real *weight, *bias;               // [tap][channel]
  Mask* mask;                        // [lag][step]: whether the tap that far back counts
  double *dweight, *dbias;           // [tap][channel]: sums over all chunks
  int64_t bytes;

  Scratch(const Problem& p, void* base) {
    constexpr int64_t LANES = F::LANES;
    halo = p.width - 1;
    block = p.block();
    mask_row = (p.chunk() + halo + 2 * LANES - 1) / LANES * LANES;
    row = p.time_last ? mask_row : block;
    tile_bytes = (p.time_last ? block * row : (p.chunk() + halo) * row) * (int64_t)sizeof(Real);
    char* const start = (char*)base;
    int64_t used = 0;
    const auto take = [&](int64_t size) {
      char* part = start + used;
      used += (size + 63) / 64 * 64;
      return part;
    };
    x = (Real*)take(tile_bytes);
    dy = (Real*)take(tile_bytes);
    weight = (Real*)take(p.width * block * (int64_t)sizeof(Real));
    bias = (Real*)take(block * (int64_t)sizeof(Real));
    mask = (Mask*)take(p.packed ? p.width * mask_row * (int64_t)sizeof(Mask) : 0);
    dweight = (double*)take(p.width * block * 8);
    dbias = (double*)take(block * 8);
    bytes = used;
  }
};

// `count` steps of a unit from step `from` of a sequence on, into a tile at step `at`.
template <class F, class Stored, bool TIME_LAST>
static void load_steps(const Sequence& s, const Unit& unit, int64_t from, int64_t count,
                       typename F::Real* tile, int64_t row, int64_t at) {
  const Stored* data =
      (const Stored*)s.data + unit.batch * s.batch + unit.channel * s.channel + from * s.time;
  if constexpr (TIME_LAST) {
    load_block<F>(data, s.channel, s.time, unit.channels, (int)count, tile + at, (int)row);
  } else {
    load_block<F>(data, s.time, s.channel, (int)count, unit.channels, tile + at * row, (int)row);
  }
}

// A tile's step `to` on are set to its steps from 0 on, `count` of them, or to zeros.
template <class F, bool TIME_LAST>
static void move_steps(const Problem& p, typename F::Real* tile, int64_t row, int64_t to,
                       int64_t count, bool zero) {
  const int64_t rows = TIME_LAST ? p.block() : 1, pitch = TIME_LAST ? 1 : row;
  for (int64_t r = 0; r < rows; ++r) {
    typename F::Real* line = tile + r * row;
    if (zero) {
      memset(line + to * pitch, 0, count * pitch * sizeof *tile);
    } else {
      memmove(line + to * pitch, line, count * pitch * sizeof *tile);
    }
  }
}

// The inputs that the outputs of a chunk are made of: those of its steps, and W-1 before them.
template <class F, class Stored, bool TIME_LAST>
static void load_inputs(const Scratch<F>& s, const Problem& p, const Unit& unit, int64_t start,
                        int64_t steps) {
  const int64_t all = steps + s.halo;
  const int64_t missing = start >= s.halo ? 0 : s.halo - start < all ? s.halo - start : all;
  if (missing && !p.packed) {
    load_steps<F, Stored, TIME_LAST>(p.initial, unit, start, missing, s.x, s.row, 0);
  } else if (missing) {
    move_steps<F, TIME_LAST>(p, s.x, s.row, 0, missing, true);
  }
  load_steps<F, Stored, TIME_LAST>(p.x, unit, start + missing - s.halo, all - missing, s.x, s.row,
                                   missing);
}

// Whether the tap `lag` steps before step t counts: both are of one sequence, and not padding.
FUSEPORT_INLINE bool counts(const int32_t* seq_idx, int64_t t, int64_t lag) {
  return t >= lag && seq_idx[t] >= 0 && seq_idx[t - lag] == seq_idx[t];
}

template <class F>
static void load_masks(const Scratch<F>& s, const Problem& p, const Unit& unit, int64_t start,
                       int64_t steps) {
  using Mask = typename Scratch<F>::Mask;
  const int32_t* const seq_idx = unit.sequences(p);
  for (int64_t lag = 0; lag < p.width; ++lag)
    for (int64_t t = 0; t < s.mask_row; ++t)
      s.mask[lag * s.mask_row + t] =
          t < steps && start + t < p.length && counts(seq_idx, start + t, lag) ? ~(Mask)0 : 0;
}

// Weights and bias of a unit; channels past its end are zero.
template <class F, class Stored>
static void load_weights(const Scratch<F>& s, const Problem& p, const Unit& unit) {
  memset(s.weight, 0, p.width * s.block * sizeof *s.weight);
  memset(s.bias, 0, s.block * sizeof *s.bias);
  load_block<F>((const Stored*)p.weight + unit.channel * p.width, 1, p.width, (int)p.width,
                unit.channels, s.weight, (int)s.block);
  load_block<F>((const Stored*)p.bias + unit.channel, 1, 1, 1, unit.channels, s.bias,
                (int)s.block);
}

// Weights held in registers where their number is known, W; 0 means that it is not. The mask of a
// lag is one for each step.
template <class F, bool TIME_LAST, int W>
struct Taps {
  using Vector = typename F::Vector;
  using Bits = typename F::Bits;
  const Scratch<F>& s;
  const int64_t group;
  const int width;
  Vector held[W ? W : 1];
  Vector bias;

  FUSEPORT_INLINED Taps(const Scratch<F>& s, int64_t group)
      : s(s), group(group), width(W ? W : (int)s.halo + 1) {
#pragma GCC unroll 4
    for (int k = 0; k < W; ++k) held[k] = of_channel(s.weight + k * s.block);
    bias = of_channel(s.bias);
  }

  FUSEPORT_INLINED Vector of_channel(const typename F::Real* row) const {
    if constexpr (TIME_LAST) {
      return splat<F>(row[group]);
    } else {
      return load<F>(row + group * F::LANES);
    }
  }

  FUSEPORT_INLINED Vector weight(int k) const {
    if constexpr (W) {
      return held[k];
    } else {
      return of_channel(s.weight + k * s.block);
    }
  }

  // v where the tap `lag` steps before a tile's step counts, for the vector of steps from there.
  FUSEPORT_INLINED Vector masked(Vector v, int64_t lag, int64_t step) const {
    const auto* mask = s.mask + lag * s.mask_row + step;
    Bits bits;
    if constexpr (TIME_LAST) {
      memcpy(&bits, mask, sizeof bits);
    } else {
      bits = Bits{} + *mask;
    }
    return (Vector)((Bits)v & bits);
  }

  // Where a vector of a tile is: its position counts vectors of steps, or steps.
  FUSEPORT_INLINED int64_t at(int64_t position) const {
    return TIME_LAST ? group * s.row + position * F::LANES : position * s.row + group * F::LANES;
  }

  FUSEPORT_INLINED int64_t step(int64_t position) const {
    return TIME_LAST ? position * F::LANES : position;
  }

  FUSEPORT_INLINED int64_t pitch() const { return TIME_LAST ? 1 : s.row; }

  // What goes into the activation.
  template <bool PACKED>
  FUSEPORT_INLINED Vector sum(int64_t position) const {
    const typename F::Real* from = s.x + at(position);
    Vector total = bias;
#pragma GCC unroll 4
    for (int k = 0; k < width; ++k) {
      Vector product = weight(k) * load<F>(from + k * pitch());
      if constexpr (PACKED) product = masked(product, width - 1 - k, step(position));
      total += product;
    }
    return total;
  }
};

// The first `count` lanes of v, to memory.
template <class F, class Stored>
FUSEPORT_INLINE void put(typename F::Vector v, Stored* to, int64_t count) {
  if (count >= F::LANES) return store_reals<F>(v, to);
  typename F::Real lanes[F::LANES];
  store<F>(lanes, v);
  for (int64_t i = 0; i < count; ++i) from_real(lanes[i], to + i);
}

}  // namespace fuseport::causal_conv1d::FUSEPORT_ISA
