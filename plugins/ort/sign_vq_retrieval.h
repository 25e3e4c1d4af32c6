#pragma once
#include "ort/ort_abi.h"

namespace edgekv::ort {

const CustomOp* sign_vq_retrieval();

}  // namespace edgekv::ort
