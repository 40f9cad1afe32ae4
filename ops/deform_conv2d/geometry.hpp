// What the inputs must be: the checks of shapes.py, in their order, with their messages.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "deform_conv2d/kernel.hpp"

namespace fuseport::deform_conv2d {

using Sizes = std::vector<int64_t>;

constexpr int64_t LIMIT = (int64_t(1) << 31) - 1;  // kernels count pixels in 32 bits

inline int64_t outputs_of(int64_t size, int64_t padding, int64_t dilation, int64_t taps,
                          int64_t stride) {
  const int64_t last = size + 2 * padding - dilation * (taps - 1) - 1;
  return last < 0 ? 0 : last / stride + 1;
}

// The sizes of inputs that fit each other. Of a host's tensors, `mask` is null where there is none;
// `look` has sizes(tensor), text(sizes), like(name, tensor) for what the host checks besides, and
// require(holds, name, expected, got), which throws where something does not hold.
template <class Look, class Tensor>
Problem checked(const Look& look, const Tensor& input, const Tensor& offset, const Tensor* mask,
                const Tensor& weight, const Tensor& bias, const Options& options) {
  const auto number = [](int64_t n) { return std::to_string(n); };
  const auto shape = [&](const char* name, const Tensor& t, const char* meaning,
                         const Sizes& expected) {
    const Sizes got = look.sizes(t);
    if (got != expected)
      look.require(false, name, meaning + (" = " + look.text(expected)), look.text(got));
  };
  const auto option = [&](const char* name, int64_t value, int64_t least) {
    look.require(value >= least, name, number(least) + " or more", number(value));
    look.require(value <= LIMIT, name, "2^31 - 1 or less", number(value));
  };

  const Sizes image = look.sizes(input);
  look.require(image.size() == 4, "input", "(b, c, H, W)", look.text(image));
  look.first(input);
  option("stride_h", options.stride_h, 1);
  option("stride_w", options.stride_w, 1);
  option("padding_h", options.padding_h, 0);
  option("padding_w", options.padding_w, 0);
  option("dilation_h", options.dilation_h, 1);
  option("dilation_w", options.dilation_w, 1);
  Problem p;
  p.options = options;
  p.batches = image[0];
  p.channels = image[1];
  p.height = image[2];
  p.width = image[3];

  look.like("weight", weight);
  const Sizes filter = look.sizes(weight);
  look.require(filter.size() == 4, "weight", "(o, c/g, kh, kw)", look.text(filter));
  p.outputs = filter[0];
  p.kernel_h = filter[2];
  p.kernel_w = filter[3];
  look.require(p.kernel_h >= 1 && p.kernel_w >= 1, "weight", "of kh and kw 1 or more",
               look.text({p.kernel_h, p.kernel_w}));
  look.require(filter[1] >= 1 && p.channels >= 1 && p.channels % filter[1] == 0, "weight",
               "of groups that divide " + number(p.channels) + " channels", number(filter[1]));
  p.groups = p.channels / filter[1];
  look.require(p.outputs % p.groups == 0, "weight",
               "of channels that " + number(p.groups) + " groups divide", number(p.outputs));
  look.like("bias", bias);
  shape("bias", bias, "(o,)", {p.outputs});

  p.rows = outputs_of(p.height, options.padding_h, options.dilation_h, p.kernel_h,
                      options.stride_h);
  p.columns = outputs_of(p.width, options.padding_w, options.dilation_w, p.kernel_w,
                         options.stride_w);
  look.require(p.rows >= 1 && p.columns >= 1, "input", "so large that there is an output",
               look.text({p.height, p.width}));
  look.like("offset", offset);
  const Sizes offsets = look.sizes(offset);
  look.require(offsets.size() == 4, "offset", "(b, 2*G*kh*kw, oh, ow)", look.text(offsets));
  const int64_t parts = offsets[1], taps = p.taps();
  look.require(parts >= 1 && parts % (2 * taps) == 0, "offset",
               "of a multiple of " + number(2 * taps) + " channels", number(parts));
  p.offset_groups = parts / (2 * taps);
  look.require(p.channels % p.offset_groups == 0, "offset",
               "of offset groups that divide " + number(p.channels) + " channels",
               number(p.offset_groups));
  shape("offset", offset, "(b, 2*G*kh*kw, oh, ow)", {p.batches, parts, p.rows, p.columns});
  if (mask) {
    look.like("mask", *mask);
    shape("mask", *mask, "(b, G*kh*kw, oh, ow)",
          {p.batches, p.offset_groups * taps, p.rows, p.columns});
  }
  look.require(p.width == 0 || p.height <= LIMIT / p.width, "input", "of at most 2^31 - 1 pixels",
               look.text({p.height, p.width}));
  return p;
}

template <class Look, class Tensor>
void check_cotangent(const Look& look, const Tensor& dout, const Problem& p) {
  look.like("dout", dout);
  const Sizes expected{p.batches, p.outputs, p.rows, p.columns}, got = look.sizes(dout);
  if (got != expected)
    look.require(false, "dout", "(b, o, oh, ow) = " + look.text(expected), look.text(got));
}

}  // namespace fuseport::deform_conv2d
