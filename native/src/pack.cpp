// Quantised blocks are moved, never requantised: a 4-bit block's 16 code bytes are four words of the tile as they are,
// because both keep codes 0..15 in the low and 16..31 in the high nibbles.
#include "integer_fit.h"
#include "pack.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "half.h"
#include "recode.h"

namespace mill {

namespace {

// Scales, (minima), codes of 32 values, or of a super-block.
constexpr int64_t kRawBlockBytes[kNumKinds] = {0, 0, 0, 18, 20, 34, 36, 36, 40, 84, 110, 144, 176, 210, 22, 18, 20, 34, 0, 17, 18};

const uint8_t* find_row(const RawRows& rows, int64_t row, int64_t row_bytes) {
  for (int i = 0; i < rows.count; i++) {
    if (row < rows.num_rows[i]) return rows.data[i] + row * row_bytes;
    row -= rows.num_rows[i];
  }
  return nullptr;
}

// The rows of one tile; `count` of them exist.
struct TileRows {
  const uint8_t* row[kLanes];
  int count;
  const IntegerFit* fits[kLanes];  // of integer kinds: those of the row's blocks, or null
};

// Word i of every row, next to each other, for i in [0, num_words).
void interleave(const TileRows& from, int64_t at, int64_t num_words, uint32_t flips, uint8_t* to) {
  for (int64_t i = 0; i < num_words; i++)
    for (int lane = 0; lane < from.count; lane++) {
      uint32_t word;
      std::memcpy(&word, from.row[lane] + at + i * 4, 4);
      word ^= flips;
      std::memcpy(to + (i * kLanes + lane) * 4, &word, 4);
    }
}

void pack_quantised(int32_t kind, int64_t num_groups, const TileRows& from, uint8_t* tile) {
  const int codes = code_bytes(kind);
  const int64_t group_bytes = kRawBlockBytes[kind];
  const int size = kind == kMXFP4 ? 1 : 2;  // of a scale or minimum
  for (int64_t g = 0; g < num_groups; g++) {
    for (int lane = 0; lane < from.count; lane++)
      for (int i = 0; i < group_bytes - codes; i += size)
        std::memcpy(tile + scales_at(kind, g) + i * kLanes + lane * size, from.row[lane] + g * group_bytes + i, size);
    interleave(from, (g + 1) * group_bytes - codes, codes / 4, is_wide(kind) ? 0x80808080u : 0, tile + codes_at(kind, g));
  }
}

// A row's super-blocks are in the tile's order already: scale, (minimum), words.
void pack_superblocks(int32_t kind, int64_t num_cols, const TileRows& from, uint8_t* tile) {
  const int64_t block_bytes = kRawBlockBytes[kind], halves = has_minima(kind) ? 2 : 1;
  for (int64_t at = 0; at < raw_row_bytes(kind, num_cols); at += block_bytes, tile += block_bytes * kLanes) {
    for (int lane = 0; lane < from.count; lane++)
      for (int half = 0; half < halves; half++)
        std::memcpy(tile + (half * kLanes + lane) * 2, from.row[lane] + at + half * 2, 2);
    interleave(from, at + halves * 2, (block_bytes - halves * 2) / 4, 0, tile + halves * kLanes * 2);
  }
}

// Groups of a row whose scales become one: value = scale * w, w as in integer_weights.inc.
class IntegerBlock {
 public:
  IntegerBlock(int32_t kind, const uint8_t* data, int64_t num_groups)
      : kind_(kind), data_(data), num_groups_(num_groups), group_bytes_(kRawBlockBytes[kind]) {
    float most = 0;
    for (int64_t g = 0; g < num_groups; g++) most = std::max(most, largest(g));
    scale_ = std::isfinite(most) ? most / (kind == kW4M ? kMostSum : kMostWeight) : 0;
    unit_ = kind == kW4M ? scale_ / 16 : scale_;
    if (kind == kW4 && scale_ > 1e-30f) fit();
  }
  // The same of a fit that is known.
  IntegerBlock(int32_t kind, const uint8_t* data, int64_t num_groups, const IntegerFit& fit)
      : kind_(kind), data_(data), num_groups_(num_groups), group_bytes_(kRawBlockBytes[kind]), scale_(fit.scale), unit_(fit.unit) {}

