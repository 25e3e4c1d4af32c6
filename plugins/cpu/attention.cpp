#include "cpu/attention.h"

#include <algorithm>
#include <atomic>
#include <cinttypes>
#include <thread>

#include "cpu/dispatch.h"
#include "cpu/error.h"
#include "cpu/latent_levels.h"
#include "cpu/scratch.h"

namespace edgekv {

int check_rows(const LayerParams& p, const StepInputs& in, const StateHeader& header) {
  if (in.rows < 1) return fail("a step needs at least one row");
  const int64_t committed = in.position - header.tail_base;
  if (in.rows > p.tail_slots - committed)
    return fail("%" PRId64 " rows at position %" PRId64 " do not fit the tail: it has %d slots and starts at %" PRId64
                "; end the block at the boundary and compact",
                in.rows, in.position, p.tail_slots, header.tail_base);
  if (in.position + in.rows > INT32_MAX) return fail("position %" PRId64 " is beyond the largest one a state can store", in.position);
  if (p.head_dim > 0 && in.query_map == nullptr) return fail("head_dim needs the inputs query_map and key_map");
  if (!p.fused_rotary) return 0;
  if (in.cos == nullptr || in.sin == nullptr) return fail("fused_rotary needs the inputs cos and sin");
  if (p.rotary_dim == 0) return fail("fused_rotary needs a rotary_dim");
  if (const int64_t all = int64_t(p.kv_heads) * (p.rotary_dim / 2); p.fused_rotary == kRotaryByHead)
    return in.table_columns == all ? 0 : fail("cos and sin have %" PRId64 " columns; %d kv heads with rotary_dim %d need %" PRId64, in.table_columns, p.kv_heads, p.rotary_dim, all);
  if (in.table_columns != p.rotary_dim / 2 && in.table_columns != p.rotary_dim)
    return fail("cos and sin have %" PRId64 " columns; rotary_dim %d needs %d or %d", in.table_columns, p.rotary_dim, p.rotary_dim / 2,
                p.rotary_dim);
  return 0;
}

namespace {

// Below this much work, in multiply-adds, waking other threads costs more than it saves.
constexpr int64_t kWorthThreads = 1 << 17;
// Upper limit for results of splits that wait to be merged, in floats; beyond it a work item attends its splits one by one.
constexpr int64_t kPartialFloats = 1 << 20;

int check_slots(const LayerParams& p, const StepInputs& in, const StateHeader& header) {
  if (p.format != kFormatSelfIndex) return fail("slots are for a compressed body; this cache is dense and attends to all of it");
  const int64_t rows = p.kv_heads * in.rows, stride = slots_stride(in.chosen, in.scored, p.q_heads / p.kv_heads);
  int32_t least = 0, most = -1;
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t i = 0; i < in.chosen; ++i) {
      least = std::min(least, in.slots[row * stride + i]);
      most = std::max(most, in.slots[row * stride + i]);
    }
  if (least < -1 || most >= header.body_count)
    return fail("slots must be between -1 and %d, the last filled body slot; there are some from %d to %d", header.body_count - 1, least, most);
  return 0;
}

// Slots [begin, end) of a part, or entries of the lists of chosen body slots: what one result covers before merging.
struct Split {
  Part part;
  int begin, end;
};

// The splits of the sinks of a compressed body, of the body, before and behind what is hidden of it, and of the tail. They follow from
// the slots alone, so a row meets the same ones whatever comes with it.
struct Splits {
  int begins[4], ends[4], counts[4], count = 0;
  Splits(const Step& s, const StateHeader& h) : begins{0, 0, h.hidden_to, 0}, ends{s.sink_count, s.body_count, s.body_count, s.first_tail + s.rows} {
    if (h.hidden_from < h.hidden_to)
      ends[1] = h.hidden_from;
    else
      begins[2] = ends[2];
    if (s.slots != nullptr) ends[1] = s.chosen;
    for (int i = 0; i < 4; ++i) count += counts[i] = (ends[i] - begins[i] + kSplit - 1) / kSplit;
  }
  Split operator[](int i) const {
    int at = 0;
    for (; i >= counts[at]; ++at) i -= counts[at];
    const int begin = begins[at] + i * kSplit;
    return {at == 0 ? kSinks : at == 3 ? kTail : kBody, begin, std::min(begin + kSplit, ends[at])};
  }
};

// Sixteens of tail slots whose last one a step writes: it makes their quantised latents.
int ended_runs(const Step& s) { return (s.first_tail + s.rows) / EDGEKV_LANES - s.first_tail / EDGEKV_LANES; }

void count_traffic(const Step& s, const Loaded& loaded) {
  const LayerParams& p = s.params;
  uint64_t* traffic = s.state.header->traffic;
  traffic[kReadBodyKeys] += loaded.body_keys;
  traffic[kReadBodyValues] += loaded.body_values;
  traffic[kReadTailKeys] += loaded.tail_keys;
  traffic[kReadTailValues] += loaded.tail_values;
  traffic[kReadBodyIndex] += loaded.body_index;
  traffic[kReadBodyMeta] += loaded.body_meta;
  const int observed = std::max(0, s.first_tail + s.rows - std::max(s.first_tail, p.tail_slots - p.observe));
  const uint64_t numbers = uint64_t(s.rows) * p.kv_heads * (p.key_dim + p.value_dim) + (keeps_scores(p) ? uint64_t(observed) * p.q_heads * p.key_dim : 0);
  const uint64_t encoded = packs_latents(p) ? uint64_t(ended_runs(s)) * EDGEKV_LANES : p.latent > 0 ? s.rows : 0;  // tokens
  traffic[kWriteTail] += numbers * element_bytes(p) + encoded * latent_bytes(p);
  if (packs_latents(p)) traffic[kReadTailKeys] += encoded * p.kv_heads * p.key_dim * element_bytes(p);
  traffic[kTrafficSteps] += 1;
}

}  // namespace

