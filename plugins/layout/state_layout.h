// The layout of one layer's cache state: the single place where it is defined. CPU kernels, CUDA kernels, the ONNX Runtime op
// and the TensorRT plugin all include this file; edgekv/layout.py mirrors it for the NumPy oracle and a test compares the two.
//
// A state is one block of bytes, 256-byte aligned. Every plane starts on a 64-byte boundary, in this order:
//
//   header      256 B                                  StateHeader
//   body_pos    int32 [kv_heads][body_slots]           position in the text of each kept token, ascending; -1 = empty slot
//   body_score  float [kv_heads][body_slots]           accumulated attention (keep = heavy by attention only)
//   body_seen   float [kv_heads][body_slots]           observing queries behind that score (keep = heavy by attention only)
//   body_k      elem  [kv_heads][body_slots/16][key_dim][16]   keys, 16 tokens interleaved, so that one vector load holds one
//                                                              dimension of 16 tokens and a dot product needs no reduction (dense)
//   body_v      elem  [kv_heads][body_slots][value_dim]                          (dense)
//   body_z      elem  [body_slots/16][latent][16]       what stands for the keys of all kv heads, 16 tokens interleaved; body_k is
//                                                      empty then (latent, dense)
//               uint8 [body_slots][latent_record_bytes]  the same, quantised, token by token (latent, selfindex)
//   index       uint8 [kv_heads][body_slots/32][key_dim/4][16]   sign codes, 32 tokens side by side: byte i of a group holds the
//                                                              code of token i in its low and of token i + 16 in its high half
//   payload     uint8 [kv_heads][body_slots][record_bytes]       one record per token (selfindex)
//   mean        fp16  [kv_heads][intervals][key_dim]             mean key of each boundary interval of the text (selfindex)
//   codebook    float [kv_heads][key_dim/4][16][4]               centroids of the sign codes (selfindex)
//   code_seen   float [kv_heads][key_dim/4][16]                  sub-vectors behind each centroid (selfindex)
//   sink_k      elem  [kv_heads][ceil16(sinks)/16][key_dim][16]  the first `sinks` tokens of the text in full (selfindex)
//   sink_v      elem  [kv_heads][ceil16(sinks)][value_dim]       (selfindex)
//   tail_k      elem  [kv_heads][tail_slots/16][key_dim][16]
//   tail_v      elem  [kv_heads][tail_slots][value_dim]
//   tail_z      elem  [tail_slots/16][latent][16]      what the body will hold of the tail's keys (latent, dense)
//               uint8 [tail_slots][latent_record_bytes]  the same (latent, selfindex), of whole sixteens of tokens
//   tail_q      elem  [q_heads][observe][key_dim]      last `observe` queries of the interval (keep = heavy by attention only)
//
// A record of a selfindex body is, back to back: key magnitudes (4 * key_bits bytes per 32 numbers), value codes (4 * value_bits
// bytes per 32 numbers), then the fp16 pairs (zero point, scale) of the key's and of the value's groups of 32, padded to 16 bytes.
// Bits b i .. b i + b - 1 of byte j of a group's 4 b bytes hold number 4 b i + j. docs/self_index.md says what the numbers mean.
// With latent it holds values alone, padded to 8 bytes, and what stands for the keys of all kv heads of a token is a record of body_z:
// 8 bytes for every 16 numbers begun, byte j with number j in its low and number 8 + j in its high half, then the fp16 pairs of the groups of
// 32. Numbers beyond `latent` have the code 0.
//
// Slots 0..body_count-1 of every kv head are filled, in order of position; all kv heads have the same count. The sinks of a dense
// body are its first slots; those of a selfindex body lie in sink_k and sink_v, min(sinks, tail_base) of them. Tail slot i holds
// the token at position tail_base + i. How many tail slots are committed follows from the committed position the caller holds
// (position - tail_base), never from the state: rejecting speculated tokens changes nothing but what lies beyond that.
#pragma once
#include <cstddef>
#include <cstdint>

#define EDGEKV_LAYOUT_VERSION 5
#define EDGEKV_STATE_MAGIC 0x31564B45u  // "EKV1", little endian
#define EDGEKV_LANES 16                 // tokens interleaved in a key block
#define EDGEKV_INDEX_TOKENS 32          // tokens side by side in the index plane
#define EDGEKV_GROUP 32                 // numbers that share a zero point and a scale
#define EDGEKV_MOST_LATENT 4096         // numbers of a token's keys, of all kv heads, that latent keys can stand for

