// Long sums of products on tensor cores, whose own sums are not rounded but cut off: towards 0, and
// each time they are added to. What is added up there is therefore short, and apart; so that errors
// of a long sum do not all go one way.
#pragma once

#include "native/cuda_parts.cuh"

namespace fuseport::cuda {

// sum += a·b, as add_half has it. Of numbers of 16 bits they are added up on tensor cores: what is
// cut off there is far less than the inputs themselves are rounded by.
template <class Stored, int MOST = MOST_PARTS, int OF_A, int OF_B>
FUSEPORT_DEVICE void add_half_apart(float (&sum)[4], const uint32_t (&a)[OF_A][4],
                                    const uint32_t (&b)[OF_B][4], int first) {
  if constexpr (std::is_same_v<Stored, float>) {
    float own[4] = {};
    add_half<MOST>(own, a, b, first);
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] += own[i];
  } else {
    add_half<MOST>(sum, a, b, first);
  }
}

// The same, as add_products has it.
template <class Stored, int MOST = MOST_PARTS, int OF_A, int OF_B>
FUSEPORT_DEVICE void add_apart(float (&sum)[2][4], const uint32_t (&a)[OF_A][4],
                               const uint32_t (&b)[OF_B][4]) {
  add_half_apart<Stored, MOST>(sum[0], a, b, 0);
  add_half_apart<Stored, MOST>(sum[1], a, b, 2);
}

}  // namespace fuseport::cuda
