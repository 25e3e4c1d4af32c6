// The kernels for one instruction set: NEON is part of every 64-bit ARM.
#if defined(__aarch64__)
#include "cpu/simd_neon.h"
#include "cpu/vecmath.h"
#include "cpu/dots_neon.h"
#include "cpu/lookup_neon.h"
#include "cpu/record_any.h"
// The order matters: the kernels are templates on the vector type above.
#include "cpu/packed_queries.h"
#include "cpu/attend.h"
#include "cpu/picked.h"
#include "cpu/key_dots_any.h"
#include "cpu/attend_packed.h"
#include "cpu/attend_latent.h"
#include "cpu/latent_runs.h"
#include "cpu/latent_dots_any.h"
#include "cpu/attend_packed_latent.h"
#include "cpu/keep_best_any.h"
#include "cpu/retrieve.h"
#include "cpu/compact.h"
#include "cpu/products.h"

namespace edgekv {

const Kernels& kernels_neon() {
  static const Kernels table = {"neon", kRowBlock, prepare, encode, encode_run, attend, retrieve, merge, finish, observe, rank_keys, move_keys, move_values,
                                normalise, gate, quantise_row, multiply};
  return table;
}

}  // namespace edgekv
#endif
