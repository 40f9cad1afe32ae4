// Bilinear samples of maps on CUDA: the four pixels around a point, how much of each a sample takes, and
// the sort of samples by those pixels, after which gradients are gathered.
#pragma once

#include "native/cuda_sort.cuh"
#include "native/cuda_vectors.cuh"

namespace fuseport::cuda {

// Corner 2·below + right is one of the upper left, upper right, lower left and lower right pixels.
template <class Real>
struct Bilinear {
  int left = -2, top = -2;        // of the upper left pixel; -2 where no pixel of the four is within
  Real share_x = 0, share_y = 0;  // of the right and the lower pixels

  // At a point in units of pixels, of which the first has its centre at 0. One that is a pixel or more
  // outside, or no number, has no pixel, and no share of the right and the lower ones.
  FUSEPORT_DEVICE void set(Real x, Real y, int width, int height) {
    left = top = -2;
    share_x = share_y = 0;
    if (x > -1 && y > -1 && x < (Real)width && y < (Real)height) {
      share_x = part_of(x, &left);
      share_y = part_of(y, &top);
    }
  }

  FUSEPORT_DEVICE Real share(int corner) const {
    const Real x = corner & 1 ? share_x : 1 - share_x, y = corner & 2 ? share_y : 1 - share_y;
    return x * y;
  }

  // The number of a pixel in the map, whose rows are one after another; -1 if it is outside.
  FUSEPORT_DEVICE int64_t pixel(int corner, int width, int height) const {
    const int column = left + (corner & 1), row = top + (corner >> 1);
    const bool within = column >= 0 && column < width && row >= 0 && row < height;
    return within ? (int64_t)row * width + column : -1;
  }

  // Of what the pixels are: the sample, and its derivatives with respect to x and y.
  FUSEPORT_DEVICE Real sample(const Real (&of)[4]) const {
    const Real upper = (1 - share_x) * of[0] + share_x * of[1];
    const Real lower = (1 - share_x) * of[2] + share_x * of[3];
    return (1 - share_y) * upper + share_y * lower;
  }
  FUSEPORT_DEVICE Real slope_x(const Real (&of)[4]) const {
    return (1 - share_y) * (of[1] - of[0]) + share_y * (of[3] - of[2]);
  }
  FUSEPORT_DEVICE Real slope_y(const Real (&of)[4]) const {
    return (1 - share_x) * (of[2] - of[0]) + share_x * (of[3] - of[1]);
  }

 private:
  static FUSEPORT_DEVICE Real part_of(Real x, int* whole) {
    *whole = (int)x;  // towards 0: -1 < x
    *whole -= x < (Real)*whole;
    return x - (Real)*whole;
  }
};

// The channels of a pixel: V in a row are a thread's, and `lanes` threads side by side have a row, or
// go through it.
struct Deal {
  int lanes = 1;

  Deal(int64_t channels, int each) {
    constexpr int WARP = 32;
    while (lanes < WARP && lanes * each < channels) lanes *= 2;
  }
};

// V numbers of a row from `c` on, as reals; zeros beyond its end, and where there is no row.
template <int V, class Stored>
FUSEPORT_DEVICE void load_channels(const Stored* row, bool there, int64_t c, int64_t channels,
                                   Real<Stored>* to) {
  Pack<Stored, V> pack{};
  if (there && c < channels) pack = *(const Pack<Stored, V>*)(row + c);
  to_reals<V>(pack, to);
}

// The upper left pixel of a sample is its cell: a map of H × W pixels has (H + 1)·(W + 1) of them,
// from one above and to the left of it on. A sample that takes no pixel has this one, after all
// others, also of its lowest bits alone.
constexpr int32_t OUTSIDE = 0x7fffffff;

constexpr int CELL_THREADS = 256;

// For each cell, how many of the sorted samples are of cells before it.
template <class Cell>
__global__ void __launch_bounds__(CELL_THREADS)
    starts_kernel(int64_t count, int64_t last, const Cell* cells, Cell* starts) {
  for (int64_t cell = blockIdx.x * (int64_t)CELL_THREADS + threadIdx.x; cell <= last;
       cell += gridDim.x * (int64_t)CELL_THREADS) {
    int64_t first = 0, end = count;
    while (first < end) {
      const int64_t middle = (first + end) / 2;
      if (cells[middle] < cell) first = middle + 1;
      else end = middle;
    }
    starts[cell] = (Cell)first;
  }
}

// Samples, sorted by cells, in scratch memory: at most so many samples and cells, fewer than OUTSIDE. A
// sort goes back and forth between two arrays.
class Cells {
 public:
  const char* error;  // null, or what CUDA says is wrong

  Cells(int64_t samples, int64_t cells)
      : cells_(cells),
        numbers_(whole(samples * (int64_t)sizeof(int32_t))),
        starts_(whole((cells + 1) * (int64_t)sizeof(int32_t))) {
    for (int64_t left = cells; left > 0; left /= 2) ++bits_;
    error = sort_scratch(samples, bits_, &sort_bytes_);
  }

  int64_t bytes() const { return 4 * numbers_ + starts_ + sort_bytes_; }

  // Sorts `count` samples on a stream, whose cells and numbers put(cells, samples) launches the writing
  // of: those of a cell stay in their order. Then the samples of a cell are `samples` from
  // starts[cell] to starts[cell + 1]. Null, or what went wrong.
  template <class Put>
  const char* sort(int64_t count, void* scratch, void* stream, const Put& put) {
    int32_t* cells[2] = {numbers(scratch, 0), numbers(scratch, 1)};
    int32_t* sorted[2] = {numbers(scratch, 2), numbers(scratch, 3)};
    int32_t* const begins = numbers(scratch, 4);
    const char* failed = put(cells[0], sorted[0]);
    if (!failed)
      failed = sort_pairs(cells, sorted, count, bits_, (char*)begins + starts_, sort_bytes_, stream);
    if (failed) return failed;
    samples = sorted[0];
    starts = begins;
    return launch(starts_kernel<int32_t>, (cells_ + CELL_THREADS) / CELL_THREADS, CELL_THREADS, 0,
                  stream, count, cells_, (const int32_t*)cells[0], begins);
  }

  const int32_t *samples = nullptr, *starts = nullptr;

 private:
  // What comes after is aligned as the memory itself is: that of allocators of devices to 256.
  static int64_t whole(int64_t bytes) { return (bytes + 255) / 256 * 256; }
  int32_t* numbers(void* scratch, int array) const {
    return (int32_t*)((char*)scratch + array * numbers_);
  }

  int64_t cells_, numbers_, starts_, sort_bytes_ = 0;
  int bits_ = 0;  // that tell cells apart
};

}  // namespace fuseport::cuda
