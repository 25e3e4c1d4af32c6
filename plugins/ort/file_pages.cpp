#include "ort/file_pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cinttypes>
#include <cstdint>
#include <cstdio>

namespace edgekv::ort {

void release_file_pages(const void* data, size_t bytes) {
  const auto first = reinterpret_cast<uintptr_t>(data), last = first + bytes, page = uintptr_t(sysconf(_SC_PAGESIZE));
  const uintptr_t from = (first + page - 1) / page * page, to = last / page * page;
  FILE* maps = from < to ? std::fopen("/proc/self/maps", "re") : nullptr;
  if (maps == nullptr) return;
  char line[512];  // of a longer one the rest is read as lines that are no mappings
  while (std::fgets(line, sizeof(line), maps) != nullptr) {
    uintptr_t begin, end;
    unsigned long inode;
    if (std::sscanf(line, "%" SCNxPTR "-%" SCNxPTR " %*4s %*x %*x:%*x %lu", &begin, &end, &inode) != 3) continue;
    if (begin > first || last > end) continue;
    if (inode != 0) madvise(reinterpret_cast<void*>(from), to - from, MADV_DONTNEED);
    break;
  }
  std::fclose(maps);
}

}  // namespace edgekv::ort
