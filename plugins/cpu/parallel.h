// A loop over independent items, run by whoever owns the threads: ONNX Runtime's pool in a session, our own threads otherwise.
#pragma once
#include <cstddef>

namespace edgekv {

class Parallel {
 public:
  using Item = void (*)(void* data, size_t index);
  virtual ~Parallel() = default;
  // Calls item(data, i) once for every i < count, possibly on several threads, and returns when all have finished.
  virtual void run(size_t count, Item item, void* data) = 0;

  // The same for anything callable with an index.
  template <class F>
  void each(size_t count, const F& f) {
    run(count, [](void* data, size_t i) { (*static_cast<const F*>(data))(i); }, const_cast<F*>(&f));
  }
};

// Everything on the calling thread.
class Inline final : public Parallel {
 public:
  void run(size_t count, Item item, void* data) override {
    for (size_t i = 0; i < count; ++i) item(data, i);
  }
};

// The calling thread and up to threads - 1 others that live for one run.
class Threads final : public Parallel {
 public:
  explicit Threads(int threads) : threads_(threads) {}
  void run(size_t count, Item item, void* data) override;

 private:
  int threads_;
};

}  // namespace edgekv
