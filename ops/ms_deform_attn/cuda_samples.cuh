// A sample of deformable attention on CUDA: which pixels it takes, and how much of each; and how a
// row of channels is dealt out to threads.
#pragma once

#include <type_traits>

#include "ms_deform_attn/cuda.hpp"
#include "native/cuda_vectors.cuh"

namespace fuseport::ms_deform_attn::cuda {

using namespace fuseport::cuda;

constexpr int THREADS = 256, WARP = 32;
constexpr int BLOCKS = 2;  // of a multiprocessor, at least: with more, registers would be spilled

// As Levels of levels.hpp checks it; one that does not hold has no pixels.
struct Level {
  int height = 0, width = 0;
  int64_t start = 0;
  bool holds = false;

  FUSEPORT_DEVICE Level(const Problem& p, int64_t level) {
    constexpr int64_t LIMIT = (int64_t(1) << 31) - 1;
    const int64_t h = p.shapes[2 * level], w = p.shapes[2 * level + 1];
    start = p.starts[level];
    holds = h >= 0 && h <= LIMIT && w >= 0 && w <= LIMIT && start >= 0 &&
            start <= p.positions - h * w;
    height = holds ? (int)h : 0;
    width = holds ? (int)w : 0;
  }

  // Upper left pixels of samples: from one above and to the left of the map on.
  FUSEPORT_DEVICE int64_t cells() const {
    return height && width ? (int64_t)(height + 1) * (width + 1) : 0;
  }
};

template <class Real>
struct Sample {
  int left = -2, top = -2;  // of the upper left pixel; where no pixel of the four is within
  Real share_x = 0, share_y = 0, weight = 0;  // shares of the right and the lower pixels

  // Of a query and head, numbered together, and one of its levels.
  template <class Stored>
  FUSEPORT_DEVICE void read(const Problem& p, const Level& level, int64_t at) {
    weight = real_or_stored<Stored>(p.weights, p.wide_points, at);
    const Real across = real_or_stored<Stored>(p.locations, p.wide_points, 2 * at);
    const Real down = real_or_stored<Stored>(p.locations, p.wide_points, 2 * at + 1);
    // Rounded before 1/2 is taken off, as plain torch does it: else samples at the centres of pixels
    // would have another pixel beside.
    const Real x = rounded_product(across, (Real)level.width) - (Real)0.5;
    const Real y = rounded_product(down, (Real)level.height) - (Real)0.5;
    const bool inside = x > -1 && y > -1 && x < (Real)level.width && y < (Real)level.height;
    left = top = -2;
    share_x = share_y = 0;
    if (inside) {
      share_x = part_of(x, &left);
      share_y = part_of(y, &top);
    }
    if (!level.holds) share_x = share_y = weight = (Real)bits_to_float(0x7fffffffu);
  }

  // Of corner 2·below + right.
  FUSEPORT_DEVICE Real share(int corner) const {
    const Real x = corner & 1 ? share_x : 1 - share_x, y = corner & 2 ? share_y : 1 - share_y;
    return weight * (x * y);
  }

  // Its position in value, -1 if it is outside.
  FUSEPORT_DEVICE int64_t position(const Level& level, int corner) const {
    const int column = left + (corner & 1), row = top + (corner >> 1);
    const bool within = column >= 0 && column < level.width && row >= 0 && row < level.height;
    return within ? level.start + (int64_t)row * level.width + column : -1;
  }

 private:
  static FUSEPORT_DEVICE Real part_of(Real x, int* whole) {
    *whole = (int)x;  // towards 0: -1 < x
    *whole -= x < (Real)*whole;
    return x - (Real)*whole;
  }
};

// The channels of a head: V in a row are a thread's, and LANES threads side by side have a row, or
// go through it.
struct Deal {
  int lanes = 1;

  Deal(int64_t channels, int each) {
    while (lanes < WARP && lanes * each < channels) lanes *= 2;
  }
};

// V channels of a row in value's dtype from `c` on, as reals; zeros beyond its end, and where there
// is no row.
template <int V, class Stored>
FUSEPORT_DEVICE void load_channels(const Stored* row, bool there, int64_t c, int64_t channels,
                                   Real<Stored>* to) {
  Pack<Stored, V> pack{};
  if (there && c < channels) pack = *(const Pack<Stored, V>*)(row + c);
  to_reals<V>(pack, to);
}

// Calls call(Stored{}, std::integral_constant<int, V>{}) for V channels that can be moved at once.
template <class Call, class... Pointers>
const char* with_channels(const Problem& p, const Call& call, Pointers... rows) {
  return with_dtype(p.dtype, [&](auto stored) {
    using Stored = decltype(stored);
    constexpr int V = VECTOR<Stored>;
    if ((aligned<V, Stored>(rows, p.channels) && ...))
      return call(stored, std::integral_constant<int, V>{});
    return call(stored, std::integral_constant<int, 1>{});
  });
}

}  // namespace fuseport::ms_deform_attn::cuda
