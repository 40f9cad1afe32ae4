// A sample of deformable attention on CUDA: which pixels it takes, and how much of each.
#pragma once

#include <type_traits>

#include "ms_deform_attn/cuda.hpp"
#include "native/cuda_bilinear.cuh"

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
struct Sample : Bilinear<Real> {
  Real weight = 0;

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
    this->set(x, y, level.width, level.height);
    if (!level.holds)
      this->share_x = this->share_y = weight = (Real)bits_to_float(0x7fffffffu);
  }

  // Of the weight that it has in the sum.
  FUSEPORT_DEVICE Real weighted_share(int corner) const { return weight * this->share(corner); }

  // Its position in value, -1 if it is outside.
  FUSEPORT_DEVICE int64_t position(const Level& level, int corner) const {
    const int64_t pixel = this->pixel(corner, level.width, level.height);
    return pixel < 0 ? -1 : level.start + pixel;
  }
};

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
