// The kernels for one instruction set; setup.py gives this file its compiler flags.
#if defined(__x86_64__)
#include "cpu/simd_avx512.h"
#include "cpu/vecmath.h"
#include "cpu/dots_avx2.h"
#include "cpu/lookup_avx512.h"
#include "cpu/record_avx512.h"
// The order matters: the kernels are templates on the vector type above.
#include "cpu/packed_queries.h"
#include "cpu/attend.h"
#include "cpu/picked.h"
#include "cpu/key_dots_avx512.h"
#include "cpu/attend_packed.h"
#include "cpu/attend_latent.h"
#include "cpu/latent_runs.h"
#include "cpu/latent_dots_avx512.h"
#include "cpu/attend_packed_latent.h"
#include "cpu/keep_best_avx512.h"
#include "cpu/retrieve.h"
#include "cpu/compact.h"
#include "cpu/products.h"

namespace edgekv {

const Kernels& kernels_avx512() {
  static const Kernels table = {"avx512", kRowBlock, prepare, encode, encode_run, attend, retrieve, merge, finish, observe, rank_keys, move_keys, move_values,
                                normalise, gate, quantise_row, multiply};
  return table;
}

}  // namespace edgekv

#endif
