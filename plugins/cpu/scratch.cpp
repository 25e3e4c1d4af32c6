#include "cpu/scratch.h"

#include <cstdlib>
#include <mutex>
#include <vector>

namespace edgekv {

struct Scratch::Block {
  void* memory = nullptr;
  size_t bytes = 0;
};

namespace {
std::mutex pool_mutex;
}

// Blocks stay in the pool until the process ends; a function-local static that is never destroyed, because steps may still run
// on other threads while the process exits.
static std::vector<void*>& pool() {
  static auto* free_blocks = new std::vector<void*>;
  return *free_blocks;
}

Scratch::Scratch() : block_(nullptr) {
  std::lock_guard<std::mutex> lock(pool_mutex);
  if (pool().empty()) {
    block_ = new Block;
  } else {
    block_ = static_cast<Block*>(pool().back());
    pool().pop_back();
  }
}

Scratch::~Scratch() {
  std::lock_guard<std::mutex> lock(pool_mutex);
  pool().push_back(block_);
}

void* Scratch::reserve(size_t bytes) {
  if (bytes > block_->bytes) {
    std::free(block_->memory);
    const size_t rounded = (bytes + 4095) / 4096 * 4096;
    block_->memory = std::aligned_alloc(64, rounded);
    block_->bytes = block_->memory == nullptr ? 0 : rounded;
  }
  return block_->memory;
}

}  // namespace edgekv
