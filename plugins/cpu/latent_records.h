// Some tokens' quantised latents, their codes one byte each, as they meet a decoder's levels.
#pragma once
#include <cstring>

#include "cpu/kernels.h"

namespace {

constexpr int kMostTokens = 2;  // tokens that are rebuilt at once, whatever the instruction set

struct QuantisedLatents {
  const edgekv::LatentLevels& levels;
  int head, quads;  // kv head; fours of latents, filled up to whole sixteens
  alignas(64) uint8_t codes[kMostTokens][EDGEKV_MOST_LATENT + 32];
  float pairs[kMostTokens][2 * EDGEKV_MOST_LATENT / EDGEKV_GROUP + 16];

  QuantisedLatents(const edgekv::LayerParams& p, const edgekv::LatentLevels& levels, int head) : levels(levels), head(head), quads((p.latent + 15) / 16 * 4) {}

  // Unpacks the record of one token to place n.
  void take(int n, const uint8_t* record) {
    uint8_t* to = codes[n];
    for (int run = 0; run < quads / 4; ++run, record += 8, to += 16) {
      uint64_t both;
      std::memcpy(&both, record, 8);
      const uint64_t halves[2] = {both & 0x0f0f0f0f0f0f0f0full, (both >> 4) & 0x0f0f0f0f0f0f0f0full};
      std::memcpy(to, halves, 16);
    }
    // Eight pairs at a time; what is read behind the last of a record is the next record or the next plane.
    for (int g = 0; g < levels.groups; g += 8) store(pairs[n] + 2 * g, load(reinterpret_cast<const uint16_t*>(record) + 2 * g));
  }
};

}  // namespace