#ifdef __CUDACC__
#define EDGEKV_BOTH_SIDES __host__ __device__  // called by CUDA kernels too
#else
#define EDGEKV_BOTH_SIDES
#endif

namespace edgekv {

enum Element : int32_t { kFloat32 = 0, kFloat16 = 1 };
enum Keep : int32_t { kKeepFull = 0, kKeepWindow = 1, kKeepHeavy = 2 };
enum Score : int32_t { kScoreAttention = 0, kScoreKeys = 1 };
enum Format : int32_t { kFormatDense = 0, kFormatSelfIndex = 1 };
enum Positions : int32_t { kPositionsOriginal = 0, kPositionsCache = 1 };
enum Rotary : int32_t { kRotaryDone = 0, kRotaryFused = 1, kRotaryByHead = 2 };  // fused_rotary

struct LayerParams {
#define EDGEKV_INT(name, value) int32_t name = value;
#define EDGEKV_FLOAT(name, value) float name = value;
#include "attributes.def"
#undef EDGEKV_INT
#undef EDGEKV_FLOAT
};

// What the kernels touched since the counters were last cleared, in bytes, one entry per plane and direction. Of a selfindex body:
// index are sign codes, keys and values the two parts of records, meta positions, mean keys and the codebook; sinks count as tail,
// which lies in full as they do.
enum Traffic : int32_t {
  kReadBodyKeys = 0, kReadBodyValues, kReadTailKeys, kReadTailValues, kReadBodyIndex, kReadBodyMeta,
  kWriteTail, kCompactRead, kCompactWrite, kTrafficSteps, kTrafficEntries = 16
};

struct StateHeader {
  uint32_t magic;           // EDGEKV_STATE_MAGIC
  uint32_t layout_version;  // EDGEKV_LAYOUT_VERSION
  uint64_t params_hash;     // FNV-1a over LayerParams without `layer`
  int64_t tail_base;        // position of tail slot 0: the last boundary
  int64_t rank_base;        // rotary position of tail slot 0 (equals tail_base unless positions = cache)
  int64_t evicted;          // tokens dropped from the body so far, per kv head
  int32_t body_count;       // filled body slots per kv head
  // What steps leave out. The runtime sets these four; no kernel writes them, and they are no part of the committed state.
  int32_t hidden_from;      // steps do not attend to body slots hidden_from..hidden_to-1, multiples of 16; equal: nothing is hidden
  int32_t hidden_to;        // (while it drafts with a part of the cache)
  int32_t retrieve;         // body tokens each row attends to, found by their sign codes; 0: all (selfindex)
  int32_t candidates;       // of the best by their codes so many are ranked again by their stored keys; up to `retrieve`: the codes decide
  uint8_t reserved1[68];
  uint64_t traffic[kTrafficEntries];  // not part of the committed state
};
static_assert(sizeof(StateHeader) == 256, "the header is one 256-byte block");

// Byte offsets of every plane; a plane that the parameters do not ask for has its offset equal to the next one's.
struct StateLayout {
  size_t body_pos, body_score, body_seen, body_k, body_v, body_z, index, payload, mean, codebook, code_seen, sink_k, sink_v, tail_k,
      tail_v, tail_z, tail_q, bytes;
};

// Numbers per key and query head as a step receives them: key_dim of them are stored, projected or as they come.
inline int32_t given_dim(const LayerParams& p) { return p.head_dim > 0 ? p.head_dim : p.key_dim; }

inline size_t element_bytes(const LayerParams& p) { return p.element == kFloat16 ? 2 : 4; }

// Whether attention scores and the queries that make them are stored.
EDGEKV_BOTH_SIDES inline bool keeps_scores(const LayerParams& p) { return p.keep == kKeepHeavy && p.score == kScoreAttention; }

// Whether a compaction that evicts ranks tokens by their keys.
EDGEKV_BOTH_SIDES inline bool ranks_by_keys(const LayerParams& p) { return p.keep == kKeepHeavy && p.score == kScoreKeys; }

// Bytes of the parts of a selfindex record.
struct RecordLayout {
  size_t values, key_pairs, value_pairs, bytes;  // offsets (key magnitudes start at 0) and the padded size
};

inline RecordLayout record_layout(const LayerParams& p) {
  const size_t keys = p.latent > 0 ? 0 : (p.key_dim + EDGEKV_GROUP - 1) / EDGEKV_GROUP, values = (p.value_dim + EDGEKV_GROUP - 1) / EDGEKV_GROUP;
  const size_t unit = p.latent > 0 ? 8 : 16;
  RecordLayout r;
  r.values = 4 * p.key_bits * keys;
  r.key_pairs = r.values + 4 * p.value_bits * values;
  r.value_pairs = r.key_pairs + 4 * keys;
  r.bytes = (r.value_pairs + 4 * values + unit - 1) / unit * unit;
  return r;
}

// Whether latents are quantised, token by token.
inline bool packs_latents(const LayerParams& p) { return p.latent > 0 && p.format == kFormatSelfIndex; }

// Bytes of the codes of a quantised latent, and of its whole record.
inline size_t latent_code_bytes(const LayerParams& p) { return size_t(p.latent + 15) / 16 * 8; }
inline size_t latent_record_bytes(const LayerParams& p) { return latent_code_bytes(p) + size_t(p.latent + EDGEKV_GROUP - 1) / EDGEKV_GROUP * 4; }

// Bytes of what stands for the keys of all kv heads of a token (latent).
inline size_t latent_bytes(const LayerParams& p) { return packs_latents(p) ? latent_record_bytes(p) : size_t(p.latent) * element_bytes(p); }

inline StateLayout state_layout(const LayerParams& p) {
  auto align = [](size_t n) { return (n + 63) / 64 * 64; };
  const size_t kv = p.kv_heads, body = p.body_slots, tail = p.tail_slots, e = element_bytes(p), dim = p.key_dim;
  const size_t scored = keeps_scores(p) ? kv * body * 4 : 0;
  const size_t dense = p.format == kFormatSelfIndex ? 0 : 1, packed = 1 - dense;
  const size_t sinks = packed * ((p.sinks + EDGEKV_LANES - 1) / EDGEKV_LANES * EDGEKV_LANES);
  StateLayout s;
  s.body_pos = sizeof(StateHeader);
  s.body_score = s.body_pos + align(kv * body * 4);
  s.body_seen = s.body_score + align(scored);
  s.body_k = s.body_seen + align(scored);
  s.body_v = s.body_k + align(p.latent > 0 ? 0 : dense * kv * body * dim * e);
  s.body_z = s.body_v + align(dense * kv * body * p.value_dim * e);
  s.index = s.body_z + align(body * latent_bytes(p));
  s.payload = s.index + align(packed * kv * body * (dim / 4) / 2);
  s.mean = s.payload + align(packed * kv * body * record_layout(p).bytes);
  s.codebook = s.mean + align(packed * kv * p.intervals * dim * 2);
  s.code_seen = s.codebook + align(packed * kv * (dim / 4) * 16 * 4 * 4);
  s.sink_k = s.code_seen + align(packed * kv * (dim / 4) * 16 * 4);
  s.sink_v = s.sink_k + align(kv * sinks * dim * e);
  s.tail_k = s.sink_v + align(kv * sinks * p.value_dim * e);
  s.tail_v = s.tail_k + align(kv * tail * dim * e);
  s.tail_z = s.tail_v + align(kv * tail * p.value_dim * e);
  s.tail_q = s.tail_z + align(tail * latent_bytes(p));
  const size_t queries = keeps_scores(p) ? size_t(p.q_heads) * p.observe * dim * e : 0;
  s.bytes = (s.tail_q + align(queries) + 255) / 256 * 256;
  return s;
}

// Null when the parameters make sense, otherwise one sentence that names the field.
inline const char* check_params(const LayerParams& p) {
  if (p.q_heads < 1 || p.q_heads > 4096) return "q_heads must be between 1 and 4096";
  if (p.kv_heads < 1 || p.q_heads % p.kv_heads != 0) return "kv_heads must divide q_heads";
  if (p.key_dim < 1 || p.key_dim > 1024) return "key_dim must be between 1 and 1024";
  if (p.value_dim < 1 || p.value_dim > 1024) return "value_dim must be between 1 and 1024";
  if (p.body_slots < 0 || p.body_slots % EDGEKV_LANES || p.body_slots > (1 << 27)) return "body_slots must be a multiple of 16";
  if (p.tail_slots < EDGEKV_LANES || p.tail_slots % EDGEKV_LANES || p.tail_slots > (1 << 20))
    return "tail_slots must be a positive multiple of 16";
  if (p.element != kFloat32 && p.element != kFloat16) return "element must be 0 (float32) or 1 (float16)";
  if (p.keep < kKeepFull || p.keep > kKeepHeavy) return "keep must be 0 (full), 1 (window) or 2 (heavy)";
  if (p.score != kScoreAttention && p.score != kScoreKeys) return "score must be 0 (attention) or 1 (keys)";
  if (p.format != kFormatDense && p.format != kFormatSelfIndex) return "format must be 0 (dense) or 1 (selfindex)";
  const bool packed = p.format == kFormatSelfIndex;
  if (packed) {
    if (p.key_dim % 4) return "key_dim must be a multiple of 4";
    if (p.body_slots % EDGEKV_INDEX_TOKENS) return "body_slots must be a multiple of 32";
    if (p.key_bits != 2 && p.key_bits != 4) return "key_bits must be 2 or 4";
    if (p.value_bits != 2 && p.value_bits != 4 && p.value_bits != 8) return "value_bits must be 2, 4 or 8";
    if (p.intervals < 1 || p.intervals > (1 << 20)) return "intervals must be between 1 and 1048576";
    if (p.positions != kPositionsOriginal) return "positions must be 0 (original): compressed keys cannot be turned";
  }
  if (p.sinks < 0 || p.sinks > (1 << 20) || (!packed && p.keep != kKeepFull && p.sinks > p.body_slots)) return "sinks must fit the body";
  const int32_t free = packed ? p.body_slots : p.body_slots - p.sinks;  // slots that sinks do not take
  if (p.window < 0 || (p.keep == kKeepHeavy && p.window > free)) return "sinks + window must fit the body";
  if (p.observe < 0 || p.observe > p.tail_slots) return "observe must be between 0 and tail_slots";
  if (p.score == kScoreKeys && (p.observe || p.score_normalise))
    return "observe and score_normalise must be 0 when score is 1 (keys): no query is observed";
  if (p.sliding_window < 0) return "sliding_window must not be negative";
  if (p.positions != kPositionsOriginal && p.positions != kPositionsCache) return "positions must be 0 (original) or 1 (cache)";
  if (p.head_dim != 0 && (p.head_dim < p.key_dim || p.head_dim > 1024)) return "head_dim must be 0 or between key_dim and 1024";
  if (p.head_dim != 0 && p.positions != kPositionsOriginal) return "positions must be 0 (original): projected keys cannot be turned";
  if (p.latent < 0 || p.latent > EDGEKV_MOST_LATENT || p.latent > int64_t(p.kv_heads) * p.key_dim)
    return "latent must be between 0 and the numbers of all keys of a token, at most 4096";
  if (p.latent > 0) {
    if (p.head_dim != 0) return "latent keys need head_dim 0";
    if (packed && ranks_by_keys(p)) return "latent keys of format 1 (selfindex) cannot be ranked: keep must be 0 (full) or 1 (window)";
    if (p.positions != kPositionsOriginal) return "positions must be 0 (original): latent keys cannot be turned";
    if (keeps_scores(p)) return "latent keys cannot be ranked by attention: score must be 1 (keys)";
    if (p.rotary_dim > 0 && !p.fused_rotary) return "latent keys need fused_rotary: they are made before the rotation";
    if (int64_t(p.kv_heads) * p.key_dim > EDGEKV_MOST_LATENT) return "latent keys need kv_heads * key_dim of at most 4096";
  }
  if (p.rotary_dim < 0 || p.rotary_dim > given_dim(p) || p.rotary_dim % 2)
    return "rotary_dim must be even and at most the size of a head";
  if (p.fused_rotary < 0 || p.fused_rotary > 2) return "fused_rotary must be 0, 1 or 2 (tables for every kv head)";
  if (p.fused_rotary == kRotaryByHead && p.latent > 0) return "fused_rotary must be 0 or 1 with latent keys: all heads turn alike";
  if (p.fused_rotary == kRotaryByHead && p.positions != kPositionsOriginal) return "positions must be 0 (original): keys that turn by head are not turned again";
  if (!(p.score_decay >= 0.0f && p.score_decay <= 1.0f)) return "score_decay must be between 0 and 1";
  if (!(p.softcap >= 0.0f)) return "softcap must not be negative";
  return nullptr;
}

// Ignores `layer`, so that layers of one shape share a hash.
inline uint64_t params_hash(LayerParams p) {
  p.layer = 0;
  const unsigned char* b = reinterpret_cast<const unsigned char*>(&p);
  uint64_t h = 1469598103934665603ull;
  for (size_t i = 0; i < sizeof(p); ++i) h = (h ^ b[i]) * 1099511628211ull;
  return h;
}

}  // namespace edgekv