  IntegerFit fitted() const { return {unit_, scale_}; }
  float scale() const { return scale_; }
  // Of 4-bit codes.
  int multiplier(int64_t g) const { return nearest(8 * step(g)); }
  int offset(int64_t g) const { return nearest(middle(g)) + 8; }  // 8 of 16: halves up
  // Of 8-bit codes.
  int weight(int64_t g, int k) const { return nearest(step(g) * static_cast<float>(codes(g)[k])); }

  // How much of its groups rounding spoils: 1 for a group to which it adds as much noise as making 4-bit codes did, or
  // would have, or more. Infinite where it cannot be done.
  float spoilt() const {
    const float variance = kind_ == kW8 ? 1600.0f : 21.25f;  // of codes, as they mostly are
    const float bearable = variance / 21.25f;
    float sum = 0;
    for (int64_t g = 0; g < num_groups_; g++) {
      const float d = step(g);
      if (!std::isfinite(d) || !std::isfinite(middle(g))) return INFINITY;  // integers would make numbers of it
      const float of_step = kind_ == kW8 ? 0 : d - unit_ * nearest(8 * d) / 8;
      const float of_middle = middle(g) - unit_ * nearest(middle(g));
      const float of_weights = std::min(scale_ * scale_ / 12, variance * d * d);
      const float added = of_weights + variance * of_step * of_step + of_middle * of_middle;
      if (!std::isfinite(added)) return INFINITY;
      if (added > 0) sum += std::min(1.0f, added / (bearable * d * d / 12));
    }
    return sum / static_cast<float>(num_groups_);
  }

 private:
  static constexpr float kMostWeight = 127;
  static constexpr float kMostSum = 126.4f;  // leaves room for rounding a multiplier, an offset and their sum

  void fit() {
    float steps[2 * kMostExactSteps];
    for (int64_t g = 0; g < num_groups_; g++) {
      steps[g] = step(g);
      if (!std::isfinite(steps[g])) return;
    }
    const IntegerFit best = fit_products(steps, static_cast<int>(num_groups_), scale_);
    scale_ = best.scale;
    unit_ = best.unit;
  }

  // Size that no value of the group exceeds.
  float largest(int64_t g) const {
    if (kind_ == kW4M) return std::max(std::fabs(half(g, 1)), std::fabs(half(g, 1) + 15 * step(g)));
    if (kind_ != kW8) return 8 * std::fabs(step(g));
    int most = 0;
    for (int k = 0; k < kGroup; k++) most = std::max(most, std::abs(static_cast<int>(codes(g)[k])));
    return std::fabs(step(g)) * static_cast<float>(most);
  }
  float half(int64_t g, int index) const {
    uint16_t bits;
    std::memcpy(&bits, data_ + g * group_bytes_ + 2 * index, 2);
    return half_to_float(bits);
  }
  float step(int64_t g) const { return half(g, 0); }
  float middle(int64_t g) const { return kind_ == kW4M ? 8 * half(g, 0) + half(g, 1) : 0; }  // what code 8 stands for
  const int8_t* codes(int64_t g) const { return reinterpret_cast<const int8_t*>(data_ + g * group_bytes_ + 2); }
  int nearest(float value) const { return unit_ == 0 ? 0 : static_cast<int>(std::nearbyint(value / unit_)); }

