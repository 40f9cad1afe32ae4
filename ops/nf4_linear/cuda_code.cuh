// The code for tensor cores, by tables of bytes in shared memory.
#pragma once

#include "native/cuda_parts.cuh"
#include "nf4_linear/kernel.cuh"

namespace fuseport::nf4_linear::cuda {

// The code as parts that tensor cores multiply, as exact as x needs. They all have the value's
// sign, and none is zero but of 0: infinite numbers times a value are infinite.
//
// The table has an entry for each byte, two values side by side, in a bank or two of each lane's
// own, so that no lanes wait for each other: first the first two parts, in the same rows for each
// half of a warp; then, of float32, the third.
template <class Stored>
struct CodeParts {
  static constexpr int COUNT = std::is_same_v<Stored, float> ? 3 : 2;
  static constexpr int ROW = 128, TABLE = 256 * ROW, BYTES = (COUNT - 1) * TABLE;

  const char *first, *third;  // of this lane

  explicit FUSEPORT_DEVICE CodeParts(const char* table)
      : first(table + threadIdx.x % 16 * 8), third(table + TABLE + threadIdx.x % 32 * 4) {}

  // All threads of a block call it, and wait. `scratch` is free again after the next barrier.
  static FUSEPORT_DEVICE void make(const Problem& p, char* table, uint32_t* scratch) {
    const int thread = (int)threadIdx.x;
    if (thread < 16) of_value(VALUES[p.quant_type][thread], scratch + thread * COUNT);
    __syncthreads();
#pragma unroll 1  // what was asked for before is in registers
    for (int i = thread; i < TABLE / 8; i += (int)blockDim.x)
      *(Pack<uint32_t, 2>*)(table + i * 8) = {pair(scratch, i / 16, 0), pair(scratch, i / 16, 1)};
    if constexpr (COUNT == 3)
#pragma unroll 1
      for (int i = thread; i < TABLE / 4; i += (int)blockDim.x)
        *(uint32_t*)(table + TABLE + i * 4) = pair(scratch, i / 32, 2);
    __syncthreads();
  }

  // The first two parts of a word's byte, two values in each of two registers.
  FUSEPORT_DEVICE void look_up(uint32_t word, int byte, uint32_t* to) const {
    const auto two = *(const Pack<uint32_t, 2>*)(first + place(word, byte));
    to[0] = two.at[0];
    to[1] = two.at[1];
  }

  FUSEPORT_DEVICE uint32_t look_up_third(uint32_t word, int byte) const {
    return *(const uint32_t*)(third + place(word, byte));
  }

 private:
  static FUSEPORT_DEVICE uint32_t place(uint32_t word, int byte) {
    return (byte == 0 ? word * ROW : word >> (8 * byte - 7)) & 0xff * ROW;
  }

  static FUSEPORT_DEVICE void of_value(float value, uint32_t* parts) {
    constexpr int BEYOND = std::is_same_v<Stored, Half> ? 13 : 16;  // bits of a float
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      float part = value;  // or what is next to it towards 0, cut off, so that something is left
      if (i < COUNT - 1 && value != 0)
        part = bits_to_float((float_to_bits(value) - 1) >> BEYOND << BEYOND);
      parts[i] = std::is_same_v<Stored, Half> ? float_to_half(part) : float_to_bfloat16(part);
      value -= part;
    }
  }

  static FUSEPORT_DEVICE uint32_t pair(const uint32_t* parts, int byte, int part) {
    return parts[(byte >> 4) * COUNT + part] | parts[(byte & 15) * COUNT + part] << 16;
  }
};

}  // namespace fuseport::nf4_linear::cuda
