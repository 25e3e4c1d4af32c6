// The kernels for one instruction set; setup.py gives this file its compiler flags.
#include "cpu/simd_scalar.h"
#include "cpu/vecmath.h"
#include "cpu/dots_scalar.h"
#include "cpu/lookup_scalar.h"
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

const Kernels& kernels_scalar() {
  static const Kernels table = {"scalar", kRowBlock, prepare, encode, encode_run, attend, retrieve, merge, finish, observe, rank_keys, move_keys, move_values,
                                normalise, gate, quantise_row, multiply};
  return table;
}

}  // namespace edgekv

