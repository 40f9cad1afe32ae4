// What a lane of the walk has in registers, from and to device memory: parts of the state, and of what
// is like x two columns of some steps. Addresses and bounds are found once for all of them, and all that
// is loaded is asked for before the first is used: warps of the walk are few, and each waits alone.
#pragma once

#include "ssd_chunk_scan/cuda_tiles.cuh"

namespace fuseport::ssd_chunk_scan::cuda {

// Of a head's state: rows are columns of x, of which a lane has two that are 8 apart, and of each
// eight states two in a row.
struct StatePart {
  int64_t first, row, rows, states;  // of its numbers; in numbers; how many there are from that on

  // From column q and state n on.
  FUSEPORT_DEVICE StatePart(const Problem& p, int64_t q, int64_t n)
      : first(q * p.states + n), row(p.states), rows(p.width - q), states(p.states - n) {}

  template <int EIGHTS>
  FUSEPORT_DEVICE bool in_pairs(const float* data) const {
    return rows > 8 && states > EIGHTS * 8 - 7 && row % 2 == 0 &&
           (uintptr_t)(data + first) % (2 * sizeof(float)) == 0;
  }
  FUSEPORT_DEVICE bool there(int j, int i) const {
    return i / 2 * 8 < rows && j * 8 + i % 2 < states;
  }

  // Zeros where there are none.
  template <int EIGHTS>
  FUSEPORT_DEVICE void load(const float* data, float (&state)[EIGHTS][4]) const {
    const float *const upper = data + first, *const lower = upper + 8 * row;
    if (in_pairs<EIGHTS>(data)) {
#pragma unroll
      for (int j = 0; j < EIGHTS; ++j) {
        const auto above = *(const Pack<float, 2>*)(upper + j * 8);
        const auto below = *(const Pack<float, 2>*)(lower + j * 8);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          state[j][i] = above.at[i];
          state[j][2 + i] = below.at[i];
        }
      }
      return;
    }
#pragma unroll
    for (int j = 0; j < EIGHTS; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        state[j][i] = there(j, i) ? (i < 2 ? upper : lower)[j * 8 + i % 2] : 0.0f;
  }

  template <int EIGHTS>
  FUSEPORT_DEVICE void store(const float (&state)[EIGHTS][4], float* data) const {
    float *const upper = data + first, *const lower = upper + 8 * row;
    if (in_pairs<EIGHTS>(data)) {
#pragma unroll
      for (int j = 0; j < EIGHTS; ++j) {
        *(Pack<float, 2>*)(upper + j * 8) = {state[j][0], state[j][1]};
        *(Pack<float, 2>*)(lower + j * 8) = {state[j][2], state[j][3]};
      }
      return;
    }
#pragma unroll
    for (int j = 0; j < EIGHTS; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (there(j, i)) (i < 2 ? upper : lower)[j * 8 + i % 2] = state[j][i];
  }
};

// Two numbers in a row as they are in memory: of 16 bits both are in one register, which nobody waits
// for to take them apart.
template <class Stored>
struct alignas(2 * sizeof(Stored)) Pair {
  uint32_t words[sizeof(Stored) / 2];

  FUSEPORT_DEVICE void get(float (&to)[2]) const {
    if constexpr (sizeof(Stored) == 4) {
      to[0] = bits_to_float(words[0]);
      to[1] = bits_to_float(words[1]);
    } else {
      to[0] = lower<Stored>(words[0]);
      to[1] = upper<Stored>(words[0]);
    }
  }
};

// Of a chunk's steps, of which a lane has each eighth, two columns in a row, and two that are 8 further:
// from which step and column on, and how many there are.
struct LanePairs {
  static constexpr int STEPS = T / 8;
  int64_t batch, step, h, q;
  int steps, columns;

  template <class Stored>
  using Pairs = Pair<Stored>[STEPS][2];

