#include "cpu/dispatch.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <atomic>
#include <cstdlib>
#include <cstring>

#include "cpu/error.h"

namespace edgekv {
namespace {

#if defined(__x86_64__)
// GCC before 11 does not know this one by name.
bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

// What this machine can run, slowest first.
struct Available {
  const Kernels* list[4] = {};
  int count = 0;
  Available() {
    list[count++] = &kernels_scalar();
#if defined(__x86_64__)
    __builtin_cpu_init();  // this also asks the operating system whether it saves the wide registers
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c())
      list[count++] = &kernels_avx2();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && count == 2)
      list[count++] = &kernels_avx512();
#elif defined(__aarch64__)
    list[count++] = &kernels_neon();
#endif
  }
  const Kernels* find(const char* name) const {
    for (int i = 0; i < count; ++i)
      if (name != nullptr && std::strcmp(list[i]->name, name) == 0) return list[i];
    return nullptr;
  }
};

const Available& available() {
  static const Available found;
  return found;
}

std::atomic<const Kernels*>& current() {
  static std::atomic<const Kernels*> chosen{[] {
    const Kernels* asked = available().find(std::getenv("EDGEKV_ISA"));
    return asked != nullptr ? asked : available().list[available().count - 1];
  }()};
  return chosen;
}

}  // namespace

const char* isa_name(int i) { return i >= 0 && i < available().count ? available().list[i]->name : nullptr; }

const Kernels& kernels() { return *current().load(std::memory_order_relaxed); }

int set_isa(const char* name) {
  const Kernels* asked = available().find(name);
  if (asked == nullptr) return fail("this machine cannot run the instruction set '%.32s'", name == nullptr ? "" : name);
  current().store(asked, std::memory_order_relaxed);
  return 0;
}

}  // namespace edgekv
