// Cosines and sines of any position of a text, from tables that all layers of a model share.
#pragma once
#include <cstdint>

namespace edgekv {

// position = a + 256 b + 65536 c with a, b, c < 256: one table each, cosines and sines of a, 256 b and 65536 c times every frequency.
// The rotation of a position is the product of three (of two below 65536, which the kernels make). Beyond 2^24 positions repeat.
struct RotationTables {
  int pairs, stride;  // frequencies, and numbers of a row: rounded up to 16
  const float *cos[3], *sin[3];  // [256][stride] each
};

// The tables for these frequencies, inv_freq [pairs] in radians per position; made when they are first asked for and kept.
const RotationTables& rotation_tables(const float* inv_freq, int pairs);

}  // namespace edgekv
