#pragma once
#include "ort/ort_abi.h"

namespace edgekv::ort {

// The op, valid for the life of the process.
const CustomOp* quantised_matmul();

}  // namespace edgekv::ort
