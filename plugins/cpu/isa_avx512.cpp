#include "cpu/kernels.h"
namespace edgekv {
const Kernels& kernels_avx512() { static const Kernels k = {"avx512", 1, nullptr, nullptr, nullptr, nullptr}; return k; }
}
