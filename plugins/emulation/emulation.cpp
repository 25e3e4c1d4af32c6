// The fibre scheduler behind cuda_emulation.h.
#undef _FORTIFY_SOURCE  // its longjmp refuses to change stacks, which is the point here
#include "cuda_emulation.h"

#include <csetjmp>
#include <cstdlib>
#include <memory>
#include <set>
#include <string>
#include <ucontext.h>
#include <vector>

#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim

namespace emulation {

dim3 block_index, block_size, grid_size;

namespace {

constexpr size_t kStackBytes = 256 * 1024;
constexpr size_t kGuardBytes = 1024;
constexpr char kPoison = char(0xff);  // NaN as binary16 and as binary32
enum State { kReady, kAtBlock, kAtWarp, kDone };

struct Copy { void* to; const void* from; size_t bytes; };

struct Fibre : Thread {
  std::jmp_buf context;
  std::unique_ptr<char[]> stack;
  State state = kDone;
  bool started = false;
  const Site* site = nullptr;               // where it waits
  int exchanges = 0;                        // parity chooses the buffer, so that a fast lane cannot overwrite what a slow one still reads
  std::vector<std::vector<Copy>> copies;    // committed groups, oldest first
  std::vector<Copy> open;                   // not yet committed
};

std::vector<std::unique_ptr<Fibre>> fibres;
std::vector<uint64_t> exchange[2];          // [parity][thread]
std::vector<char> shared;
std::jmp_buf scheduler;
ucontext_t scheduler_context;
Fibre* running = nullptr;
const std::function<void()>* body = nullptr;
std::string error, last_error, sites_text;
bool failed_launch = false;
int order = 0;
uint64_t seed = 0, random_state = 1;
bool late_copies = false;

uint64_t random_next() {  // xorshift64*
  random_state ^= random_state >> 12;
  random_state ^= random_state << 25;
  random_state ^= random_state >> 27;
  return random_state * 2685821657736338717ull;
}

__attribute__((noinline)) void to_scheduler() {
  if (_setjmp(running->context) == 0) _longjmp(scheduler, 1);
}

void fail(const std::string& sentence) {
  if (error.empty()) error = sentence;
  running->state = kDone;
  _longjmp(scheduler, 1);  // this fibre is never resumed
}

std::string place(const Site& site) {
  const char* slash = std::strrchr(site.file, '/');
  return std::string(slash ? slash + 1 : site.file) + ":" + std::to_string(site.line);
}

// Function statics, because sites register themselves from other files' statics.
std::vector<Site*>& all_sites() {
  static std::vector<Site*> sites;
  return sites;
}
std::string& dropped_place() {
  static std::string place;
  return place;
}

void wait(State state, const Site& site) {
  running->state = state;
  running->site = &site;
  to_scheduler();
}

void entry() {
  (*body)();
  if (!running->open.empty() || !running->copies.empty()) fail("a thread ended with asynchronous copies in flight");
  running->state = kDone;
  _longjmp(scheduler, 1);
}

void resume(Fibre& f) {
  running = &f;
  if (_setjmp(scheduler) != 0) return;
  if (f.started) _longjmp(f.context, 1);
  f.started = true;
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = f.stack.get();
  context.uc_stack.ss_size = kStackBytes;
  context.uc_link = nullptr;
  makecontext(&context, entry, 0);
  swapcontext(&scheduler_context, &context);  // left again through longjmp
}

// Lets waiting fibres go whose partners have all arrived. True when some became ready.
bool release(size_t first, size_t count, State state, const char* what) {
  size_t waiting = 0;
  const Fibre* one = nullptr;
  for (size_t i = first; i < first + count; ++i)
    if (fibres[i]->state == state) ++waiting, one = fibres[i].get();
  if (waiting < count) return false;
  for (size_t i = first; i < first + count; ++i)
    if (fibres[i]->site != one->site) {
      error = std::string("threads of one ") + what + " wait at different places: " + place(*one->site) + " and " +
              place(*fibres[i]->site);
      return false;
    }
  for (size_t i = first; i < first + count; ++i) fibres[i]->state = kReady;
  return true;
}

// Index of the fibre to run next, or -1.
int pick(size_t n, size_t& turn) {
  if (order == 0) {
    for (size_t i = 0; i < n; ++i) if (fibres[i]->state == kReady) return int(i);
  } else if (order == 1) {
    for (size_t i = n; i-- > 0;) if (fibres[i]->state == kReady) return int(i);
  } else if (order == 2) {  // one lane of each warp in turn
    for (size_t k = 0; k < n; ++k) {
      const size_t j = (turn + k) % n, warps = n / 32, i = (j % warps) * 32 + j / warps;
      if (fibres[i]->state == kReady) return turn = (j + 1) % n, int(i);
    }
  } else {
    const size_t start = random_next() % n;
    for (size_t k = 0; k < n; ++k) if (fibres[(start + k) % n]->state == kReady) return int((start + k) % n);
  }
  return -1;
}

bool run_block(size_t n) {
  for (size_t i = 0; i < n; ++i) {
    Fibre& f = *fibres[i];
    f.thread = dim3(unsigned(i), 0, 0);
    f.state = kReady;
    f.started = false;
    f.exchanges = 0;
    f.copies.clear();
    f.open.clear();
  }
  size_t turn = 0;
  for (;;) {
    const int i = pick(n, turn);
    if (i >= 0) {
      resume(*fibres[size_t(i)]);
      if (!error.empty()) return false;
      const size_t warp = size_t(i) / 32 * 32;
      if (fibres[size_t(i)]->state == kAtWarp) release(warp, 32, kAtWarp, "warp");
      if (fibres[size_t(i)]->state == kAtBlock) release(0, n, kAtBlock, "block");
      if (!error.empty()) return false;
      continue;
    }
    size_t done = 0;
    for (size_t k = 0; k < n; ++k) done += fibres[k]->state == kDone;
    if (done == n) return true;
    for (size_t k = 0; k < n; ++k)
      if (fibres[k]->state != kDone) {
        error = "thread " + std::to_string(k) + " waits for ever at " + place(*fibres[k]->site);
        return false;
      }
  }
}

}  // namespace

Thread& current() { return *running; }

Site::Site(const char* file_, int line_, bool exchange_) : file(file_), line(line_), exchange(exchange_) {
  if (exchange) return;
  all_sites().push_back(this);
  dropped = place(*this) == dropped_place();
}

void block_barrier(const Site& site) {
  if (!site.dropped) wait(kAtBlock, site);
}

void warp_barrier(const Site& site) {
  if (!site.dropped) wait(kAtWarp, site);
}

const uint64_t* warp_exchange(uint64_t value, const Site& site) {
  const size_t me = running->thread.x, parity = size_t(running->exchanges++ & 1);
  exchange[parity][me] = value;
  wait(kAtWarp, site);
  return &exchange[parity][me / 32 * 32];
}

void* shared_memory() { return shared.data(); }

void copy_async(void* to, const void* from, size_t bytes) {
  const uintptr_t at = reinterpret_cast<uintptr_t>(to), base = reinterpret_cast<uintptr_t>(shared.data());
  if (at < base || at + bytes > base + shared.size()) fail("an asynchronous copy leaves shared memory");
  if (at % 16 || reinterpret_cast<uintptr_t>(from) % 16) fail("an asynchronous copy is not 16-byte aligned");
  if (late_copies) running->open.push_back({to, from, bytes});
  else std::memcpy(to, from, bytes);
}

void copy_commit() {
  running->copies.push_back(std::move(running->open));
  running->open.clear();
}

void copy_wait(int groups_left, const Site& site) {
  if (site.dropped) return;
  while (running->copies.size() > size_t(groups_left)) {
    for (const Copy& c : running->copies.front()) std::memcpy(c.to, c.from, c.bytes);
    running->copies.erase(running->copies.begin());
  }
}

bool launch(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& kernel) {
  const size_t n = block.x;
  error.clear();
  if (n == 0 || n % 32 || n > 1024 || block.y != 1 || block.z != 1) error = "blocks must be one row of whole warps, at most 1024 threads";
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.y > 65535 || grid.z > 65535) error = "the grid is empty or too large";
  while (error.empty() && fibres.size() < n) {
    fibres.push_back(std::make_unique<Fibre>());
    fibres.back()->stack.reset(new char[kStackBytes]);
  }
  exchange[0].resize(1024);
  exchange[1].resize(1024);
  body = &kernel;
  block_size = block;
  grid_size = grid;
  random_state = seed * 2 + 1;
  const size_t blocks = size_t(grid.x) * grid.y * grid.z;
  for (size_t i = 0; i < blocks && error.empty(); ++i) {
    const size_t b = order == 1 ? blocks - 1 - i : i;
    block_index = dim3(unsigned(b % grid.x), unsigned(b / grid.x % grid.y), unsigned(b / grid.x / grid.y));
    shared.assign(shared_bytes + kGuardBytes, kPoison);
    late_copies = order == 3 ? (random_next() >> 32) & 1 : seed & 1;
    run_block(n);
    for (size_t k = shared_bytes; k < shared.size(); ++k)
      if (shared[k] != kPoison && error.empty()) error = "a thread wrote past the end of shared memory";
  }
  if (error.empty()) return true;
  last_error = error;
  failed_launch = true;
  return false;
}

}  // namespace emulation

cudaError_t cudaGetLastError() {
  const bool failed = emulation::failed_launch;
  emulation::failed_launch = false;
  return failed ? cudaErrorLaunchFailure : cudaSuccess;
}

extern "C" {

void emulation_configure(int order, uint64_t seed) {
  emulation::order = order;
  emulation::seed = seed;
}

void emulation_drop(const char* file, int line) {
  emulation::dropped_place() = *file ? std::string(file) + ":" + std::to_string(line) : "";
  for (emulation::Site* s : emulation::all_sites()) s->dropped = emulation::place(*s) == emulation::dropped_place();
}

const char* emulation_sites() {
  std::set<std::string> places;  // a template has one site per instantiation
  for (const emulation::Site* s : emulation::all_sites()) places.insert(emulation::place(*s));
  emulation::sites_text.clear();
  for (const std::string& p : places) emulation::sites_text += p + "\n";
  return emulation::sites_text.c_str();
}

const char* emulation_error() { return emulation::last_error.c_str(); }
}
