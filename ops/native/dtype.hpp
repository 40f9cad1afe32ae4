// The dtypes that kernels know, by names of no host's.
#pragma once

namespace fuseport {

enum class Dtype { float16, bfloat16, float32, float64 };

}  // namespace fuseport
