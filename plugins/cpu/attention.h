// One attention step of one layer: check, append to the tail, attend to body and tail.
#pragma once
#include "cpu/kernels.h"
#include "cpu/parallel.h"

namespace edgekv {

struct StepInputs {
  Rows q, k, v;
  int64_t rows;             // tokens in this step
  int64_t position;         // committed tokens before it
  const float *cos, *sin;   // [rows][table_columns] when params.fused_rotary, else null
  int64_t table_columns;    // rotary_dim / 2, or rotary_dim of which the first half is used, or rotary_dim / 2 for every kv head
  // Body slots that each row attends to, [kv_heads][rows][chosen] as retrieve_step gives them; null: all. For a compressed body.
  const int32_t* slots;
  int64_t chosen;
  bool scored;  // each row's are followed by their scores, float32 [q_heads / kv_heads][chosen], as retrieve_step gives them
  // What params.head_dim numbers of a rotated query or key become key_dim numbers with, [q_heads] and [kv_heads][head_dim][key_dim] of
  // the cache's element type (what they make is rounded to it anyway); null without head_dim. retrieve_step needs the first only.
  const void *query_map, *key_map;
  // With params.latent: what latent keys are made and rebuilt with (kernels.h), and the rotation of the positions they lie at,
  // inv_freq [rotary_dim / 2].
  const float *key_encode, *key_decode, *inv_freq;
  // Of a compressed body of latent keys: what key_decode is in whole numbers, where it is at hand; null: made anew for the step.
  const LatentLevels* levels;
};

// Refuses (1 and a sentence) rows that do not fit the tail of a state that has passed check_state, and tables that do not fit the rows.
int check_rows(const LayerParams& params, const StepInputs& in, const StateHeader& header);

// Writes y [rows][q_heads][value_dim] and the tail of `state`. Returns 0, or 1 with a sentence (error.h) and nothing changed.
// The result does not depend on how `parallel` distributes the work, nor a row's on the rows beside it, to the last bit.
int attend_step(const LayerParams& params, const StepInputs& in, void* state, int64_t bytes, float* y, Parallel& parallel);

// Slots per row that retrieve_step chooses in this state: its header's `retrieve`, at most what the body holds. The state must have
// passed check_state.
int64_t retrieved_slots(const LayerParams& params, const void* state);

// Writes slots [kv_heads][rows][retrieved_slots]: the body slots that each row should attend to, ascending, -1 behind the last where
// a row sees fewer. Reads in.q, in.rows, in.position and the tables; of the state only the traffic counters change. Returns 0, or 1
// with a sentence.
// With in.scored each row's slots are followed by their scores, which a step with the same q at the same position need not find again.
int retrieve_step(const LayerParams& params, const StepInputs& in, void* state, int64_t bytes, int32_t* slots, Parallel& parallel);

}  // namespace edgekv
