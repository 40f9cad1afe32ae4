// Chunks of numbers in shared memory, and the factors of their steps.
#pragma once

#include "native/cuda_apart.cuh"
#include "ssd_chunk_scan/cuda_steps.cuh"

namespace fuseport::ssd_chunk_scan::cuda {

constexpr int TILES = T / TILE, COLUMNS = 64;   // columns of x
constexpr int BELOW = TILES * (TILES + 1) / 2;  // tiles on and below the diagonal

// M or Q, in tiles on and below the diagonal; cut into parts when it is put there, or, if not CUT, when
// it is loaded. Two parts of bfloat16 suffice for gradients and outputs of 16 bits.
template <class Stored, bool CUT = !std::is_same_v<Stored, float>>
struct Mixed {
  static constexpr int COUNT = std::is_same_v<Stored, float> ? PARTS<float> : 2;
  static constexpr int ROW = TILE + PAD<BFloat16>;
  BFloat16 parts[COUNT][BELOW][TILE * ROW];

  FUSEPORT_DEVICE static int tile_of(int i, int j) { return i * (i + 1) / 2 + j; }
  // In row t, two numbers from an even column on.
  FUSEPORT_DEVICE void put(int t, int column, const float (&numbers)[2]) {
    uint32_t both[COUNT];
    cut(numbers[0], numbers[1], both);
#pragma unroll
    for (int part = 0; part < COUNT; ++part)
      *(uint32_t*)(parts[part][tile_of(t / TILE, column / TILE)] + t % TILE * ROW +
                   column % TILE) = both[part];
  }
  // A first operand, of the tile in row i and column j of tiles.
  template <bool TRANSPOSED>
  FUSEPORT_DEVICE void load(uint32_t (&to)[COUNT][4], int i, int j) const {
#pragma unroll
    for (int part = 0; part < COUNT; ++part)
      load_tiles<TRANSPOSED, TRANSPOSED ? Four::across : Four::down>(
          to[part], parts[part][tile_of(i, j)], ROW);
  }
};

template <>
struct Mixed<float, false> {
  static constexpr int COUNT = PARTS<float>, ROW = TILE + PAD<float>;
  float tiles[BELOW][TILE * ROW];

  FUSEPORT_DEVICE static int tile_of(int i, int j) { return i * (i + 1) / 2 + j; }
  FUSEPORT_DEVICE void put(int t, int column, const float (&numbers)[2]) {
    float* const to = tiles[tile_of(t / TILE, column / TILE)] + t % TILE * ROW + column % TILE;
    *(Pack<float, 2>*)to = {numbers[0], numbers[1]};
  }
  template <bool TRANSPOSED>
  FUSEPORT_DEVICE void load(uint32_t (&to)[COUNT][4], int i, int j) const {
    load_parts<TRANSPOSED, TRANSPOSED ? Four::across : Four::down>(to, tiles[tile_of(i, j)], ROW);
  }
};

// Brings the steps of a chunk into a tile, as `bring_steps` does.
template <int WIDTH, class Stored>
FUSEPORT_DEVICE void bring(const Strided& s, int64_t batch, int64_t step, int64_t head,
                           int64_t first, int64_t steps, int64_t columns, Stored* to) {
  bring_steps<T, WIDTH>(s, batch, step, head, first, steps, columns, to);
}

// What all threads of a block read of a chunk's steps, for one head.
struct Factors {
  float step[T], total[T], rest[T], outer[T], w[T];
  int32_t begin[T];

  FUSEPORT_DEVICE Decays<float> decays() const { return {step, total, rest, begin}; }

  // By thread t < T, when all know what `take` has put there.
  FUSEPORT_DEVICE void find(int t) {
    const Decays<float> d = decays();
    outer[t] = d.outer(t);
    w[t] = d.remaining(t) * d.delta(t);
  }
};

// One step's of a thread, on their way from device memory.
struct Asked {
  float step = 0, total = 0, rest = 0;
  int32_t begin = 0;

  FUSEPORT_DEVICE void ask(const Problem& p, const Steps& s, int64_t chunk, int64_t h) {
    if (threadIdx.x >= T) return;
    const Decays<float> d(p, s, chunk, h);
    const int64_t at = threadIdx.x * p.heads;
    step = d.step[at];
    total = d.total[at];
    rest = d.rest[at];
    begin = d.begin[threadIdx.x];
  }
  FUSEPORT_DEVICE void put(Factors& f) const {
    if (threadIdx.x >= T) return;
    f.step[threadIdx.x] = step;
    f.total[threadIdx.x] = total;
    f.rest[threadIdx.x] = rest;
    f.begin[threadIdx.x] = begin;
  }
};

}  // namespace fuseport::ssd_chunk_scan::cuda
