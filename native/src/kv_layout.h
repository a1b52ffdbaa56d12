// Where keys and values lie in a block of a KV pool: for each layer K of all KV heads, V of all, and for int8 the scales
// of K and then those of V, [KV heads][block_size] floats each. See core/block.py for what the bytes mean.
#pragma once
#include "../include/tokenmill_native.h"
#include "half.h"
#include "kernels.h"

namespace mill {

class KVLayout {
 public:
  explicit KVLayout(const tm_kv& kv) : kv_(kv) {
    const int64_t size = kv.block_size, width = kv.head_dim;
    const int64_t value_bytes = kv.dtype == kF32 ? 4 : 2;
    k_bytes_ = is_codes() ? (width + 3) / 4 * 4 * size : width * size * value_bytes;
    v_bytes_ = is_codes() ? (size + 3) / 4 * 4 * width : width * size * value_bytes;
  }

  bool is_codes() const { return kv_.dtype == kInt8; }
  int64_t key_bytes() const { return k_bytes_; }  // of a block and head
  int64_t layer_bytes() const { return kv_.num_kv_heads * (k_bytes_ + v_bytes_ + (is_codes() ? 8 * kv_.block_size : 0)); }

  uint8_t* block(int layer, int32_t id) const { return kv_.pool + id * kv_.bytes_per_block + layer * layer_bytes(); }
  uint8_t* keys(uint8_t* block, int head) const { return block + head * k_bytes_; }
  uint8_t* values(uint8_t* block, int head) const { return block + kv_.num_kv_heads * k_bytes_ + head * v_bytes_; }
  float* k_scales(uint8_t* block, int head) const {
    return reinterpret_cast<float*>(block + kv_.num_kv_heads * (k_bytes_ + v_bytes_)) + head * kv_.block_size;
  }
  float* v_scales(uint8_t* block, int head) const { return k_scales(block, kv_.num_kv_heads + head); }

  // Of the channels of int8 keys, and of queries that meet them; null: 1.
  const float* key_factors(int layer, int head) const { return factors(layer, head); }
  const float* query_factors(int layer, int head) const { return factors(kv_.num_layers + layer, head); }

  // The largest value that the type holds, after rounding.
  float limit() const {
    if (kv_.dtype == kF16) return 65519.996f;
    return bits_to_float(kv_.dtype == kBF16 ? 0x7f7f7fff : 0x7f7fffff);
  }

 private:
  const float* factors(int row, int head) const {
    if (kv_.key_factors == nullptr) return nullptr;
    return kv_.key_factors + (static_cast<int64_t>(row) * kv_.num_kv_heads + head) * kv_.head_dim;
  }

  const tm_kv& kv_;
  int64_t k_bytes_, v_bytes_;  // of one head
};

// The same of latents: for each layer [block_size][head_dim] and, for int8, a scale for each token.
class LatentLayout {
 public:
  explicit LatentLayout(const tm_kv& kv)
      : kv_(kv), row_bytes_(static_cast<int64_t>(kv.head_dim) * (kv.dtype == kF32 ? 4 : kv.dtype == kInt8 ? 1 : 2)) {}

  int64_t layer_bytes() const { return kv_.block_size * (row_bytes_ + (kv_.dtype == kInt8 ? 4 : 0)); }
  uint8_t* block(int layer, int32_t id) const { return kv_.pool + id * kv_.bytes_per_block + layer * layer_bytes(); }
  uint8_t* row(uint8_t* block, int slot) const { return block + slot * row_bytes_; }
  // Read and written by bytes: a block of any size may begin anywhere.
  uint8_t* scale(uint8_t* block, int slot) const { return block + kv_.block_size * row_bytes_ + 4 * slot; }

 private:
  const tm_kv& kv_;
  int64_t row_bytes_;
};

}  // namespace mill
