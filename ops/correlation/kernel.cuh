// Correlation on CUDA. A warp's lanes are pixels in a row of an image, or of several where rows are
// short, so that what they load lies together.
#pragma once

#include "correlation/kernel.hpp"
#include "native/cuda.cuh"
#include "native/cuda_vectors.cuh"

namespace fuseport::correlation::cuda {

using namespace fuseport::cuda;

constexpr int THREADS = 128, LANES = 32, WARPS = THREADS / LANES;
constexpr int ROWS = 4, COLUMNS = 4;  // displacements of a thread, forward
constexpr int CHANNELS_AT_ONCE = 8;   // backward

FUSEPORT_DEVICE int64_t times(int64_t count, int64_t each) { return (count + each - 1) / each; }
FUSEPORT_DEVICE bool within(int64_t i, int64_t size) { return i >= 0 && i < size; }

// Calls work(unit, lane) for the units of each warp.
template <class Work>
FUSEPORT_DEVICE void for_each_unit_of_warp(int64_t units, const Work& work) {
  for (int64_t unit = blockIdx.x * (int64_t)WARPS + threadIdx.x / LANES; unit < units;
       unit += gridDim.x * (int64_t)WARPS)
    work(unit, (int64_t)threadIdx.x % LANES);
}

// Calls work(i) for the numbers below `count` of each thread.
template <class Work>
FUSEPORT_DEVICE void for_each_number(int64_t count, const Work& work) {
  for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < count;
       i += gridDim.x * (int64_t)THREADS)
    work(i);
}

// How the forward pass is cut: lanes are pixels of the second image's rows and places of columns.
struct Cut {
  int64_t lanes, row_blocks, column_blocks, units;

  __host__ FUSEPORT_DEVICE Cut(const Problem& p, const Grid& across)
      : lanes((p.down.size * across.count + LANES - 1) / LANES),
        row_blocks((p.down.patch + ROWS - 1) / ROWS),
        column_blocks((p.across.patch + COLUMNS - 1) / COLUMNS),
        units(p.batches * lanes * row_blocks * column_blocks) {}
};

// The products of all pairs of pixels. What has no pair is not written.
template <class Stored, class Target>
__global__ void __launch_bounds__(THREADS) products_kernel(Problem p, Target* out) {
  using Real = cuda::Real<Stored>;
  const Grid down(p.down, p.windows()), across(p.across, p.windows());
  const Cut cut(p, across);
  const int64_t pixels = p.pixels(), plane = down.count * across.count;
  for_each_unit_of_warp(cut.units, [&](int64_t unit, int64_t lane) {
    const int64_t first_j = unit % cut.column_blocks * COLUMNS;
    unit /= cut.column_blocks;
    const int64_t first_i = unit % cut.row_blocks * ROWS;
    unit /= cut.row_blocks;
    const int64_t at = unit % cut.lanes * LANES + lane, batch = unit / cut.lanes;
    const int64_t row = at / across.count, x = at % across.count;
    const int64_t column = x * across.stride - across.padding;
    if (row >= p.down.size || !within(column, p.across.size)) return;

    int64_t here[ROWS], place[ROWS], there[COLUMNS];  // -1 where there is none
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const int64_t pixel = row - down.offset(first_i + r);
      place[r] = first_i + r < down.patch && within(pixel, down.size) ? down.place(pixel) : -1;
      here[r] = pixel * p.across.size + column;
    }
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
      const int64_t pixel = column + across.offset(first_j + j);
      const bool known = first_j + j < across.patch && within(pixel, across.size);
      there[j] = known ? row * p.across.size + pixel : -1;
    }
    const auto* one = (const Stored*)p.input1 + batch * p.channels * pixels;
    const auto* other = (const Stored*)p.input2 + batch * p.channels * pixels;
    Real sums[ROWS][COLUMNS] = {};
    for (int64_t c = 0; c < p.channels; ++c, one += pixels, other += pixels) {
      Real left[ROWS], right[COLUMNS];
#pragma unroll
      for (int r = 0; r < ROWS; ++r) left[r] = place[r] >= 0 ? to_real(one[here[r]]) : (Real)0;
#pragma unroll
      for (int j = 0; j < COLUMNS; ++j)
        right[j] = there[j] >= 0 ? to_real(other[there[j]]) : (Real)0;
#pragma unroll
      for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) sums[r][j] += left[r] * right[j];
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
      for (int j = 0; j < COLUMNS; ++j)
        if (place[r] >= 0 && there[j] >= 0) {
          const int64_t i = batch * down.patch + first_i + r;
          from_real(sums[r][j], out + (i * across.patch + first_j + j) * plane +
                                    place[r] * across.count + x);
        }
  });
}

