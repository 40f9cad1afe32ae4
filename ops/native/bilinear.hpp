// Bilinear samples of maps: the four pixels around a point, and how much of each a sample takes, for a
// vector of points at a time. Compiled once per instruction set.
#pragma once

#include "native/vector.hpp"

namespace fuseport::FUSEPORT_ISA {

// Corner 2·below + right is one of the upper left, upper right, lower left and lower right pixels.
template <class F>
struct Bilinear {
  using Real = typename F::Real;
  using Vector = typename F::Vector;
  using Integers = typename F::Integers;

  Vector share_x, share_y;  // of the right and the lower pixels
  Integers left, top;       // of the upper left pixel; -2 where no pixel of the four is within

  // At points in units of pixels, of which the first has its centre at 0, in maps of these sizes. A
  // point that is a pixel or more outside, or no number, has no pixel, and no share of the right
  // and the lower ones.
  FUSEPORT_INLINE Bilinear at(Vector x, Vector y, Vector width, Vector height) {
    const Integers inside =
        (x > (Real)-1) & (y > (Real)-1) & (x < width) & (y < height);
    Bilinear b;
    b.share_x = part_of(x, inside, &b.left);
    b.share_y = part_of(y, inside, &b.top);
    return b;
  }

  inline __attribute__((always_inline)) Vector share(int corner) const {
    const Vector across = corner & 1 ? share_x : (Real)1 - share_x;
    return across * (corner & 2 ? share_y : (Real)1 - share_y);
  }

  // The number of a pixel in maps whose rows are one after another, from `begin` on; `outside` where
  // it is none.
  inline __attribute__((always_inline)) Integers position(int corner, Integers width,
                                                          Integers height, Integers begin,
                                                          Integers outside) const {
    const Integers column = left + (corner & 1), row = top + (corner >> 1);
    const Integers within = (column >= 0) & (column < width) & (row >= 0) & (row < height);
    return within ? begin + row * width + column : outside;
  }

 private:
  FUSEPORT_INLINE Vector part_of(Vector v, Integers inside, Integers* whole) {
    const Vector bounded = inside ? v : Vector{};
    Integers i = __builtin_convertvector(bounded, Integers);  // towards 0: -1 < v
    i += bounded < __builtin_convertvector(i, Vector);
    *whole = inside ? i : Integers{} - 2;
    return bounded - __builtin_convertvector(i, Vector);
  }
};

}  // namespace fuseport::FUSEPORT_ISA
