// Chunks of numbers in shared memory, as bfloat16 for tensor cores.
#pragma once

#include "ssd_chunk_scan/cuda_steps.cuh"

namespace fuseport::ssd_chunk_scan::cuda {

constexpr int TILE = 16, TILES = T / TILE, COLUMNS = 64;  // columns of x
constexpr int PAD = 8;  // numbers between rows: eight rows of 16 bytes in a column are in all banks

FUSEPORT_DEVICE float lower(uint32_t both) { return bits_to_float(both << 16); }
FUSEPORT_DEVICE float upper(uint32_t both) { return bits_to_float(both & 0xffff0000u); }

// Two numbers, each as a sum of COUNT bfloat16, the largest first. What has no finite rest has none.
template <int COUNT>
FUSEPORT_DEVICE void cut(float x, float y, uint32_t (&parts)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    parts[i] = floats_to_bfloat16(x, y);
    x -= lower(parts[i]);
    y -= upper(parts[i]);
    if (!(x - x == 0)) x = 0;
    if (!(y - y == 0)) y = 0;
  }
}

// The address of this lane's row of four matrices of 8 × 8 that make up one of 16 × 16 in shared
// memory. Registers 0 and 1 get its upper and lower left of a first operand; or, if ACROSS, the left
// and right of its upper half: a second operand's, or a first's if it is transposed.
template <bool ACROSS>
FUSEPORT_DEVICE const BFloat16* row_of(const BFloat16* tile, int row) {
  const int lane = (int)threadIdx.x % WARP, half = lane / 16 * 8, other = lane / 8 % 2 * 8;
  return tile + (lane % 8 + (ACROSS ? half : other)) * row + (ACROSS ? other : half);
}

// Brings the steps of a chunk into a tile of WIDTH columns, of which `columns` are there; zeros
// beyond. They are there after wait_for_copies and a barrier.
template <int WIDTH>
FUSEPORT_DEVICE void bring(const Strided& s, int64_t batch, int64_t step, int64_t head,
                           int64_t first, int64_t steps, int64_t columns, BFloat16* to) {
  constexpr int COUNT = VECTOR<BFloat16>, PACKS = WIDTH / COUNT;
  const BFloat16* const from = (const BFloat16*)s.data + batch * s.batch + step * s.step +
                               head * s.head + first * s.column;
  const bool whole = s.column == 1 && s.step % COUNT == 0 && columns % COUNT == 0 &&
                     (uintptr_t)from % (sizeof(BFloat16) * COUNT) == 0;
  for (int i = (int)threadIdx.x; i < T * PACKS; i += (int)blockDim.x) {
    const int t = i / PACKS, n = i % PACKS * COUNT;
    BFloat16* const at = to + t * (WIDTH + PAD) + n;
    const bool there = t < steps && n < columns;
    const BFloat16* const source = from + t * s.step + n * s.column;
    if (whole) {
      copy_later(at, there ? source : from, there);
    } else {
      const int64_t count = there ? columns - n : 0;
      *(Pack<BFloat16, COUNT>*)at =
          load_pack<COUNT>(source, s.column, (int)(count < COUNT ? count : COUNT), false);
    }
  }
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
