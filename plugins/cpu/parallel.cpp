#include "cpu/parallel.h"

#include <atomic>
#include <system_error>
#include <thread>
#include <vector>

namespace edgekv {

void Threads::run(size_t count, Item item, void* data) {
  std::atomic<size_t> next{0};
  auto work = [&] {
    for (size_t i = next++; i < count; i = next++) item(data, i);
  };
  std::vector<std::thread> helpers;
  for (size_t i = 1; i < size_t(threads_ < 1 ? 1 : threads_) && i < count; ++i) {
    try {
      helpers.emplace_back(work);
    } catch (const std::system_error&) {
      break;  // no more threads to be had: those that run take over the items
    }
  }
  work();
  for (std::thread& helper : helpers) helper.join();
}

}  // namespace edgekv