  FUSEPORT_DEVICE LanePairs(const Problem& p, int64_t batch, int64_t step, int64_t h, int64_t q)
      : batch(batch),
        step(step),
        h(h),
        q(q),
        steps((int)(p.length - step < T ? p.length - step : T)),
        columns((int)(p.width - q < COLUMNS ? p.width - q : COLUMNS)) {}

  FUSEPORT_DEVICE int count(int i, int k) const {
    const int left = i * 8 < steps ? columns - k * 8 : 0;
    return left < 2 ? left : 2;
  }

  // Asks for what is like x; zeros where there is none.
  template <class Stored>
  FUSEPORT_DEVICE void ask(const Strided& s, Pairs<Stored>& to) const {
    const Stored* at =
        (const Stored*)s.data + batch * s.batch + step * s.step + h * s.head + q * s.column;
    if (columns > 9 && s.column == 1 && s.step % 2 == 0 &&
        (uintptr_t)at % sizeof(Pair<Stored>) == 0) {
#pragma unroll
      for (int i = 0; i < STEPS; ++i, at += 8 * s.step)
#pragma unroll
        for (int k = 0; k < 2; ++k)
          to[i][k] = i * 8 < steps ? *(const Pair<Stored>*)(at + k * 8) : Pair<Stored>{};
      return;
    }
#pragma unroll
    for (int i = 0; i < STEPS; ++i, at += 8 * s.step)
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const auto both = load_pack<2>(at + k * 8 * s.column, s.column, count(i, k), false);
        memcpy(&to[i][k], &both, sizeof both);
      }
  }
};

// Of a lane's pairs: y with D·x, and with the gate; or, if GATE, what the gate makes of dout: dz and dy.
// x is a tile's, from the pairs' first number on.
template <bool GATE, class Stored>
FUSEPORT_DEVICE void finish_pairs(const Problem& p, const Walk& walk, const LanePairs& pairs,
                                  const Stored* x, int x_row,
                                  const LanePairs::Pairs<Stored>& of_z,
                                  const LanePairs::Pairs<Stored>& of_dout,
                                  const float (&y)[TILES][2][4]) {
  const int64_t row = p.heads * p.width;
  int64_t at = (pairs.batch * p.length + pairs.step) * row + pairs.h * p.width + pairs.q;
  const bool even = at % 2 == 0 && row % 2 == 0;
  float D[2][2];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const int q = k / 2 * 8 + k % 2;
    D[k / 2][k % 2] = q < pairs.columns ? ((const float*)p.D)[pairs.h * p.width + pairs.q + q] : 0;
  }
#pragma unroll
  for (int i = 0; i < LanePairs::STEPS; ++i, at += 8 * row)
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int count = pairs.count(i, k);
      float of_x[2], z[2], out[2];
      (*(const Pair<Stored>*)(x + i * 8 * x_row + k * 8)).get(of_x);
#pragma unroll
      for (int j = 0; j < 2; ++j) out[j] = y[i / 2][k][i % 2 * 2 + j] + D[k][j] * of_x[j];
      of_z[i][k].get(z);
      if constexpr (GATE) {
        float dout[2], dy[2];
        of_dout[i][k].get(dout);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float share = logistic(z[j]);
          dy[j] = dout[j] * z[j] * share;
          out[j] *= dout[j] * share * (1 + z[j] * (1 - share));
        }
        store_pack<2>(dy, (float*)walk.dy + at + k * 8, 1, count, even && count == 2);
        store_pack<2>(out, (Stored*)walk.dz + at + k * 8, 1, count, even && count == 2);
      } else {
        if (p.z.data) {
#pragma unroll
          for (int j = 0; j < 2; ++j) out[j] *= z[j] * logistic_of<Stored>(z[j]);
        }
        store_pack<2>(out, (Stored*)walk.out + at + k * 8, 1, count, even && count == 2);
      }
    }
}

}  // namespace fuseport::ssd_chunk_scan::cuda
