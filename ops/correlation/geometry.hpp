// What the inputs must be: the checks of shapes.py, in their order, with their messages.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "correlation/kernel.hpp"

namespace fuseport::correlation {

using Sizes = std::vector<int64_t>;

constexpr int64_t LIMIT = (int64_t(1) << 31) - 1;

constexpr const char* OPTIONS[] = {
    "kernel_h",  "kernel_w",  "patch_h",    "patch_w",    "stride_h",         "stride_w",
    "padding_h", "padding_w", "dilation_h", "dilation_w", "dilation_patch_h", "dilation_patch_w"};
constexpr size_t COUNT = sizeof OPTIONS / sizeof *OPTIONS;

inline int64_t outputs_of(const Axis& a) {
  const int64_t last = a.size + 2 * a.padding - a.dilation * (a.kernel - 1) - 1;
  return last < 0 ? 0 : last / a.stride + 1;
}

// The problem of inputs that fit each other, without its dtype and pointers. `options` are as OPTIONS
// names them; `look` has sizes(tensor), text(sizes), first(tensor) and like(name, tensor) for what the
// host checks besides, and require(holds, name, expected, got), which throws where something does not
// hold.
template <class Look, class Tensor>
Problem checked(const Look& look, const Tensor& input1, const Tensor& input2,
                const int64_t* options) {
  const auto number = [](int64_t n) { return std::to_string(n); };
  const Sizes image = look.sizes(input1);
  look.require(image.size() == 4, "input1", "(b, c, H, W)", look.text(image));
  look.first(input1);
  look.like("input2", input2);
  const Sizes other = look.sizes(input2);
  if (other != image)
    look.require(false, "input2", "input1's shape = " + look.text(image), look.text(other));
  for (size_t i = 0; i < COUNT; ++i) {
    const bool padding = std::string(OPTIONS[i]).rfind("padding", 0) == 0;
    const int64_t least = padding ? -LIMIT : 1;
    look.require(options[i] >= least, OPTIONS[i], number(least) + " or more", number(options[i]));
    look.require(options[i] <= LIMIT, OPTIONS[i], number(LIMIT) + " or less", number(options[i]));
  }
  Problem p;
  p.batches = image[0];
  p.channels = image[1];
  for (int i = 0; i < 2; ++i) {
    Axis& a = i ? p.across : p.down;
    const int64_t* const o = options + i;
    a = {image[2 + i], 0, o[0], o[2], o[4], o[6], o[8], o[10]};
    a.outputs = outputs_of(a);
  }
  look.require(p.down.outputs >= 1 && p.across.outputs >= 1, "input1",
               "so large that there is an output", look.text({image[2], image[3]}));
  return p;
}

inline Sizes out_sizes(const Problem& p) {
  return {p.batches, p.down.patch, p.across.patch, p.down.outputs, p.across.outputs};
}

template <class Look, class Tensor>
void check_cotangent(const Look& look, const Tensor& dout, const Problem& p) {
  look.like("dout", dout);
  const Sizes got = look.sizes(dout), expected = out_sizes(p);
  if (got != expected)
    look.require(false, "dout", "(b, ph, pw, oh, ow) = " + look.text(expected), look.text(got));
}

}  // namespace fuseport::correlation
