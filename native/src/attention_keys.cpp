// See attention_keys.h.
#include "attention_keys.h"

#include <cstring>

#include "kv_layout.h"

namespace mill {

void point_ahead(const Workspace& w, const Op& op, const Pass& pass, int kv_head, int span, SpanArgs* args) {
  const AttentionPlan& plan = *w.attention.plan;
  const tm_kv& kv = *op.op.kv;
  args->num_next = 0;
  if (kv.block_size % kLanes != 0) return;
  const KVLayout layout(kv);
  args->next_bytes = layout.key_bytes() / (kv.block_size / kLanes);
  const int32_t* table = w.table_of(kv, pass.sequence);
  const int limit = plan.rows[pass.begin + pass.num_rows - 1].limit, num_chunks = ceil_div(std::min(kSpan, limit - span * kSpan), kLanes);
  int place = span * kSpan / kv.block_size, slot = span * kSpan % kv.block_size;
  while (args->num_next < num_chunks) {
    args->next_keys[args->num_next++] = layout.keys(layout.block(op.op.layer, table[place]), kv_head) + slot / kLanes * args->next_bytes;
    slot += kLanes;
    if (slot < kv.block_size) continue;
    slot = 0;
    place++;
  }
}

void fill_keys(const Workspace& w, const Op& op, int sequence, int kv_head, int span, int num_keys, float* gather,
               SpanArgs* args) {
  const tm_kv& kv = *op.op.kv;
  const KVLayout layout(kv);
  const int64_t value_bytes = layout.is_codes() ? 1 : kv.dtype == kF32 ? 4 : 2;
  const int32_t* table = w.table_of(kv, sequence);
  const int64_t key_unit = layout.is_codes() ? 4 : value_bytes;  // what lies together of one key
  const int num_units = layout.is_codes() ? ceil_div(kv.head_dim, 4) : kv.head_dim;
  if (kv.block_size % kLanes == 0) {
    args->k_stride = layout.is_codes() ? 4 * kv.block_size : kv.block_size;
    int place = span * kSpan / kv.block_size, slot = span * kSpan % kv.block_size;
    for (int chunk = 0; chunk * kLanes < num_keys; chunk++) {
      uint8_t* block = layout.block(op.op.layer, table[place]);
      args->k_chunks[chunk] = layout.keys(block, kv_head) + slot * key_unit;
      args->v_chunks[chunk] = layout.values(block, kv_head) + static_cast<int64_t>(slot) * kv.head_dim * value_bytes;
      args->k_scales[chunk] = layout.k_scales(block, kv_head) + slot;
      args->v_scales[chunk] = layout.v_scales(block, kv_head) + slot;
      slot += kLanes;
      if (slot < kv.block_size) continue;
      slot = 0;
      place++;
    }
    return;
  }
  args->k_stride = layout.is_codes() ? 4 * kLanes : kLanes;
  float* scales = gather;
  uint8_t* to = reinterpret_cast<uint8_t*>(layout.is_codes() ? gather + 2 * kSpan : gather);
  for (int chunk = 0; chunk * kLanes < num_keys; chunk++) {
    uint8_t *keys = to, *values = to + kLanes * num_units * key_unit;
    to = values + kLanes * kv.head_dim * value_bytes;
    args->k_chunks[chunk] = keys;
    args->v_chunks[chunk] = values;
    args->k_scales[chunk] = scales;
    args->v_scales[chunk] = scales + kLanes;
    for (int i = 0; i < kLanes && chunk * kLanes + i < num_keys; i++) {
      const int position = span * kSpan + chunk * kLanes + i, slot = position % kv.block_size;
      uint8_t* block = layout.block(op.op.layer, table[position / kv.block_size]);
      const uint8_t *from_keys = layout.keys(block, kv_head), *from_values = layout.values(block, kv_head);
      for (int64_t d = 0; d < num_units; d++)
        std::memcpy(keys + (d * kLanes + i) * key_unit, from_keys + (d * kv.block_size + slot) * key_unit, key_unit);
      if (layout.is_codes()) {
        for (int64_t c = 0; c < kv.head_dim; c++)
          values[(i / 4 * kv.head_dim + c) * 4 + i % 4] = from_values[(slot / 4 * kv.head_dim + c) * 4 + slot % 4];
        scales[i] = layout.k_scales(block, kv_head)[slot];
        scales[kLanes + i] = layout.v_scales(block, kv_head)[slot];
      } else {
        const int64_t row_bytes = kv.head_dim * value_bytes;
        std::memcpy(values + i * row_bytes, from_values + slot * row_bytes, row_bytes);
      }
    }
    scales += 2 * kLanes;
  }
}

}  // namespace mill
