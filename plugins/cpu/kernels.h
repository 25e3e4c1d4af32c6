// What crosses between the orchestration (attention.cpp, compaction.cpp) and the kernels, which are compiled once per
// instruction set from the templates in attend.h and compact.h. Plain data only: a translation unit built for AVX-512 must not
// emit a shared inline function that the linker could then hand to the whole program.
#pragma once
#include <cstddef>
#include <cstdint>

#include "cpu/rotations.h"
#include "cpu/state.h"
#include "cpu/weights.h"

namespace edgekv {

constexpr int kTile = 128;     // slots whose scores are held at once; also the grain of the online softmax
constexpr int kSplit = 512;    // slots attended by one work item before results are merged; a multiple of kTile
constexpr int kRowBlocks = 8;  // register blocks of query rows that share one pass over the keys and values

// Activations as [heads][rows][dim] in any order of the first two: number (h, t, d) is data[h * head_stride + t * row_stride + d].
struct Rows {
  const float* data;
  int64_t head_stride, row_stride;
};

// Bytes that the kernels of one step loaded, added to by several threads. What is stored in full beside a compressed body, its
// sinks, counts as tail.
struct Loaded {
  uint64_t body_keys, body_values, tail_keys, tail_values, body_index, body_meta;
};

// What a row attends to, in order of position: the sinks of a compressed body, the body, the tail.
enum Part : int { kSinks, kBody, kTail };

// A decoder in whole numbers, for quantised latents (latent_levels.h). stride: key_dim in whole vectors, groups: of 32 latents.
struct LatentLevels {
  const int8_t* numbers;  // [kv_heads][latents in whole sixteens / 4][stride][4]
  const float* factors;   // [kv_heads][2 groups + 1][stride]: steps and sums of each group, then means
  int stride, groups;
  int64_t head_numbers, head_factors;  // of a kv head
};

// What latent keys are made and rebuilt with.
struct Latent {
  const float* encode;  // [kv_heads * key_dim][latent]
  const float* decode;  // [kv_heads][latent + 1][key_dim], the last row of a head is its mean key
  const RotationTables* rotations;
  const LatentLevels* levels;  // of a compressed body, else null
};

// One call of the attention op on one layer. `rows` tokens times `group` query heads share a kv head; query row r of a kv head
// is token r / group, head r % group of the group.
struct Step {
  LayerParams params;
  StateView state;
  int group, rows;
  int first_tail;       // committed tail slots: the step writes tail slots first_tail .. first_tail + rows - 1
  int body_count, sink_count;
  int64_t position;     // of the first row
  Rows q, k, v;
  const float *cos, *sin;  // [rows][table_stride], or null when q and k arrive rotated; see table_at
  int table_stride;
  // [q_heads] and [kv_heads][head_dim][key_dim] of the cache's element type, applied after the rotation; null: none.
  const void *query_map, *key_map;
  Latent latent;        // with params.latent
  float* y;             // [rows][q_heads][value_dim]
  float* queries;       // scratch [kv_heads][group * rows * key_dim], packed by prepare()
  // Of a compressed body only. slots [kv_heads][rows][chosen] names the body slots each row attends to, ascending and -1 behind
  // the last; null: all of them.
  const int32_t* slots;
  int chosen;
  bool scored;          // the slots of each row are followed by their scores, float32 [group][chosen], as retrieve() gives them
  float* turned;        // scratch: transformed queries, packed like `queries`, or [kv_heads][group * rows][packed stride] with slots
  float* bias;          // scratch: scores of the mean keys [kv_heads][group * rows][boundaries so far], with slots only
  Loaded* loaded;
};

// Where the columns of a kv head begin in a row of the rotary tables.
static inline int64_t table_at(const LayerParams& p, int head) { return p.fused_rotary == kRotaryByHead ? int64_t(head) * (p.rotary_dim / 2) : 0; }

// Result of attending some slots: not yet divided by the sum. Scores are in units of log2. Layout of one row, in floats:
// [0, width) weighted sum of values, [width, width + 16) sums of weights by lane, [width + 16] largest score.
static inline int partial_width(int value_dim) { return (value_dim + 15) / 16 * 16; }
static inline int partial_stride(int value_dim) { return partial_width(value_dim) + 32; }

// Floats of a token's (zero point, scale) of each group of 32 numbers of its value, in whole vectors.
static inline int64_t pair_floats(int value_dim) { return ((value_dim + 31) / 32 + 7) / 8 * 16; }

// Floats that the values of a tile of picked tokens need (picked.h, picked_avx2.h): pairs, or levels with codes.
static inline int64_t picked_floats(int value_dim) { return kTile * ((value_dim + 31) / 32 * (4 + 8) + 16); }

// Floats that hold one tile of a compressed body while rows attend to it, or one of picked tokens with queries, scores and sums of rows.
static inline int64_t unpacked_floats(const LayerParams& p) {
  const int64_t key = (p.key_dim + 31) / 32 * 32, value = (p.value_dim + 31) / 32 * 32, rows = kRowBlocks * 12;
  return kTile * (key + value + rows + 1) + 20 * key + picked_floats(p.value_dim) + rows * (key + value + 32);
}

// Floats that hold one tile of a latent body: keys of a kv head, and its values when they are stored in half precision.
static inline int64_t rebuilt_floats(const LayerParams& p) { return kTile * (int64_t(p.key_dim) + partial_width(p.value_dim)); }

// Floats in which sixteen tokens are encoded: their keys, latents and rotations.
static inline int64_t encoded_floats(const LayerParams& p) { return 16 * (int64_t(p.kv_heads) * p.key_dim + p.latent + 16 + p.rotary_dim); }

// One choice of body slots by their sign codes, for every row and kv head of a step.
struct Retrieval {
  LayerParams params;
  StateView state;
  int group, body_count;
  int64_t position, tail_base;
  Rows q;
  const float *cos, *sin;  // as in a step
  int table_stride;
  const void* query_map;  // as in a step
  int retrieve, candidates;  // slots per row; of the best by their codes so many are ranked again by their stored keys, if more than that
  int rows;
  int32_t* slots;        // [kv_heads][rows][retrieve]
  bool scored;           // each row's are followed by their scores, float32 [group][retrieve], in units of log2 or as the argument of tanh
  Loaded* loaded;
};

// Working memory of choosing for one row of one kv head, in parts of these sizes.
struct RetrievalWork {
  int64_t queries, scores, candidates, ranked;  // numbers in each; queries: with the table, means and biases, and as whole numbers
  int64_t bytes;
  explicit RetrievalWork(const Retrieval& r) {
    const int64_t dim = (r.params.key_dim + 31) / 32 * 32, boundaries = (r.tail_base / r.params.tail_slots + 15) / 16 * 16;
    queries = (r.group + 1) * dim + 4 * r.params.key_dim + kTile + (r.group + 1) * boundaries + 2 * r.group + r.group * dim / 4;
    queries = (queries + 15) / 16 * 16;
    scores = (int64_t(r.body_count) + 31) / 32 * 32;
    candidates = scores + 32;
    const int asked = r.candidates > r.retrieve ? r.candidates : r.scored ? r.retrieve : 0;
    ranked = ((asked < r.body_count ? asked : r.body_count) + 15) / 16 * 16;
    bytes = 4 * queries + 2 * scores + 4 * candidates + 4 * ranked * (r.group + 2);
  }
};

// Numbers between the slots of two rows, `count` slots in each.
static inline int64_t slots_stride(int64_t count, bool scored, int group) { return count * (scored ? 1 + group : 1); }

// One compaction of one layer. Candidates are the body's tokens and then the tail's, in order of position; candidate i goes to
// body slot j <= i.
struct Compaction {
  LayerParams params;
  StateView state;
  int group;
  int body_count, tail_count, new_count;
  int64_t tail_base;
  // Rotary positions that the key of candidate i moves by when it goes to slot j: turn + j - i. Column (move - least_turn) of the
  // tables [rotary_dim / 2][turns] holds the cosines and sines of that move. cos is null when keys stay as they are.
  int64_t turn, least_turn;
  int turns;
  const float *cos, *sin;
  uint64_t *read, *written;  // traffic in bytes, added to by several threads
};

// Floats of working memory that observe() needs per kv head.
static inline int64_t padded_candidates(const Compaction& c) { return (c.body_count + 15) / 16 * 16 + c.tail_count; }

// One instruction set.
struct Kernels {
  const char* name;
  int row_block;  // query rows per register block
  // Rotates if asked, stores the keys, values and observed queries of one kv head, and packs its scaled queries.
  void (*prepare)(const Step&, int head);
  // Stores what stands for the keys of token `row` (latent): its given keys of all kv heads, less their means, times `encode`.
  void (*encode)(const Step&, int row);
  // The same of tail slots 16 run .. 16 run + 15, from the keys in the tail: z [16][latent]. work: encoded_floats().
  void (*encode_run)(const Step&, int run, float* z, float* work);
  // Attends rows [first, first + count) of a kv head to slots [begin, end) of a part, or to entries [begin, end) of each row's
  // chosen slots; overwrites `partial`, one partial_stride per row. first is a multiple of row_block, count at most
  // kRowBlocks * row_block, end - begin at most kSplit. work: unpacked_floats() for a compressed body, rebuilt_floats() for a latent one.
  void (*attend)(const Step&, int head, int first, int count, Part part, int begin, int end, float* partial, float* work);
  // Chooses the slots of one row of a kv head. work has RetrievalWork::bytes, 64-byte aligned.
  void (*retrieve)(const Retrieval&, int head, int row, void* work);
  // Adds the results `part` of a later split to `sum`, row by row.
  void (*merge)(int count, int value_dim, float* sum, const float* part);
  // Divides by the sums and writes rows [first, first + count) of a kv head to y.
  void (*finish)(const Step&, int head, int first, int count, const float* sum);
  // Adds to each candidate of a kv head the attention it gets from the observed queries and the number of them that see it.
  // work has row_block * (padded_candidates + key_dim) floats.
  void (*observe)(const Compaction&, int head, float* score, float* seen, float* work);
  // Ranks each candidate of a kv head by how little its key is like all of them. work has padded_candidates + 16 key_dim floats.
  void (*rank_keys)(const Compaction&, int head, float* ranking, float* work);
  // Move the kept candidates (ascending, new_count of them) to the body slots 0, 1, ...: keys; values and positions.
  void (*move_keys)(const Compaction&, int head, const int32_t* kept);
  void (*move_values)(const Compaction&, int head, const int32_t* kept);
  // y = x / sqrt(mean of x^2 + epsilon) * weight, n numbers each. y may be x.
  void (*normalise)(const float* x, const float* weight, int64_t n, float epsilon, float* y);
  // y = silu(x[0 .. n)) * x[n .. 2 n).
  void (*gate)(const float* x, int64_t n, float* y);
  // Quantises 32 * blocks activations to row `row` of `to`. A number that is not finite makes the scale of its block so.
  void (*quantise_row)(const float* x, const QuantisedRows& to, int64_t row);
  // Rows [row, end) of x times tiles [first, last).
  void (*multiply)(const WeightTiles& w, int64_t first, int64_t last, const QuantisedRows& x, int64_t row, int64_t end, const ProductOutput& out);
};

const Kernels& kernels_scalar();
const Kernels& kernels_avx2();
const Kernels& kernels_avx512();
const Kernels& kernels_neon();

}  // namespace edgekv