int attend_step(const LayerParams& params, const StepInputs& in, void* state, int64_t bytes, float* y, Parallel& parallel) {
  if (check_state(params, state, bytes, in.position)) return 1;
  const StateView view = view_state(params, state);
  if (check_rows(params, in, *view.header)) return 1;
  if (params.head_dim > 0 && in.key_map == nullptr) return fail("head_dim needs the inputs query_map and key_map");
  if (params.latent > 0 && (in.key_encode == nullptr || in.key_decode == nullptr))
    return fail("latent needs the inputs key_encode and key_decode");
  if (params.latent > 0 && params.rotary_dim > 0 && in.inv_freq == nullptr) return fail("latent needs the attribute inv_freq");

  if (in.slots != nullptr && check_slots(params, in, *view.header)) return 1;
  if (in.slots != nullptr && in.scored && params.latent > 0) return fail("latent keys are not ranked again: slots must come without scores");
  const Kernels& kernel = kernels();
  Loaded loaded = {};
  Step s = {};
  s.params = params;
  s.state = view;
  s.group = params.q_heads / params.kv_heads;
  s.rows = int(in.rows);
  s.first_tail = int(in.position - view.header->tail_base);
  s.body_count = view.header->body_count;
  s.sink_count = int(sinks_moved(params, view.header->tail_base));
  s.slots = in.slots;
  s.chosen = int(in.chosen);
  s.scored = in.scored;
  s.position = in.position;
  s.q = in.q, s.k = in.k, s.v = in.v;
  s.cos = params.fused_rotary ? in.cos : nullptr;
  s.sin = in.sin;
  s.table_stride = int(in.table_columns);
  s.query_map = params.head_dim > 0 ? in.query_map : nullptr;
  s.key_map = params.head_dim > 0 ? in.key_map : nullptr;
  std::unique_ptr<DecoderLevels> levels;
  if (packs_latents(params) && in.levels == nullptr) levels = std::make_unique<DecoderLevels>(params, in.key_decode);
  if (levels && levels->view.numbers == nullptr) return fail("out of memory: there is none left for the decoder of latent keys");
  if (params.latent > 0)
    s.latent = {in.key_encode, in.key_decode, &rotation_tables(in.inv_freq, params.rotary_dim / 2), levels ? &levels->view : in.levels};
  s.y = y;
  s.loaded = &loaded;

  const Splits splits(s, *view.header);
  const int64_t rows = int64_t(s.rows) * s.group;  // per kv head
  const int64_t group_rows = int64_t(kRowBlocks) * kernel.row_block, groups = (rows + group_rows - 1) / group_rows;
  const int64_t stride = partial_stride(params.value_dim), heads = params.kv_heads;
  auto rows_of = [&](int64_t group) { return int(std::min(group_rows, rows - group * group_rows)); };

  // Many rows: an item takes all splits of its rows in turn. Few rows: one item per split, merged afterwards. Same arithmetic.
  static const int64_t enough_items = std::max(8u, 2 * std::thread::hardware_concurrency());
  const bool in_turn = splits.count == 1 || heads * groups >= enough_items || heads * rows * splits.count * stride > kPartialFloats;
  const int64_t kept_results = in_turn ? 2 : splits.count;
  const bool packed = params.format == kFormatSelfIndex;
  const int64_t query_floats = (heads * rows * params.key_dim + 15) / 16 * 16;
  const int64_t turned_floats = packed ? heads * rows * ((params.key_dim + 31) / 32 * 32) : 0;
  const int64_t bias_floats = s.slots != nullptr ? (heads * rows * (view.header->tail_base / params.tail_slots) + 15) / 16 * 16 : 0;

  Scratch scratch;
  float* memory = static_cast<float*>(scratch.reserve(
      size_t(query_floats + turned_floats + bias_floats + kept_results * heads * rows * stride) * sizeof(float)));
  if (memory == nullptr) return fail("out of memory: a step of %" PRId64 " rows needs more working memory than there is", in.rows);
  s.queries = memory;
  s.turned = s.queries + query_floats;
  s.bias = s.turned + turned_floats;
  float* results = s.bias + bias_floats;
  auto result = [&](int64_t which, int64_t head, int64_t group) {
    return results + ((which * heads + head) * rows + group * group_rows) * stride;
  };

  Inline alone;
  const int64_t slots = s.sink_count + (s.slots != nullptr ? s.chosen : s.body_count) + s.first_tail + s.rows;
  const int64_t rebuilt = heads * (s.slots != nullptr ? s.chosen : s.body_count) * int64_t(params.latent) * params.key_dim;  // multiply-adds, beside those of the attention
  const bool threads = heads * rows * slots * (params.key_dim + params.value_dim) + rebuilt >= kWorthThreads;
  Parallel& all = threads ? parallel : alone;

  // A compressed or latent body is unpacked tile by tile into memory of the item's own.
  const int64_t own_floats = packed ? unpacked_floats(params) : params.latent > 0 ? rebuilt_floats(params) : 0;
  std::atomic<bool> exhausted{false};
  auto attend = [&](const Split& split, int64_t head, int first, int count, float* partial) {
    if (own_floats == 0 || split.part != kBody)
      return kernel.attend(s, int(head), first, count, split.part, split.begin, split.end, partial, nullptr);
    Scratch own;
    float* work = static_cast<float*>(own.reserve(size_t(own_floats) * sizeof(float)));
    if (work == nullptr)
      exhausted = true;
    else
      kernel.attend(s, int(head), first, count, split.part, split.begin, split.end, partial, work);
  };
  // Few rows are prepared at once, unless they meet the mean keys of many intervals.
  const int64_t intervals = s.slots != nullptr && !s.scored && params.latent == 0 ? view.header->tail_base / params.tail_slots : 0;
  const bool long_preparation = in.rows >= 8 || heads * rows * intervals * params.key_dim >= kWorthThreads;
  (long_preparation ? all : alone).each(size_t(heads), [&](size_t head) { kernel.prepare(s, int(head)); });
  if (params.latent > 0 && !packed) (in.rows >= 8 ? all : alone).each(size_t(s.rows), [&](size_t row) { kernel.encode(s, int(row)); });
  if (params.latent > 0 && packed) {
    (in.rows >= 8 ? all : alone).each(size_t(ended_runs(s)), [&](size_t index) {
      const int run = s.first_tail / EDGEKV_LANES + int(index);
      const int64_t z_floats = EDGEKV_LANES * int64_t(params.latent);
      Scratch own;
      float* z = static_cast<float*>(own.reserve(size_t(z_floats + encoded_floats(params)) * sizeof(float)));
      if (z == nullptr) {
        exhausted = true;
        return;
      }
      kernel.encode_run(s, run, z, z + z_floats);
      for (int i = 0; i < EDGEKV_LANES; ++i)
        pack_latent(params, z + int64_t(i) * params.latent, view.tail_z + (int64_t(run) * EDGEKV_LANES + i) * int64_t(latent_record_bytes(params)));
    });
  }

  if (in_turn) {
    all.each(size_t(heads * groups), [&](size_t item) {
      // The last rows see most slots and take longest: they go first. So do the last heads, whose records a retrieval has just read.
      const int64_t head = heads - 1 - int64_t(item) % heads, group = groups - 1 - int64_t(item) / heads;
      const int first = int(group * group_rows), count = rows_of(group);
      float *sum = result(0, head, group), *part = result(1, head, group);
      for (int i = 0; i < splits.count; ++i) {
        attend(splits[i], head, first, count, i == 0 ? sum : part);
        if (i > 0) kernel.merge(count, params.value_dim, sum, part);
      }
      kernel.finish(s, int(head), first, count, sum);
    });
  } else {
    all.each(size_t(heads * groups * splits.count), [&](size_t item) {
      const int64_t i = int64_t(item) % splits.count, head = int64_t(item) / splits.count % heads, group = int64_t(item) / splits.count / heads;
      attend(splits[int(i)], head, int(group * group_rows), rows_of(group), result(i, head, group));
    });
    const bool much = heads * rows * splits.count * stride >= kWorthThreads / 4;
    (much ? all : alone).each(size_t(heads * groups), [&](size_t item) {
      const int64_t head = int64_t(item) % heads, group = int64_t(item) / heads;
      for (int i = 1; i < splits.count; ++i) kernel.merge(rows_of(group), params.value_dim, result(0, head, group), result(i, head, group));
      kernel.finish(s, int(head), int(group * group_rows), rows_of(group), result(0, head, group));
    });
  }
  if (exhausted) return fail("out of memory: there is none left to unpack the body");
  count_traffic(s, loaded);
  return 0;
}

}  // namespace edgekv