  int32_t kind_;
  const uint8_t* data_;
  int64_t num_groups_, group_bytes_;
  float scale_, unit_;  // unit: of multipliers' products and offsets, and of weights
};

// `function(block of a row, its first group, its number)` for every block. fits: of the row's blocks; null: not known.
template <class Function>
void each_block(int32_t kind, const uint8_t* row, int64_t num_groups, const IntegerFit* fits, const Function& function) {
  const int64_t size = exact_groups(kind, static_cast<int>(num_groups));
  for (int64_t first = 0; first < num_groups; first += size) {
    const int64_t count = std::min(size, num_groups - first);
    const uint8_t* data = row + first * kRawBlockBytes[kind];
    const int64_t index = first / size;
    function(fits == nullptr ? IntegerBlock(kind, data, count) : IntegerBlock(kind, data, count, fits[index]), first, count, index);
  }
}

void pack_integer(int32_t kind, int64_t num_groups, const TileRows& from, uint8_t* tile) {
  const int codes_bytes = code_bytes(kind);
  uint8_t* factors = tile + integer_codes(kind, num_groups);
  float* scales = reinterpret_cast<float*>(factors + num_groups * factor_bytes(kind));
  const int64_t group_bytes = kRawBlockBytes[kind];
  if (kind == kW8) std::memset(tile, 0, static_cast<size_t>(integer_codes(kind, num_groups)));
  for (int row = 0; row < from.count; row++)
    each_block(kind, from.row[row], num_groups, from.fits[row],
               [&](const IntegerBlock& block, int64_t first, int64_t count, int64_t index) {
      scales[index * kLanes + row] = block.scale();
      for (int64_t g = first; g < first + count; g++) {
        uint8_t* to = tile + g * codes_bytes * kLanes;
        if (kind == kW8) {
          for (int k = 0; k < kGroup; k++) to[integer_code_at(kind, row, k)] = static_cast<uint8_t>(block.weight(g - first, k));
          continue;
        }
        uint8_t* of_group = factors + g * factor_bytes(kind);
        int16_t* words = reinterpret_cast<int16_t*>(of_group);
        if (kind == kW4) of_group[row] = static_cast<uint8_t>(block.multiplier(g - first));
        else words[row] = static_cast<int16_t>(block.multiplier(g - first));
        if (kind == kW4M) words[kLanes + row] = static_cast<int16_t>(block.offset(g - first));
        const uint8_t* codes = from.row[row] + (g + 1) * group_bytes - codes_bytes;
        for (int k = 0; k < codes_bytes; k++) to[integer_code_at(kind, row, k)] = codes[k] ^ 0x88;
      }
    });
}

// Pairs of bf16 weights as words; what is too small to count (see half.h) becomes zero.
void pack_bf16(int64_t num_cols, const TileRows& from, uint8_t* tile) {
  interleave(from, 0, num_cols / 2, 0, tile);
  if (num_cols % 2)
    for (int lane = 0; lane < kLanes; lane++) {
      uint32_t word = 0;
      if (lane < from.count) std::memcpy(&word, from.row[lane] + (num_cols - 1) * 2, 2);
      std::memcpy(tile + (num_cols / 2 * kLanes + lane) * 4, &word, 4);
    }
  uint16_t* values = reinterpret_cast<uint16_t*>(tile);
  for (int64_t i = 0; i < (num_cols + 1) / 2 * 2 * kLanes; i++)
    values[i] = (values[i] & 0x7fffu) < 0x2380u ? 0 : values[i];
}

// A tile of bf16, filled up to whole groups of its packed form, and its high bytes: those to be looked up, and which one a value has.
class HighBytes {
 public:
  HighBytes(int64_t num_cols, const TileRows& from) : pairs_(packed_groups(num_cols) * 4 * kLanes * 4) {
    pack_bf16(num_cols, from, pairs_.data());
    std::array<int64_t, 256> counts = {};
    const int64_t num_values = (num_cols + 1) / 2 * 2 * kLanes;
    for (int64_t i = 0; i < num_values; i++) counts[pairs_[2 * i + 1]]++;
    std::array<uint8_t, 256> order;
    std::iota(order.begin(), order.end(), uint8_t{0});
    std::stable_sort(order.begin(), order.end(), [&](uint8_t a, uint8_t b) { return counts[a] > counts[b]; });
    index_.fill(kNone);
    num_others_ = num_values;
    for (int i = 0; i < 16; i++) {
      most_[i] = order[i];
      index_[order[i]] = static_cast<uint8_t>(i);
      num_others_ -= counts[order[i]];
    }
    // What fills up is multiplied by zero, so any finite value will do: with a low byte of zero all are.
    for (int64_t i = num_values; 2 * i < static_cast<int64_t>(pairs_.size()); i++) pairs_[2 * i + 1] = most_[0];
  }
  static constexpr uint8_t kNone = 255;
  uint8_t low(int64_t i) const { return pairs_[2 * i]; }
  uint8_t high(int64_t i) const { return pairs_[2 * i + 1]; }
  uint8_t index(int64_t i) const { return index_[high(i)]; }
  const std::array<uint8_t, 16>& most() const { return most_; }
  int64_t num_others() const { return num_others_; }

