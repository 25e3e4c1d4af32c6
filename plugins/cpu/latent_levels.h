// What quantised latents (latent keys in a compressed cache) are made and rebuilt with. edgekv/reference/self_index/latents.py says it in NumPy.
#pragma once
#include <cstdint>
#include <memory>

#include "cpu/kernels.h"

namespace edgekv {

// A decoder float32 [kv_heads][latent + 1][key_dim], the last row of a head its mean key, in whole numbers. Groups of 32 rows are transformed as
// latents are; every column of a group then has a step of its own: its largest number becomes 127 or -127.
class DecoderLevels {
 public:
  DecoderLevels(const LayerParams& p, const float* decode);
  LatentLevels view = {};  // without numbers: there was no memory

 private:
  struct Free {
    void operator()(void* memory) const;
  };
  std::unique_ptr<void, Free> memory_;
};

// Writes the record of one token: z [latent], spread within its groups of 32 by the Walsh-Hadamard transform, to codes of 4 bits with a zero
// point and a scale for every group.
void pack_latent(const LayerParams& p, const float* z, uint8_t* record);

}  // namespace edgekv
