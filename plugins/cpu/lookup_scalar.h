// Table scores of 32 tokens, and slots picked by score, in plain C++: the definition of what the other lookup_*.h files do.
#pragma once
#include <cstdint>

namespace {

// One block of the index plane: codes [groups][16], table [groups][16] of entries 0..63, scores[i] = bias + the entries of token i.
inline void scan_block(const uint8_t* codes, const uint8_t* table, int groups, int bias, int16_t scores[32]) {
  int sum[32];
  for (int& s : sum) s = bias;
  for (int g = 0; g < groups; ++g) {
    for (int i = 0; i < 16; ++i) {
      const uint8_t code = codes[16 * g + i];
      sum[i] += table[16 * g + (code & 15)];
      sum[16 + i] += table[16 * g + (code >> 4)];
    }
  }
  for (int i = 0; i < 32; ++i) scores[i] = int16_t(sum[i]);
}

}  // namespace
#include "cpu/collect.h"
