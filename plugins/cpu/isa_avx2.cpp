#include "cpu/kernels.h"
namespace edgekv {
const Kernels& kernels_avx2() { static const Kernels k = {"avx2", 1, nullptr, nullptr, nullptr, nullptr}; return k; }
}
