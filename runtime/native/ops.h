// The operators of the domain elsi.edge.
#pragma once

#include <vector>

#include "op.h"

namespace elsi {

const Op& matmul_blocks();

inline std::vector<const Op*> operators() { return {&matmul_blocks()}; }

}  // namespace elsi
