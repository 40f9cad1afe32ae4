// Products of few rows with the weight, or with its transpose, on tensor cores: an index of the
// weight is decoded once for sixteen rows, straight into the registers that they multiply from.
// What takes long is to read and decode the weight; so all warps of a block have the same columns
// of the result, and of the inner dimension groups in turn. What they found is added up in their
// order.
//
// A weight is a value of the code times its block's scale. Tensor cores are given the code alone,
// in parts: W is not rounded to the dtype of x, but the code beside numbers of 16 bits to as many.
#pragma once

#include "nf4_linear/cuda_code.cuh"
#include "native/cuda_stored_products.cuh"

namespace fuseport::nf4_linear::cuda {

// Columns and rows of the result that a block has at once, and its shared memory: the code,
// then what each warp found, (ROWS, LINE).
template <class Stored_, class Parts_, int ACROSS_, int DOWN_, int WARPS_>
struct FewTiling {
  using Stored = Stored_;
  using Parts = Parts_;
  static constexpr int ACROSS = ACROSS_, DOWN = DOWN_;  // tiles of eight
  static constexpr int COLUMNS = ACROSS * 8, ROWS = DOWN * 8;
  static constexpr int WARPS = WARPS_, THREADS = WARPS * WARP;
  static constexpr int LINE = COLUMNS + 4, OF_WARP = ROWS * LINE;  // spread over the banks
  static constexpr int SHARED = Parts::BYTES + WARPS * OF_WARP * (int)sizeof(float);
};

// Tiles of rows of the same columns follow each other: the weight is in L2 for the second. The last
// columns are as many as the others, some of them another block's, too.
template <class Sums>
__global__ void __launch_bounds__(Sums::Tiling::THREADS, Sums::BLOCKS)
    few_kernel(Problem p, Product m) {
  using Tiling = typename Sums::Tiling;
  using Stored = typename Tiling::Stored;
  using Parts = typename Tiling::Parts;
  constexpr int COLUMNS = Tiling::COLUMNS, ROWS = Tiling::ROWS, WARPS = Tiling::WARPS;
  FUSEPORT_SHARED(memory);
  float* const found = (float*)(memory + Parts::BYTES);
  const Parts code(memory);
  const uint32_t warp = threadIdx.x / WARP, columns = (uint32_t)m.columns, rows = (uint32_t)p.rows;
  const uint32_t down = (rows + ROWS - 1) / ROWS, across = (columns + COLUMNS - 1) / COLUMNS;
  for (uint32_t unit = blockIdx.x; unit < down * across * m.parts; unit += gridDim.x) {
    const uint32_t line = unit / down, row = unit % down * ROWS;
    const uint32_t part = line / across, own = line % across * COLUMNS;
    const uint32_t column = own + COLUMNS <= columns ? own : columns - COLUMNS;
    const auto groups = (uint32_t)(m.inner / Sums::GROUP);
    const auto span = (uint32_t)(m.span / Sums::GROUP);
    const uint32_t first = part * span, end = first + span;
    const uint32_t last = end < groups ? end : groups;
    Sums sums(p, m.x, column, row);
    typename Sums::Asked next;
    if (first + warp < last) next = sums.ask(first + warp);
    if (unit == blockIdx.x) Parts::make(p, memory, (uint32_t*)found);  // memory takes longer
    for (uint32_t group = first + warp; group < last; group += WARPS) {
      const auto asked = next;
      if (group + WARPS < last) next = sums.ask(group + WARPS);
      sums.add(code, asked, group);
    }
    __syncthreads();  // the unit before has been read
    sums.store(found + warp * Tiling::OF_WARP);
    __syncthreads();
    for (int i = (int)threadIdx.x; i < ROWS * COLUMNS; i += Tiling::THREADS) {
      const uint32_t r = row + i / COLUMNS, c = column + i % COLUMNS;
      if (r >= rows || c < own) continue;
      const float* const from = found + i / COLUMNS * Tiling::LINE + i % COLUMNS;
      float sum = from[0];
#pragma unroll
      for (int w = 1; w < WARPS; ++w) sum += from[w * Tiling::OF_WARP];
      const int64_t at = (int64_t)(part * rows + r) * columns + c;
      if (m.parts > 1) ((float*)m.sums)[at] = sum;
      else finish<1, Stored>(m, &sum, at, c, 1, false);
    }
  }
}

template <class Tiling>
int64_t few_units(const Problem& p, const Product& m) {
  return (p.rows + Tiling::ROWS - 1) / Tiling::ROWS *
         ((m.columns + Tiling::COLUMNS - 1) / Tiling::COLUMNS);
}

// That the GPU has at once.
template <class Sums>
int64_t few_blocks() {
  return (int64_t)Sums::BLOCKS * multiprocessors();
}

// Sets parts and span, for as many blocks: of so many groups for a warp at the least,
// since two launches take longer than what fewer would gain.
template <class Sums>
void cut_few(const Problem& p, Product& m, int64_t least) {
  using Tiling = typename Sums::Tiling;
  const int64_t groups = m.inner / Sums::GROUP, worth = groups / (Tiling::WARPS * least);
  const int64_t fitting = few_blocks<Sums>() / few_units<Tiling>(p, m);
  const int64_t most = fitting < worth ? fitting : worth;
  const int64_t span = most > 1 ? (groups + most - 1) / most : groups;
  m.span = span * Sums::GROUP;
  m.parts = (groups + span - 1) / span;
}

inline int64_t scratch_of(const Problem& p, const Product& m) {
  return m.parts > 1 ? m.parts * p.rows * m.columns * (int64_t)sizeof(float) : 0;
}

template <class Sums>
const char* launch_few(const Problem& p, const Product& m, void* stream) {
  using Tiling = typename Sums::Tiling;
  const int64_t units = few_units<Tiling>(p, m) * m.parts, blocks = few_blocks<Sums>();
  const char* const error = launch(few_kernel<Sums>, units < blocks ? units : blocks,
                                   Tiling::THREADS, Tiling::SHARED, stream, p, m);
  if (error || m.parts == 1) return error;
  return run_add_parts<typename Tiling::Stored>(p, m, stream);
}

// Calls call(Sums*, m) with the product cut into parts.
template <class Sums, class Call>
auto with_cut(const Problem& p, Product m, int64_t least, const Call& call) {
  cut_few<Sums>(p, m, least);
  return call((Sums*)nullptr, m);
}

// Calls call with a number of the problem's dtype, which is not float64.
template <class Call>
auto with_few_dtype(const Problem& p, const Call& call) {
  if (p.dtype == Dtype::float16) return call(Half{});
  return p.dtype == Dtype::bfloat16 ? call(BFloat16{}) : call(float{});
}

constexpr int64_t MOST_SIDE = 1 << 24, MOST_COLUMNS = 1 << 30;  // some indices are of 32 bits

}  // namespace fuseport::nf4_linear::cuda