 private:
  std::vector<uint8_t> pairs_;
  std::array<uint8_t, 16> most_;
  std::array<uint8_t, 256> index_;
  int64_t num_others_;
};

// Where the low byte of a value of a group lies behind its indices, value 2 * row + k % 2 of a step; the index lies 64 or 128 bytes before.
int64_t packed_low_at(int64_t step, int64_t value) { return 64 + step % 4 / 2 * 64 + value / 8 * 16 + step % 2 * 8 + value % 8; }

// fits_packed was asked before.
void pack_bf16p(int64_t num_cols, const TileRows& from, uint8_t* tile) {
  const HighBytes bytes(num_cols, from);
  uint8_t* tail = tile + packed_groups(num_cols) * kPackedGroup;
  std::memset(tile, 0, static_cast<size_t>(tile_bytes(kBF16P, num_cols)));
  std::copy(bytes.most().begin(), bytes.most().end(), tail);
  uint32_t num_patches = 0;
  for (int64_t step = 0; step < packed_groups(num_cols) * 4; step++)
    for (int64_t value = 0; value < 2 * kLanes; value++) {
      const int64_t i = step * 2 * kLanes + value, low_at = packed_low_at(step, value);
      uint8_t* group = tile + step / 4 * kPackedGroup;
      group[low_at] = bytes.low(i);
      const uint8_t index = bytes.index(i);
      if (index != HighBytes::kNone) {
        group[low_at % 64] |= static_cast<uint8_t>(step % 4 < 2 ? index : index << 4);
      } else if (num_patches < most_patches(num_cols)) {
        const uint32_t patch = static_cast<uint32_t>(step << 13 | value << 8 | bytes.high(i));
        std::memcpy(tail + 20 + 4 * num_patches++, &patch, 4);
      }
    }
  std::memcpy(tail + 16, &num_patches, 4);
}

void pack_f16(int64_t num_cols, const TileRows& from, uint8_t* tile) {
  for (int64_t k = 0; k < num_cols; k++)
    for (int lane = 0; lane < from.count; lane++)
      std::memcpy(tile + (k * kLanes + lane) * 2, from.row[lane] + k * 2, 2);
}

void pack_tile(int32_t kind, int64_t num_cols, const TileRows& from, uint8_t* tile) {
  switch (kind) {
    case kF32: return interleave(from, 0, num_cols, 0, tile);
    case kF16: return pack_f16(num_cols, from, tile);
    case kBF16: return pack_bf16(num_cols, from, tile);
    case kBF16P: return pack_bf16p(num_cols, from, tile);
    case kW4:
    case kW4M:
    case kW8: return pack_integer(kind, num_cols / kGroup, from, tile);
    default: return is_super(kind) ? pack_superblocks(kind, num_cols, from, tile) : pack_quantised(kind, num_cols / kGroup, from, tile);
  }
}

}  // namespace

int64_t tile_bytes(int32_t kind, int64_t num_cols) {
  const int64_t groups = num_cols / kGroup;
  int64_t bytes = 0;
  switch (kind) {
    case kF32: bytes = num_cols * kLanes * 4; break;
    case kF16: bytes = num_cols * kLanes * 2; break;
    case kBF16: bytes = (num_cols + 1) / 2 * kLanes * 4; break;
    case kBF16P: bytes = packed_groups(num_cols) * kPackedGroup + packed_tail(num_cols); break;
    case kW4:
    case kW4M:
    case kW8:
      bytes = integer_codes(kind, groups) + groups * factor_bytes(kind) + 64 * num_exact_blocks(kind, static_cast<int>(groups));
      break;
    case kQ2_K:
    case kQ3_K:
    case kQ4_K:
    case kQ5_K:
    case kQ6_K: bytes = kLanes * raw_row_bytes(kind, num_cols); break;
    default: bytes = groups > 0 ? codes_at(kind, groups - 1) + kLanes * code_bytes(kind) : 0;
  }
  return (bytes + 63) / 64 * 64;
}

int64_t raw_row_bytes(int32_t kind, int64_t num_cols) {
  if (kind == kF32) return num_cols * 4;
  if (!is_quantised(kind)) return num_cols * 2;
  return num_cols / block_values(kind) * kRawBlockBytes[kind];
}

bool fits_integer(Team* team, int32_t kind, const RawRows& rows, int64_t num_cols, IntegerFit* fits_out) {
  constexpr double kMost = 0.2;  // on average
  const int64_t row_bytes = raw_row_bytes(kind, num_cols), row_blocks = integer_blocks(num_cols, kind);
  int64_t total = 0;
  for (int i = 0; i < rows.count; i++) total += rows.num_rows[i];
  constexpr int64_t kUnits = 1 << 20;  // integers, so that the order of sums does not matter
  std::atomic<int64_t> noise{0}, num_blocks{0};
  std::atomic<bool> fits{true};
  team->for_each(static_cast<int>((total + kLanes - 1) / kLanes), [&](int tile, int) {
    for (int64_t row = static_cast<int64_t>(tile) * kLanes; row < std::min<int64_t>(total, tile * kLanes + kLanes) && fits; row++)
      each_block(kind, find_row(rows, row, row_bytes), num_cols / kGroup, nullptr,
                 [&](const IntegerBlock& block, int64_t, int64_t, int64_t index) {
                   fits_out[row * row_blocks + index] = block.fitted();
                   const float spoilt = block.spoilt();
                   if (!std::isfinite(spoilt)) fits = false;
                   else noise += static_cast<int64_t>(spoilt * kUnits);
                   num_blocks++;
                 });
  });
  return fits && static_cast<double>(noise) <= kMost * kUnits * static_cast<double>(num_blocks);
}

static TileRows tile_rows(const RawRows& rows, int64_t row_bytes, int64_t num_rows, int tile) {
  TileRows from = {};
  from.count = static_cast<int>(std::min<int64_t>(kLanes, num_rows - tile * kLanes));
  for (int lane = 0; lane < from.count; lane++) from.row[lane] = find_row(rows, static_cast<int64_t>(tile) * kLanes + lane, row_bytes);
  return from;
}

bool fits_packed(Team* team, const RawRows& rows, int64_t num_cols) {
  if (num_cols > kMostPackedCols) return false;
  int64_t num_rows = 0;
  for (int i = 0; i < rows.count; i++) num_rows += rows.num_rows[i];
  std::atomic<bool> fits{true};
  team->for_each(static_cast<int>((num_rows + kLanes - 1) / kLanes), [&](int tile, int) {
    const TileRows from = tile_rows(rows, raw_row_bytes(kBF16, num_cols), num_rows, tile);
    if (fits && HighBytes(num_cols, from).num_others() > most_patches(num_cols)) fits = false;
  });
  return fits;
}

void pack(Team* team, const RawRows& rows, const Part& part, const IntegerFit* fits, uint8_t* out) {
  const int64_t stride = tile_bytes(part.kind, part.num_cols);
  const int64_t row_bytes = raw_row_bytes(part.kind, part.num_cols);
  const int num_tiles = (part.num_rows + kLanes - 1) / kLanes;
  team->for_each(num_tiles, [&](int tile, int) {
    uint8_t* to = out + tile * stride;
    TileRows from = tile_rows(rows, row_bytes, part.num_rows, tile);
    if (from.count < kLanes) std::memset(to, 0, stride);
    if (fits != nullptr)
      for (int lane = 0; lane < from.count; lane++)
        from.fits[lane] = fits + (static_cast<int64_t>(tile) * kLanes + lane) * integer_blocks(part.num_cols, part.kind);
    pack_tile(part.kind, part.num_cols, from, to);
  });
}

static void unpack_integer(const Part& part, const uint8_t* tile, int row, float* out) {
  const int64_t num_groups = part.num_cols / kGroup, group_bytes = code_bytes(part.kind) * kLanes;
  const uint8_t* factors = tile + integer_codes(part.kind, num_groups);
  const float* scales = reinterpret_cast<const float*>(factors + num_groups * factor_bytes(part.kind));
  const int64_t block_groups = exact_groups(part.kind, static_cast<int>(num_groups));
  for (int64_t g = 0; g < num_groups; g++) {
    const uint8_t* of_group = factors + g * factor_bytes(part.kind);
    const int16_t* words = reinterpret_cast<const int16_t*>(of_group);
    const int m = part.kind == kW4 ? static_cast<int8_t>(of_group[row]) : part.kind == kW4M ? words[row] : 0;
    const int b = part.kind == kW4M ? words[kLanes + row] : 0;
    for (int k = 0; k < kGroup; k++) {
      const uint8_t byte = tile[g * group_bytes + integer_code_at(part.kind, row, k)];
      const int w = integer_weight(part.kind, integer_code(part.kind, byte, k), m, b);
      out[g * kGroup + k] = scales[g / block_groups * kLanes + row] * static_cast<float>(w);
    }
  }
}

// The code of value k of a group, or what it stands for. from: the lane's bytes of the first of its words.
static int code_of(int32_t kind, const uint8_t* from, int k) {
  const int word = k % 16 / 4;
  const auto byte = [&](int of_word) { return from[of_word * 64 + k % 4]; };
  const auto pair = [&](int first) { return byte(first + k / 16) >> 2 * word & 3; };
  const auto bit = [&](int of_word) { return byte(of_word) >> k / 4 & 1; };
  const auto nibble = [&] { return k < 16 ? byte(word) & 15 : byte(word) >> 4; };
  if (is_looked_up(kind)) return values_of(kind)[nibble()];
  const int code = is_wide(kind) ? byte(k / 4) : kind == kQ2_K ? pair(0) : kind == kQ3_K ? pair(0) | bit(2) << 2
                 : kind == kQ6_K ? nibble() | pair(4) << 4 : is_five(kind) ? nibble() | bit(4) << 4 : nibble();
  return code - code_offset(kind);
}

// See kernels.h.
static void unpack_superblocks(const Part& part, const uint8_t* tile, int64_t lane, float* out) {
  const int halves = has_minima(part.kind) ? 2 : 1, per_scale = has_halves(part.kind) ? 16 : kGroup;
  const uint8_t* block = tile;
  const auto product = [&](int half, int factor) {
    uint16_t value;
    std::memcpy(&value, block + (half * kLanes + lane) * 2, 2);
    const float exact = half_to_float(value) * static_cast<float>(factor);
    return rounds_products(part.kind) ? half_to_float(float_to_half(exact)) : exact;
  };
  for (int64_t k = 0; k < part.num_cols; k += kSuperblock, block += kRawBlockBytes[part.kind] * kLanes) {
    const uint8_t* words = block + halves * kLanes * 2 + lane * 4;
    uint8_t packed[16];
    for (int w = 0; w < 4; w++) std::memcpy(packed + w * 4, words + w * 64, 4);
    int8_t scales[16], minima[16];
    read_factors(part.kind, packed, scales, minima);
    const uint8_t* codes = words + factor_words(part.kind) * 64;
    for (int i = 0; i < kSuperblock; i++) {
      const int code = code_of(part.kind, codes + i / kGroup * code_bytes(part.kind) * kLanes, i % kGroup);
      out[k + i] = product(0, scales[i / per_scale]) * static_cast<float>(code);
      if (halves == 2) out[k + i] += product(1, minima[i / per_scale]);
    }
  }
}

static void unpack_bf16p(const Part& part, const uint8_t* tile, int64_t row, float* out) {
  const uint8_t* tail = tile + packed_groups(part.num_cols) * kPackedGroup;
  for (int64_t k = 0; k < part.num_cols; k++) {
    const uint8_t* group = tile + k / 8 * kPackedGroup;
    const int64_t step = k / 2, low_at = packed_low_at(step, 2 * row + k % 2);
    const int index = step % 4 < 2 ? group[low_at % 64] & 15 : group[low_at % 64] >> 4;
    out[k] = bf16_to_float(static_cast<uint16_t>(tail[index] << 8 | group[low_at]));
  }
  uint32_t num_patches, patch;
  std::memcpy(&num_patches, tail + 16, 4);
  for (uint32_t i = 0; i < num_patches; i++) {
    std::memcpy(&patch, tail + 20 + 4 * i, 4);
    const int64_t k = (patch >> 13) * 2 + (patch >> 8 & 1);
    if ((patch >> 9 & 15) == row && k < part.num_cols)
      out[k] = bits_to_float((float_to_bits(out[k]) & 0x00ffffffu) | (patch & 255u) << 24);
  }
}

void unpack_row(const Part& part, int64_t row, float* out) {
  const uint8_t* tile = part.data + row / kLanes * tile_bytes(part.kind, part.num_cols);
  const int64_t lane = row % kLanes;
  if (part.kind == kBF16P) return unpack_bf16p(part, tile, lane, out);
  if (!is_quantised(part.kind)) {
    for (int64_t k = 0; k < part.num_cols; k++) {
      const int64_t at = part.kind == kBF16 ? (k / 2 * kLanes + lane) * 2 + k % 2 : k * kLanes + lane;
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
  if (is_super(part.kind)) return unpack_superblocks(part, tile, lane, out);
  if (is_integer(part.kind)) return unpack_integer(part, tile, static_cast<int>(lane), out);
  const int halves = has_halves(part.kind) ? 2 : 1;
  const auto scale_at = [&](int64_t group, int index) {
    const uint8_t* scales = tile + scales_at(part.kind, group);
    if (part.kind == kMXFP4) return bits_to_float(static_cast<uint32_t>(scales[lane]) << 23);
    uint16_t value;
    std::memcpy(&value, scales + (index * kLanes + lane) * 2, 2);
    return half_to_float(value);
  };
  for (int64_t g = 0; g < num_groups; g++) {
    const uint8_t* from = tile + codes_at(part.kind, g) + lane * 4;
    float* to = out + g * kGroup;
    for (int k = 0; k < kGroup; k++) {
      const int half = k * halves / kGroup;
      to[k] = scale_at(g, half) * static_cast<float>(code_of(part.kind, from, k));
      if (has_minima(part.kind)) to[k] += scale_at(g, halves + half);
    }
  }
}

}  // namespace mill
