// See lookup_scalar.h: one group per load, entries added in bytes four at a time (4 * 63 < 256), then in 16 bits.
#pragma once
#include <arm_neon.h>

#include <cstdint>

namespace {

inline void scan_block(const uint8_t* codes, const uint8_t* table, int groups, int bias, int16_t scores[32]) {
  uint16x8_t sum[4];
  for (uint16x8_t& s : sum) s = vdupq_n_u16(uint16_t(bias));
  int g = 0;
  while (g < groups) {
    uint8x16_t low = vdupq_n_u8(0), high = low;
    for (int n = 0; n < 4 && g < groups; ++n, ++g) {
      const uint8x16_t code = vld1q_u8(codes + 16 * g), entries = vld1q_u8(table + 16 * g);
      low = vaddq_u8(low, vqtbl1q_u8(entries, vandq_u8(code, vdupq_n_u8(15))));
      high = vaddq_u8(high, vqtbl1q_u8(entries, vshrq_n_u8(code, 4)));
    }
    sum[0] = vaddw_u8(sum[0], vget_low_u8(low));
    sum[1] = vaddw_u8(sum[1], vget_high_u8(low));
    sum[2] = vaddw_u8(sum[2], vget_low_u8(high));
    sum[3] = vaddw_u8(sum[3], vget_high_u8(high));
  }
  for (int i = 0; i < 4; ++i) vst1q_s16(scores + 8 * i, vreinterpretq_s16_u16(sum[i]));
}

}  // namespace
#include "cpu/collect.h"
