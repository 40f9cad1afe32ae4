// The walk back over chunks on CUDA, on tensor cores: cotangents of values, and of the states after
// chunks, which gradients of other inputs are made of. With the names of cuda_chunks.cuh, where D is
// the cotangent of the state after a chunk, and du_t and w_t = β_t du_t, the gradient of v_t, are
// those of reference.py:
//
//     R = diag(exp(c_T - c)) K D + Pᵀ dout          W = Nᵀ diag(β) R, since (1 + Lᵀ diag(β)) du = R
//     D before the chunk = exp(c_T) D + Σ exp(c_t) (scale·q_t dout_tᵀ - k_t w_tᵀ)
//
// Blocks, warps and lanes have of D what they have of S in the walk forth. Sums of products are made
// apart for all dtypes: gradients of states, decays and rates are float32, and of one step's are sums
// over all later ones, where tensor cores' errors, which go one way, do not cancel.
#pragma once

#include "gated_delta_rule/cuda_forward.cuh"

namespace fuseport::gated_delta_rule::cuda {

// sums += from·m, where m is lower triangular, and of `from` get(tile, parts) gives a tile in parts.
template <int COUNT, class Get>
FUSEPORT_DEVICE void add_steps_back(Sums& sums, const float (*m)[TILE_SIZE], const Get& get) {
#pragma unroll
  for (int j = 0; j < TILES; ++j) {
    uint32_t of_steps[COUNT][4];
    get(j, of_steps);
#pragma unroll
    for (int i = 0; i <= j; ++i) {
      uint32_t of_m[3][4];
      load_parts<true, Four::down>(of_m, m[tile_of(j, i)], TILE_ROW);
      add_apart<float>(sums[i], of_steps, of_m);
    }
  }
}

// What the walk leaves for gradients: cotangents of states after chunks, (b, H, span, K, V), and
// those of values, (b, l, H, V), which are dv where that is float32.
struct Left {
  float *dstates, *dvalues;
};

// N: keys, at most. From `end` on, the cotangent of the state after the span, which may be
// dinitial_state. V is the place of dout, and then of dv.
template <class Stored, int N>
__global__ void __launch_bounds__(MOST_WALK)
    chunks_back_kernel(Problem p, Span span, const Prepared* all, const float* end, Backward to,
                       Left left) {
  using Tiles = WalkTiles<Stored, N>;
  constexpr int COUNT = PARTS<Stored>, ROW = Tiles::ROW, V_ROW = Tiles::V_ROW;
  FUSEPORT_SHARED(memory);
  Tiles& tiles = *(Tiles*)memory;
  const int lane = (int)threadIdx.x % 32, beside = (int)threadIdx.x / 32 * TILE, g = lane / 4;
  const int width = (int)blockDim.x / 32 * TILE;
  const int64_t units = p.batches * p.heads * blocks_of(p, width);
  for (int64_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const Place place(p, width, unit);
    const int64_t first = (place.batch * p.heads + place.head) * span.count;
    const auto bring_matrices = [&](int64_t i) {
      bring_part<Matrices>(all[first + i], tiles.prepared);
    };
    const auto bring_rest = [&](int64_t i) {
      const int64_t from = (span.first + i) * T, steps = p.length - from;
      bring_steps<T, N>(p.k, place.batch, from, place.group, 0, steps, p.keys, tiles.K);
      bring_steps<T, N>(p.q, place.batch, from, place.group, 0, steps, p.keys, tiles.Q);
      bring_part<Factors>(all[first + i], tiles.prepared);
    };
    const auto bring_dout = [&](int64_t i) {
      const int64_t from = (span.first + i) * T;
      bring_steps<T, MOST_COLUMNS>(to.dout, place.batch, from, place.head, place.first,
                                   p.length - from, place.count, tiles.V);
    };
    float dstate[N / TILE][2][4] = {};
    const auto each = [&](const auto& visit) { each_of_state<N>(p, place, beside, dstate, visit); };
    each([&](float& d, int64_t at) { d = end[place.state + at]; });
    __syncthreads();  // the unit before has read all
    bring_matrices(span.count - 1);
    bring_rest(span.count - 1);
    bring_dout(span.count - 1);
    for (int64_t chunk = span.count - 1; chunk >= 0; --chunk) {
      const Prepared& of = tiles.prepared;
      const int64_t from = (span.first + chunk) * T;
      float* const kept = left.dstates + (first + chunk) * p.keys * p.values + place.first;
      each([&](float d, int64_t at) { kept[at] = d; });
      wait_for_copies();
      __syncthreads();
      Sums sums = {}, dvalues = {};
#pragma unroll
      for (int k = 0; k < N / TILE; ++k) {
        uint32_t of_state[3][4];
        cut_tile(dstate[k], of_state);
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
          uint32_t keys[COUNT][4];
          load_parts<false, Four::across>(keys, tiles.K + (i * ROW + k) * TILE, ROW);
          add_apart<float>(sums[i], of_state, keys);
        }
      }
      each_step(sums, [&](float& sum, int t) { sum *= of.left[t]; });
      const Stored* const dout = tiles.V + beside;
      add_steps_back<COUNT>(sums, of.P, [&](int i, uint32_t(&parts)[COUNT][4]) {
        load_parts<true, Four::across>(parts, dout + i * TILE * V_ROW, V_ROW);
      });
      each_step(sums, [&](float& sum, int t) { sum *= of.rate[t]; });
      add_steps_back<3>(dvalues, of.N, [&](int i, uint32_t(&parts)[3][4]) {
        cut_tile(sums[i], parts);
      });
      const bool more = chunk > 0;
      __syncthreads();
      if (more) bring_matrices(chunk - 1);
      const float scale = (float)p.scale, kept_by = of.kept[2];
      const auto add = [&](const uint32_t(&of_steps)[3][4], const Stored* steps) {
#pragma unroll
        for (int k = 0; k < N / TILE; ++k) {
          uint32_t some[COUNT][4];
          load_parts<true, Four::down>(some, steps + k * TILE, ROW);
          add_apart<float>(dstate[k], of_steps, some);
        }
      };
#pragma unroll
      for (int k = 0; k < N / 2; ++k) dstate[k / 8][k / 4 % 2][k % 4] *= kept_by;
#pragma unroll
      for (int i = 0; i < TILES; ++i) {
        float pairs[4][2], of_out[2][4], of_values[2][4];
        uint32_t parts[3][4];
        load_pairs<true, Four::across>(pairs, dout + i * TILE * V_ROW, V_ROW);
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          const float outer = of.outer[i * TILE + n / 4 * 8 + lane % 4 * 2 + n % 2];
          of_out[n / 4][n % 4] = scale * outer * pairs[n / 2][n % 2];
          of_values[n / 4][n % 4] = -outer * dvalues[i][n / 4][n % 4];
        }
        cut_tile(of_out, parts);
        add(parts, tiles.Q + i * TILE * ROW);
        cut_tile(of_values, parts);
        add(parts, tiles.K + i * TILE * ROW);
      }
      const int64_t step = p.heads * p.values;
      float* const to_values = left.dvalues + place.row(p, from) * p.values + place.first;
      int n = 0;
      each_step(dvalues, [&](float& sum, int t) {
        const int column = beside + g + n++ / 2 % 2 * 8;
        if (column < place.count && from + t < p.length) to_values[t * step + column] = sum;
        if constexpr (!std::is_same_v<Stored, float>) from_real(sum, tiles.V + t * V_ROW + column);
      });
      if (!more && std::is_same_v<Stored, float>) continue;
      __syncthreads();
      if (more) bring_rest(chunk - 1);
      if constexpr (!std::is_same_v<Stored, float>) {
        write_steps(p, tiles.V, V_ROW, place.batch, from, place.head, place.first, place.count,
                    (Stored*)to.dv);
        __syncthreads();
      }
      if (more) bring_dout(chunk - 1);
    }
    float* const start = (float*)to.dinitial_state;
    each([&](float d, int64_t at) { start[place.state + at] = d; });
  }
}

template <class Stored, int N>
const char* run_chunks_back(const Problem& p, const Span& span, const Prepared* prepared,
                            const Backward& to, const Left& left, void* stream) {
  const bool last = span.first + span.count == chunks_of(p);
  const auto* const end = (const float*)(last ? to.dfinal_state : to.dinitial_state);
  return launch(chunks_back_kernel<Stored, N>, walk_blocks(p), walk_threads(p),
                sizeof(WalkTiles<Stored, N>), stream, p, span, prepared, end, to, left);
}

}  // namespace fuseport::gated_delta_rule::cuda