// Outputs as sums of a volume over windows.
template <class Stored>
__global__ void __launch_bounds__(THREADS)
    sum_windows_kernel(Problem p, Forward f, const Real<Stored>* volume) {
  const Axis &down = p.down, &across = p.across;
  const int64_t plane = down.outputs * across.outputs;
  for_each_number(p.batches * p.displacements() * plane, [&](int64_t i) {
    const auto* const from = volume + i / plane * p.pixels();
    const int64_t y = i % plane / across.outputs * down.stride - down.padding;
    const int64_t x = i % across.outputs * across.stride - across.padding;
    Real<Stored> sum = 0;
    for (int64_t u = 0; u < down.kernel; ++u) {
      const int64_t row = y + u * down.dilation;
      if (!within(row, down.size)) continue;
      for (int64_t v = 0; v < across.kernel; ++v) {
        const int64_t column = x + v * across.dilation;
        if (within(column, across.size)) sum += from[row * across.size + column];
      }
    }
    from_real(sum, (Stored*)f.out + i);
  });
}

// The output whose window has a pixel at a tap, or -1.
FUSEPORT_DEVICE int64_t source(const Axis& a, int64_t pixel, int64_t tap) {
  const int64_t from = pixel + a.padding - tap * a.dilation;
  return from >= 0 && from % a.stride == 0 && from / a.stride < a.outputs ? from / a.stride : -1;
}

// And what cotangents of outputs are for the pixels of windows; which rows and columns are in one.
template <class Stored>
__global__ void __launch_bounds__(THREADS)
    spread_kernel(Problem p, Backward b, Real<Stored>* volume, char* covered) {
  const Axis &down = p.down, &across = p.across;
  const int64_t plane = down.outputs * across.outputs;
  for_each_number(p.batches * p.displacements() * p.pixels(), [&](int64_t i) {
    const auto* const from = (const Stored*)b.dout + i / p.pixels() * plane;
    const int64_t row = i % p.pixels() / across.size, column = i % across.size;
    Real<Stored> sum = 0;
    for (int64_t u = 0; u < down.kernel; ++u) {
      const int64_t y = source(down, row, u);
      if (y < 0) continue;
      for (int64_t v = 0; v < across.kernel; ++v) {
        const int64_t x = source(across, column, v);
        if (x >= 0) sum += to_real(from[y * across.outputs + x]);
      }
    }
    volume[i] = sum;
  });
  for_each_number(down.size + across.size, [&](int64_t i) {
    covered[i] = i < down.size ? down.covered(i) : across.covered(i - down.size);
  });
}

// The gradient of two pixels of an image and some channels; SECOND is of the second image.
template <class Stored, class Source, bool SECOND>
FUSEPORT_DEVICE void gradient_of(const Problem& p, const Backward& b, const Source* dout,
                                 const char* covered, int64_t batch, int64_t pair, int64_t column,
                                 int64_t channel) {
  using Real = cuda::Real<Stored>;
  const Grid down(p.down, p.windows()), across(p.across, p.windows());
  const Pairs pairs(down);
  const int64_t pixels = p.pixels(), width = p.across.size, plane = down.count * across.count;
  const int64_t row[2] = {pairs.row(pair), pairs.row(pair) + pairs.step};
  const bool two = pairs.step > 0 && row[1] < down.size;
  const int64_t apart = pairs.step / down.step;
  const int64_t left = p.channels - channel;
  const auto* const other =
      (const Stored*)(SECOND ? p.input1 : p.input2) + (batch * p.channels + channel) * pixels;
  dout += batch * p.displacements() * plane;

  Real sums[2][CHANNELS_AT_ONCE] = {};
  // Displacements i of the first row; the second row sees the same row of the other image by i - apart,
  // or, where the other is the first image, by i + apart.
  const int64_t begin = two && SECOND ? -apart : 0;
  const int64_t end = down.patch + (two && !SECOND ? apart : 0);
  for (int64_t i = begin; i < end; ++i) {
    const int64_t shift = down.offset(i);
    const int64_t seen = SECOND ? row[0] - shift : row[0] + shift;
    if (!within(seen, down.size) || (SECOND && covered && !covered[seen])) continue;
    const int64_t shifts[2] = {i, SECOND ? i + apart : i - apart};
    int64_t from[2];  // the row of cotangents, or -1
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int64_t place = down.place(SECOND ? seen : row[r]);
      const bool known = (r == 0 || two) && within(shifts[r], down.patch) && place >= 0;
      from[r] = known ? shifts[r] * across.patch * plane + place * across.count : -1;
    }
    if (from[0] < 0 && from[1] < 0) continue;
    Real terms[2][CHANNELS_AT_ONCE] = {};
    for (int64_t j = 0; j < across.patch; ++j) {
      const int64_t moved = SECOND ? column - across.offset(j) : column + across.offset(j);
      if (!within(moved, width) || (SECOND && covered && !covered[down.size + moved])) continue;
      const int64_t x = across.place(SECOND ? moved : column);
      if (x < 0) continue;
      const auto* const pixel = other + seen * width + moved;
      Real value[CHANNELS_AT_ONCE];
#pragma unroll
      for (int c = 0; c < CHANNELS_AT_ONCE; ++c)
        value[c] = c < left ? to_real(pixel[c * pixels]) : (Real)0;
#pragma unroll
      for (int r = 0; r < 2; ++r)
        if (from[r] >= 0) {
          const Real g = to_real(dout[from[r] + j * plane + x]);
#pragma unroll
          for (int c = 0; c < CHANNELS_AT_ONCE; ++c) terms[r][c] += g * value[c];
        }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int c = 0; c < CHANNELS_AT_ONCE; ++c) sums[r][c] += terms[r][c];
  }
  auto* const to =
      (Stored*)(SECOND ? b.dinput2 : b.dinput1) + (batch * p.channels + channel) * pixels + column;
