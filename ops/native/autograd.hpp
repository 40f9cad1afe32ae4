// Gradients of operators by other operators, wired by the names in their schemas.
#pragma once

#include <torch/library.h>

namespace fuseport {

// Registers autograd of `name` by calling `gradient`, for the key Autograd of `m`: an argument
// d<output> of that is the cotangent of an output, any other one an input or output of `name`, and a
// result d<input> is the gradient of an input. Outputs without a cotangent there have no gradient.
// `gradient` itself runs as it is, and refuses when it is differentiated.
//
// Autograd sees operators only, so that traces hold them whole and fakes stand in for them.
void differentiated_by(torch::Library& m, const char* name, const char* gradient);

// Has an operator run as it is, and refuse when it is differentiated.
void undifferentiated(torch::Library& m, const char* name);

}  // namespace fuseport
