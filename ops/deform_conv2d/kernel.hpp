// What the kernels of the deformable convolution take and give, over raw pointers: the interface
// between kernel.cpp, compiled once per instruction set, and its bindings.
//
// The input is copied first, channels last, since a sample takes all channels of an offset group from
// the same pixels. Then work is cut into units that depend on nothing of each other, as shapes alone
// decide: bits do not depend on threads.
//
// - Forward, a unit is a tile of outputs of a batch entry. For each tap its samples are a matrix,
//   outputs × channels, which is multiplied with the tap's weights.
// - Backward, it is a block of channels. For one batch entry, cotangents of samples give the gradient
//   of these channels of the image, and parts of those of offsets and mask, which are sums over
//   channels; for one tap, samples and cotangents of outputs give the gradient of the weight.
#pragma once

#include <cstdint>

#include "native/dtype.hpp"
#include "native/isa.hpp"
#include "native/schedule.hpp"

namespace fuseport::deform_conv2d {

constexpr int64_t TILE = 64;      // outputs, of one row or several, that are taken together
constexpr int64_t BLOCK = 64;     // channels of a unit of the backward
constexpr int64_t STRIP = 64;     // output channels whose weights lie together
constexpr int64_t PIXELS = 1024;  // of a unit that copies the input
constexpr int64_t A_STEP = 16;    // products that take as long as a step of `threads_for`

struct Options {
  int64_t stride_h = 1, stride_w = 1, padding_h = 0, padding_w = 0, dilation_h = 1, dilation_w = 1;
};

// All tensors are contiguous, and fit each other as geometry.hpp checks it.
struct Problem {
  Dtype dtype = Dtype::float32;
  int64_t batches = 0, channels = 0, height = 0, width = 0, outputs = 0, kernel_h = 1, kernel_w = 1;
  int64_t groups = 1, offset_groups = 1, rows = 0, columns = 0;  // the last two of the output
  Options options;
  const void* input = nullptr;   // (b, c, H, W)
  const void* offset = nullptr;  // (b, 2·G·kh·kw, oh, ow)
  const void* mask = nullptr;    // (b, G·kh·kw, oh, ow), or none
  const void* weight = nullptr;  // (o, c/g, kh, kw)
  const void* bias = nullptr;    // (o,)

  // Inlined always: a copy that is compiled for one instruction set must not serve another.
  FUSEPORT_INLINED int64_t pixels() const { return height * width; }
  FUSEPORT_INLINED int64_t taps() const { return kernel_h * kernel_w; }
  FUSEPORT_INLINED int64_t places() const { return rows * columns; }
  FUSEPORT_INLINED int64_t of_group() const { return channels / groups; }
  FUSEPORT_INLINED int64_t terms() const { return taps() * of_group(); }  // of an output
  FUSEPORT_INLINED int64_t outputs_of_group() const { return outputs / groups; }
  FUSEPORT_INLINED int64_t of_offset_group() const { return channels / offset_groups; }
  FUSEPORT_INLINED bool depthwise() const { return groups == channels && outputs == channels; }
  FUSEPORT_INLINED int64_t real_bytes() const { return dtype == Dtype::float64 ? 8 : 4; }

  // How many times `each` it takes to have `count`.
  FUSEPORT_INLINED static int64_t times(int64_t count, int64_t each) {
    return (count + each - 1) / each;
  }
  // Numbers in a row of so many that are in use: whole vectors of any instruction set.
  FUSEPORT_INLINED int64_t padded(int64_t count) const {
    const int64_t lanes = 64 / real_bytes();
    return times(count, lanes) * lanes;
  }

  // The copy: a row of an offset group's channels for each pixel, and one of zeros for all outside.
  FUSEPORT_INLINED int64_t table_row() const { return padded(of_offset_group()); }
  FUSEPORT_INLINED int64_t table_rows() const { return pixels() + 1; }
  FUSEPORT_INLINED int64_t table_bytes() const {
    return batches * offset_groups * table_rows() * table_row() * real_bytes();
  }
  // The weight: for each group and strip of outputs, a row of these for each tap and channel. That of
  // a depthwise convolution is not copied.
  FUSEPORT_INLINED int64_t strips() const { return times(outputs_of_group(), STRIP); }
  FUSEPORT_INLINED int64_t strip_row() const {
    const int64_t row = padded(outputs_of_group());
    return row < STRIP ? row : STRIP;
  }
  FUSEPORT_INLINED int64_t strip_bytes() const {
    return terms() * strip_row() * real_bytes();
  }
  FUSEPORT_INLINED int64_t weight_bytes() const { return weight_units() * strip_bytes(); }
  // Of each block of channels and tap, what it gives the gradients of dy, of dx and of the mask.
  FUSEPORT_INLINED int64_t blocks_of_offset_group() const { return times(of_offset_group(), BLOCK); }
  FUSEPORT_INLINED int64_t blocks() const { return offset_groups * blocks_of_offset_group(); }
  FUSEPORT_INLINED int64_t part_bytes() const {
    return batches * blocks() * taps() * 3 * places() * real_bytes();
  }