#pragma unroll
  for (int r = 0; r < 2; ++r)
    if (r == 0 || two) {
      const bool none = !SECOND && covered && !(covered[row[r]] && covered[down.size + column]);
#pragma unroll
      for (int c = 0; c < CHANNELS_AT_ONCE; ++c)
        if (c < left) from_real(none ? (Real)0 : sums[r][c], to + c * pixels + row[r] * width);
    }
}

// Both gradients; `covered` is null where windows are single pixels.
template <class Stored, class Source>
__global__ void __launch_bounds__(THREADS)
    gradients_kernel(Problem p, Backward b, const Source* dout, const char* covered,
                     int64_t pairs) {
  const int64_t blocks = times(p.channels, CHANNELS_AT_ONCE);
  const int64_t lanes = times(pairs * p.across.size, LANES);
  for_each_unit_of_warp(2 * p.batches * lanes * blocks, [&](int64_t unit, int64_t lane) {
    const int64_t channel = unit % blocks * CHANNELS_AT_ONCE;
    unit /= blocks;
    const int64_t at = unit % lanes * LANES + lane, image = unit / lanes;
    const int64_t pair = at / p.across.size, column = at % p.across.size;
    if (pair >= pairs) return;
    if (image < p.batches)
      gradient_of<Stored, Source, false>(p, b, dout, covered, image, pair, column, channel);
    else
      gradient_of<Stored, Source, true>(p, b, dout, covered, image - p.batches, pair, column,
                                        channel);
  });
}

inline int64_t volume_bytes(const Problem& p) {
  return p.batches * p.displacements() * p.pixels() * p.real_bytes();
}

template <class... Parameters, class... Arguments>
const char* launch_numbers(void (*kernel)(Parameters...), int64_t count, void* stream,
                           const Arguments&... arguments) {
  if (count == 0) return nullptr;
  return launch(kernel, (count + THREADS - 1) / THREADS, THREADS, 0, stream, arguments...);
}

template <class... Parameters, class... Arguments>
const char* launch_warps(void (*kernel)(Parameters...), int64_t units, void* stream,
                         const Arguments&... arguments) {
  return launch_numbers(kernel, units * LANES, stream, arguments...);
}

inline const char* run_forward(const Problem& p, const Forward& f, void* scratch, void* stream) {
  const int64_t outputs =
      p.batches * p.displacements() * p.down.outputs * p.across.outputs;
  if (outputs == 0) return nullptr;
  const Cut cut(p, Grid(p.across, p.windows()));
  return with_dtype(p.dtype, [&](auto stored) -> const char* {
    using Stored = decltype(stored);
    using Real = cuda::Real<Stored>;
    if (!p.windows()) {
      const int64_t bytes = outputs * (int64_t)sizeof(Stored);
      if (const char* error = set_to_zero(f.out, bytes, stream)) return error;
      return launch_warps(products_kernel<Stored, Stored>, cut.units, stream, p, (Stored*)f.out);
    }
    auto* const volume = (Real*)scratch;
    if (volume_bytes(p) > 0)
      if (const char* error = set_to_zero(volume, volume_bytes(p), stream)) return error;
    const char* error =
        launch_warps(products_kernel<Stored, Real>, cut.units, stream, p, volume);
    if (error) return error;
    return launch_numbers(sum_windows_kernel<Stored>, outputs, stream, p, f,
                          (const Real*)volume);
  });
}

inline const char* run_backward(const Problem& p, const Backward& b, void* scratch, void* stream) {
  const int64_t pairs = Pairs(Grid(p.down, p.windows())).count();
  const int64_t lanes = (pairs * p.across.size + LANES - 1) / LANES;
  const int64_t blocks = (p.channels + CHANNELS_AT_ONCE - 1) / CHANNELS_AT_ONCE;
  const int64_t units = 2 * p.batches * lanes * blocks;
  if (units == 0) return nullptr;
  return with_dtype(p.dtype, [&](auto stored) -> const char* {
    using Stored = decltype(stored);
    using Real = cuda::Real<Stored>;
    if (!p.windows())
      return launch_warps(gradients_kernel<Stored, Stored>, units, stream, p, b,
                          (const Stored*)b.dout, (const char*)nullptr, pairs);
    auto* const volume = (Real*)scratch;
    auto* const covered = (char*)scratch + volume_bytes(p);
    const char* error =
        launch_numbers(spread_kernel<Stored>, p.batches * p.displacements() * p.pixels(), stream,
                       p, b, volume, covered);
    if (error) return error;
    return launch_warps(gradients_kernel<Stored, Real>, units, stream, p, b, (const Real*)volume,
                        (const char*)covered, pairs);
  });
}

}  // namespace fuseport::correlation::cuda
