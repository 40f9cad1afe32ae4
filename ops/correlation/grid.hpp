// The places of an image that are compared, along one of its axes. For the CPU and for CUDA.
#pragma once

#include <cstdint>

#include "native/isa.hpp"

namespace fuseport::correlation {

// Rounded down, for b > 0.
FUSEPORT_INLINED int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b < 0); }

// The greatest.
FUSEPORT_INLINED int64_t common_divisor(int64_t a, int64_t b) {
  while (b) {
    const int64_t rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}

// Numbers from `first` on, below `last`.
struct Range {
  int64_t first = 0, last = 0;

  FUSEPORT_INLINED int64_t count() const { return last > first ? last - first : 0; }
  FUSEPORT_INLINED bool has(int64_t i) const { return first <= i && i < last; }
};

// The rows or columns of a problem.
struct Axis {
  int64_t size = 0, outputs = 0;
  int64_t kernel = 1, patch = 1, stride = 1, padding = 0, dilation = 1, step = 1;

  // Which outputs have a pixel at tap `tap` of their windows.
  FUSEPORT_INLINED Range seen_by(int64_t tap) const {
    const int64_t from = padding - tap * dilation;
    Range r{-floor_div(-from, stride), floor_div(size - 1 + from, stride) + 1};
    if (r.first < 0) r.first = 0;
    if (r.last > outputs) r.last = outputs;
    return r;
  }

  // Whether a pixel is in a window.
  FUSEPORT_INLINED bool covered(int64_t pixel) const {
    for (int64_t tap = 0; tap < kernel; ++tap) {
      const int64_t from = pixel + padding - tap * dilation;
      if (from >= 0 && from % stride == 0 && from / stride < outputs) return true;
    }
    return false;
  }
};

// Place x is pixel x·stride - padding, which may be outside.
struct Grid {
  int64_t size, count, stride, padding, patch, step;

  FUSEPORT_INLINED Grid(const Axis& a, bool each_pixel)
      : size(a.size),
        count(each_pixel ? a.size : a.outputs),
        stride(each_pixel ? 1 : a.stride),
        padding(each_pixel ? 0 : a.padding),
        patch(a.patch),
        step(a.step) {}

  // Of displacement i, in pixels.
  FUSEPORT_INLINED int64_t offset(int64_t i) const { return (i - (patch - 1) / 2) * step; }

  // The displacement by so many pixels, or -1.
  FUSEPORT_INLINED int64_t displacement(int64_t offset) const {
    const int64_t steps = offset / step + (patch - 1) / 2;
    return offset % step == 0 && steps >= 0 && steps < patch ? steps : -1;
  }

  // Places whose pixel is inside, and inside, too, so many pixels further.
  FUSEPORT_INLINED Range places(int64_t offset) const {
    const int64_t least = offset < 0 ? -offset : 0, most = size - 1 - (offset > 0 ? offset : 0);
    Range r{-floor_div(-(least + padding), stride), floor_div(most + padding, stride) + 1};
    if (r.first < 0) r.first = 0;
    if (r.last > count) r.last = count;
    return r;
  }

  // The place of a pixel, or -1.
  FUSEPORT_INLINED int64_t place(int64_t pixel) const {
    const int64_t from = pixel + padding;
    return from >= 0 && from % stride == 0 && from / stride < count ? from / stride : -1;
  }

  // Displacements that have a place; those between two such ones have, too.
  FUSEPORT_INLINED Range shifts() const {
    Range r{0, patch};
    while (r.first < r.last && !places(offset(r.first)).count()) ++r.first;
    while (r.first < r.last && !places(offset(r.last - 1)).count()) --r.last;
    return r;
  }
};

// Rows of an image that are differentiated together, since most of them see the same rows of the other:
// `row` and `row + step` where that is below the size; each row alone where `step` is 0.
struct Pairs {
  int64_t size, step;

  FUSEPORT_INLINED explicit Pairs(const Grid& down)
      : size(down.size), step(down.step / common_divisor(down.step, down.stride) * down.stride) {
    if (down.patch < 4 || step >= size) step = 0;
  }

  FUSEPORT_INLINED int64_t count() const {
    if (!step) return size;
    const int64_t rest = size % (2 * step);
    return size / (2 * step) * step + (rest < step ? rest : step);
  }
  FUSEPORT_INLINED int64_t row(int64_t pair) const {
    return step ? pair / step * 2 * step + pair % step : pair;
  }
};

}  // namespace fuseport::correlation