  FUSEPORT_INLINED int64_t tiles() const { return times(places(), TILE); }
  FUSEPORT_INLINED int64_t copy_units() const {
    return batches * offset_groups * times(table_rows(), PIXELS);
  }
  FUSEPORT_INLINED int64_t weight_units() const { return depthwise() ? 0 : groups * strips(); }
  FUSEPORT_INLINED int64_t image_units() const { return batches * blocks(); }
  FUSEPORT_INLINED int64_t filter_units() const { return taps() * blocks(); }
  FUSEPORT_INLINED int64_t backward_units() const {
    return image_units() + filter_units() + outputs;
  }
  FUSEPORT_INLINED int64_t offset_units() const { return batches * offset_groups * taps(); }
  FUSEPORT_INLINED int64_t products() const {
    return batches * places() * taps() * channels * (outputs_of_group() + 8);
  }
};

// Two memories, 64-aligned, that units share: the copy of the input, and of the weight; backward, the
// copy of the input, and parts of gradients.
struct Shared {
  char *table = nullptr, *other = nullptr;
};

struct Forward {
  void* out = nullptr;  // (b, o, oh, ow)
};

struct Backward {
  const void* dout = nullptr;  // (b, o, oh, ow)
  void* dinput = nullptr;      // like what it is the gradient of
  void* doffset = nullptr;
  void* dmask = nullptr;  // where there is a mask
  void* dweight = nullptr;
  void* dbias = nullptr;
};

// The kernels for one instruction set.
struct Kernels {
  int64_t (*forward_scratch)(const Problem&);  // bytes, to be 64-aligned
  int64_t (*backward_scratch)(const Problem&);
  void (*copy_input)(const Problem&, const Shared&, int64_t unit);
  void (*copy_weight)(const Problem&, const Shared&, int64_t unit);
  void (*forward)(const Problem&, const Forward&, const Shared&, int64_t unit, void* scratch);
  void (*backward)(const Problem&, const Backward&, const Shared&, int64_t unit, void* scratch);
  void (*sum_parts)(const Problem&, const Backward&, const Shared&, int64_t unit);
};

FUSEPORT_CHOOSE_KERNELS()

// Runs all units on the threads of `host`, which is as for `for_each_unit`.
template <class Host>
void run(const Host& host, const Problem& p, const Forward& f) {
  const Kernels& k = kernels();
  const auto memory = host.scratch(p.table_bytes() + p.weight_bytes() + 128);
  const Shared shared{aligned(memory.data()), aligned(memory.data()) + p.table_bytes()};
  const int64_t copies = p.copy_units(), numbers = p.batches * p.channels * p.pixels();
  for_each_unit(host, copies + p.weight_units(), numbers / A_STEP, 0, [&](int64_t unit, void*) {
    unit < copies ? k.copy_input(p, shared, unit) : k.copy_weight(p, shared, unit - copies);
  });
  for_each_unit(host, p.batches * p.tiles(), p.products() / A_STEP, k.forward_scratch(p),
                [&](int64_t unit, void* scratch) { k.forward(p, f, shared, unit, scratch); });
}

template <class Host>
void run(const Host& host, const Problem& p, const Backward& b) {
  const Kernels& k = kernels();
  const auto memory = host.scratch(p.table_bytes() + p.part_bytes() + 128);
  const Shared shared{aligned(memory.data()), aligned(memory.data()) + p.table_bytes()};
  const int64_t numbers = p.batches * p.channels * p.pixels();
  for_each_unit(host, p.copy_units(), numbers / A_STEP, 0,
                [&](int64_t unit, void*) { k.copy_input(p, shared, unit); });
  for_each_unit(host, p.backward_units(), 2 * p.products() / A_STEP, k.backward_scratch(p),
                [&](int64_t unit, void* scratch) { k.backward(p, b, shared, unit, scratch); });
  for_each_unit(host, p.offset_units(), 3 * p.offset_units() * p.places() / A_STEP, 0,
                [&](int64_t unit, void*) { k.sum_parts(p, b, shared, unit); });
}

}  // namespace fuseport::deform_conv2d
