// Working memory that steps borrow: it grows to what the largest step needed and is never given back, so that after the first
// step nothing is allocated. One pool serves all layers, because only as many blocks exist as steps run at the same time.
#pragma once
#include <cstddef>

namespace edgekv {

class Scratch {
 public:
  Scratch();   // borrows a block from the pool
  ~Scratch();  // returns it
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  // At least `bytes`, 64-byte aligned, valid until the next call or the end of this object; contents are undefined. Null when
  // memory runs out.
  void* reserve(size_t bytes);

 private:
  struct Block;
  Block* block_;
};

}  // namespace edgekv
