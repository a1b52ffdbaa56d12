// Quantised blocks are moved, never requantised: a 4-bit block's 16 code bytes are four words of the tile as they are,
// because both keep codes 0..15 in the low and 16..31 in the high nibbles.
#include "pack.h"

#include <cstring>

#include "half.h"

namespace mill {

namespace {

constexpr int64_t kRawBlockBytes[kNumKinds] = {0, 0, 0, 18, 20, 34};  // d, (m), codes of 32 values

int code_bytes(int32_t kind) { return kind == kQ8_0 ? 32 : 16; }

const uint8_t* find_row(const RawRows& rows, int64_t row, int64_t row_bytes) {
  for (int i = 0; i < rows.count; i++) {
    if (row < rows.num_rows[i]) return rows.data[i] + row * row_bytes;
    row -= rows.num_rows[i];
  }
  return nullptr;
}

void pack_quantised_lane(int32_t kind, int64_t num_groups, const uint8_t* row, int lane, uint8_t* tile) {
  const int codes = code_bytes(kind);
  const uint8_t flip = kind == kQ8_0 ? 0x80 : 0;
  const int64_t block_bytes = kRawBlockBytes[kind];
  uint8_t* scales = tile + num_groups * codes * kLanes;
  uint8_t* minima = scales + num_groups * kLanes * 2;
  for (int64_t g = 0; g < num_groups; g++) {
    const uint8_t* block = row + g * block_bytes;
    std::memcpy(scales + (g * kLanes + lane) * 2, block, 2);
    if (kind == kQ4_1) std::memcpy(minima + (g * kLanes + lane) * 2, block + 2, 2);
    const uint8_t* from = block + block_bytes - codes;
    uint8_t* to = tile + g * codes * kLanes + lane * 4;
    const uint32_t flips = flip * 0x01010101u;
    for (int word = 0; word < codes / 4; word++) {
      uint32_t value;
      std::memcpy(&value, from + word * 4, 4);
      value ^= flips;
      std::memcpy(to + word * 64, &value, 4);
    }
  }
}

void pack_dense_lane(int value_bytes, int64_t num_cols, const uint8_t* row, int lane, uint8_t* tile) {
  for (int64_t k = 0; k < num_cols; k++)
    std::memcpy(tile + (k * kLanes + lane) * value_bytes, row + k * value_bytes, value_bytes);
}

}  // namespace

int64_t tile_bytes(int32_t kind, int64_t num_cols) {
  const int64_t groups = num_cols / kGroup;
  int64_t bytes = 0;
  switch (kind) {
    case kF32: bytes = num_cols * kLanes * 4; break;
    case kF16:
    case kBF16: bytes = num_cols * kLanes * 2; break;
    case kQ4_0: bytes = groups * kLanes * (16 + 2); break;
    case kQ4_1: bytes = groups * kLanes * (16 + 4); break;
    case kQ8_0: bytes = groups * kLanes * (32 + 2); break;
    default: break;
  }
  return (bytes + 63) / 64 * 64;
}

int64_t raw_row_bytes(int32_t kind, int64_t num_cols) {
  if (kind == kF32) return num_cols * 4;
  if (!is_quantised(kind)) return num_cols * 2;
  return num_cols / kGroup * kRawBlockBytes[kind];
}

void pack(Team* team, const RawRows& rows, const Part& part, uint8_t* out) {
  const int64_t stride = tile_bytes(part.kind, part.num_cols);
  const int64_t row_bytes = raw_row_bytes(part.kind, part.num_cols);
  const int num_tiles = (part.num_rows + kLanes - 1) / kLanes;
  team->for_each(num_tiles, [&](int tile, int) {
    uint8_t* to = out + tile * stride;
    if (part.num_rows - tile * kLanes < kLanes) std::memset(to, 0, stride);
    for (int lane = 0; lane < kLanes; lane++) {
      const int64_t row = static_cast<int64_t>(tile) * kLanes + lane;
      if (row >= part.num_rows) break;
      const uint8_t* from = find_row(rows, row, row_bytes);
      if (is_quantised(part.kind))
        pack_quantised_lane(part.kind, part.num_cols / kGroup, from, lane, to);
      else
        pack_dense_lane(part.kind == kF32 ? 4 : 2, part.num_cols, from, lane, to);
    }
  });
}

void unpack_row(const Part& part, int64_t row, float* out) {
  const uint8_t* tile = part.data + row / kLanes * tile_bytes(part.kind, part.num_cols);
  const int64_t lane = row % kLanes;
  if (!is_quantised(part.kind)) {
    for (int64_t k = 0; k < part.num_cols; k++) {
      const int64_t at = k * kLanes + lane;
      if (part.kind == kF32)
        std::memcpy(out + k, tile + at * 4, 4);
      else {
        uint16_t value;
        std::memcpy(&value, tile + at * 2, 2);
        out[k] = part.kind == kF16 ? half_to_float(value) : bf16_to_float(value);
      }
    }
    return;
  }
  const int64_t num_groups = part.num_cols / kGroup;
  const int codes = code_bytes(part.kind);
  const uint8_t* scales = tile + num_groups * codes * kLanes;
  const uint8_t* minima = scales + num_groups * kLanes * 2;
  for (int64_t g = 0; g < num_groups; g++) {
    uint16_t half;
    std::memcpy(&half, scales + (g * kLanes + lane) * 2, 2);
    const float d = half_to_float(half);
    float m = 0.0f;
    if (part.kind == kQ4_1) {
      std::memcpy(&half, minima + (g * kLanes + lane) * 2, 2);
      m = half_to_float(half);
    }
    const uint8_t* from = tile + g * codes * kLanes + lane * 4;
    float* to = out + g * kGroup;
    for (int i = 0; i < codes; i++) {
      const uint8_t byte = from[i / 4 * 64 + i % 4];
      if (part.kind == kQ8_0) {
        to[i] = d * static_cast<float>(byte - 128);
      } else if (part.kind == kQ4_0) {
        to[i] = d * static_cast<float>((byte & 15) - 8);
        to[i + 16] = d * static_cast<float>((byte >> 4) - 8);
      } else {
        to[i] = d * static_cast<float>(byte & 15) + m;
        to[i + 16] = d * static_cast<float>(byte >> 4) + m;
      }
    }
  }
}

}  // namespace mill
