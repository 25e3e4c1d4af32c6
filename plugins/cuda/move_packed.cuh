// Forms the next compressed body in place: records and sign codes of the candidates that stay, old ones from the body, new ones from
// the workspace. As in move.cuh tokens only ever move towards slot 0, so 64 of them are read before they are written.
#pragma once
#include "move.cuh"
#include "packed_body.cuh"

namespace edgekv {
namespace cuda {

constexpr int kRecordUnits = 4;  // pieces of 16 bytes of a record per block
constexpr int kCodeGroups = 8;   // groups of four numbers per block
static_assert(kMoveThreads == kTile * kRecordUnits && kMoveThreads == kTile / 2 * kCodeGroups, "each thread moves one piece at a time");

// Sources ascend, so a group of targets stays where it is when its last token does.
EDGEKV_DEVICE bool stays(const int* source, int last, const Tail& tail) { return source[last] == last && last < tail.body; }

// Grid (kv_heads, ceil(record bytes / 64)), kMoveThreads threads.
__global__ void __launch_bounds__(kMoveThreads) move_records(const Compaction c) {
  const LayerParams& p = c.layer.p;
  const Tail tail = read_boundary(c);
  if (!tail.ok) return;
  const int kv_head = int(blockIdx.x), units = int(c.layer.record.bytes / 16), count = kept_of(c, tail);
  const int unit = int(blockIdx.y) * kRecordUnits + int(threadIdx.x) % kRecordUnits, token = int(threadIdx.x) / kRecordUnits;
  const int* source = c.source + size_t(kv_head) * p.body_slots;
  uint4* body = plane<uint4>(c.layer, c.layer.at.payload) + size_t(kv_head) * p.body_slots * units;
  const uint4* made = reinterpret_cast<const uint4*>(c.records) + size_t(kv_head) * p.tail_slots * units;
  for (int base = 0; base < count; base += kTile) {
    const int last = base + kTile < count ? base + kTile - 1 : count - 1, to = base + token;
    if (stays(source, last, tail)) continue;
    const bool moves = to <= last && unit < units;
    uint4 piece{};
    if (moves) piece = source[to] < tail.body ? body[size_t(source[to]) * units + unit] : made[size_t(source[to] - tail.body) * units + unit];
    __syncthreads();  // all of the group is read
    if (moves) body[size_t(to) * units + unit] = piece;
  }
}

EDGEKV_DEVICE unsigned code_of(const Compaction& c, const PackedBody& b, const Tail& tail, int kv_head, int candidate, int group) {
  if (candidate < tail.body) return sign_code(b, candidate, group);
  return c.codes[(size_t(kv_head) * c.layer.p.tail_slots + candidate - tail.body) * (b.key_dim / 4) + group];
}

// Grid (kv_heads, ceil(key_dim / 4 / kCodeGroups)), kMoveThreads threads: a byte has the codes of two tokens, 16 apart.
__global__ void __launch_bounds__(kMoveThreads) move_codes(const Compaction c) {
  const LayerParams& p = c.layer.p;
  const Tail tail = read_boundary(c);
  if (!tail.ok) return;
  const int kv_head = int(blockIdx.x), groups = p.key_dim / 4, count = kept_of(c, tail);
  const int group = int(blockIdx.y) * kCodeGroups + int(threadIdx.x) / 16 % kCodeGroups;
  const PackedBody b = packed_body(c.layer, kv_head, tail.base);
  const int* source = c.source + size_t(kv_head) * p.body_slots;
  unsigned char* index = plane<unsigned char>(c.layer, c.layer.at.index) + size_t(kv_head) * (p.body_slots / 32) * groups * 16;
  for (int base = 0; base < count; base += kTile) {
    const int last = base + kTile < count ? base + kTile - 1 : count - 1;
    const int low = base + int(threadIdx.x) / (16 * kCodeGroups) * 32 + int(threadIdx.x) % 16, high = low + 16;
    if (stays(source, last, tail)) continue;
    const bool moves = low <= last && group < groups;
    unsigned byte = 0;
    if (moves) byte = code_of(c, b, tail, kv_head, source[low], group) | (high <= last ? code_of(c, b, tail, kv_head, source[high], group) << 4 : 0u);
    __syncthreads();  // all of the group is read
    if (moves) index[(size_t(low / 32) * groups + group) * 16 + low % 16] = static_cast<unsigned char>(byte);
  }
}

// The header of a compressed state, once all else is in place. One thread. Bytes as edgekv/memory/traffic.py has them as a formula;
// move_metadata has counted the tokens that moved.
__global__ void commit_packed(const Compaction c) {
  const LayerParams& p = c.layer.p;
  const Tail tail = read_boundary(c);
  if (!tail.ok || threadIdx.x != 0) return;
  const Moves m = moves_of(c, tail);
  const int count = kept_of(c, tail);
  const RecordLayout& record = c.layer.record;
  const uint64_t e = p.element == kFloat16 ? 2 : 4, heads = p.kv_heads, dim = p.key_dim, body = tail.body;
  const uint64_t key_parts = dim / 8 + record.values + (record.value_pairs - record.key_pairs), taught = m.added ? heads * dim * 80 : 0;
  uint64_t read = heads * p.tail_slots * (dim + p.value_dim) * e + taught;
  uint64_t written = heads * m.to_sinks * (dim + p.value_dim) * e + taught + (m.added ? heads * dim * 2 : 0);
  const bool scored = keeps_scores(p);
  if (scored || (ranks_by_keys(p) && m.candidates > p.body_slots)) read += heads * (body * key_parts + m.added * dim * e);
  if (scored) {
    read += heads * ((m.sinks_before + m.to_sinks) * dim * e + uint64_t(c.query_rows) * dim * e + 8 * body);
    written += heads * 8 * count;
  }
  StateHeader* h = header(c.layer);
  h->traffic[kCompactRead] += read;
  h->traffic[kCompactWrite] += written;
  h->evicted += m.candidates - count;
  h->body_count = count;
  h->tail_base = h->rank_base = c.position;
}

}  // namespace cuda
}  // namespace edgekv
