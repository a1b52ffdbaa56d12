// A unit is 64 rows, since where words lie by columns 64 of them fill a few lines of the cache. It takes eight columns at a
// time: their codes for all of the rows, then turned round in squares of eight.
#include "recode_integers.h"

#include <algorithm>
#include <cstring>

#include "kernels.h"
#include "pack.h"
#include "recode.h"

namespace mill {

namespace {

constexpr int kRows = 64, kCols = 256, kSquare = 8;
constexpr uint64_t kOnes = 0x0101010101010101u;

struct Tile {
  int8_t codes[kRows][kCols];
};

int column_of(const tm_codes& from, int col) { return from.order == nullptr ? col : from.order[col]; }

// Four nibbles -> bytes 0, 2, 4 and 6.
uint64_t every_other_byte(uint64_t nibbles) {
  const uint64_t pairs = (nibbles | nibbles << 24) & 0x000000ff000000ffu;
  return (pairs | pairs << 12) & 0x000f000f000f000fu;
}

// `count` rows of one column; `to` has room for kRows.
void read_column(const tm_codes& from, int first, int count, int col, uint8_t* to) {
  const int per_word = 32 / from.bits, shift = col % per_word * from.bits;
  const uint32_t mask = (1u << from.bits) - 1;
  if (from.layout == TM_CODES_AWQ) {
    const uint32_t* words = from.words + col * from.line_words + first / 8;
    for (int i = 0; i < count / 8; i++) {
      const uint64_t codes = every_other_byte(words[i] & 0xffff) | every_other_byte(words[i] >> 16) << 8;
      std::memcpy(to + i * 8, &codes, 8);
    }
    return;
  }
  const uint32_t* words = from.words + col / per_word * from.line_words + first;
  for (int i = 0; i < count; i++) to[i] = static_cast<uint8_t>(words[i] >> shift & mask);
}

// Byte j of word i becomes byte i of word j.
void turn(uint64_t* words) {
  constexpr uint64_t kMasks[] = {0x00ff00ff00ff00ffu, 0x0000ffff0000ffffu, 0x00000000ffffffffu};
  for (int step = 0; step < 3; step++) {
    const int gap = 1 << step, bits = 8 * gap;
    for (int i = 0; i < kSquare; i++) {
      if (i & gap) continue;
      const uint64_t low = words[i], high = words[i + gap], mask = kMasks[step];
      words[i] = (low & mask) | (high & mask) << bits;
      words[i + gap] = (low >> bits & mask) | (high & ~mask);
    }
  }
}

// Bytes less `what`, each.
uint64_t minus(uint64_t bytes, uint64_t what) {
  const uint64_t high = 128 * kOnes;
  return ((bytes | high) - (what & ~high)) ^ ((bytes ^ ~what) & high);
}

void read_by_columns(const tm_codes& from, int first, int count, int col, int num_cols, Tile* tile) {
  uint8_t columns[kSquare][kRows] = {};
  const uint64_t what = static_cast<uint64_t>(from.minus) * kOnes;
  for (int at = 0; at < num_cols; at += kSquare) {
    for (int i = 0; i < kSquare; i++) read_column(from, first, count, column_of(from, col + at + i), columns[i]);
    for (int row = 0; row < count; row += kSquare) {
      uint64_t square[kSquare];
      for (int i = 0; i < kSquare; i++) std::memcpy(square + i, columns[i] + row, 8);
      turn(square);
      for (int i = 0; i < kSquare; i++) {
        const uint64_t codes = minus(square[i], what);
        std::memcpy(tile->codes[row + i] + at, &codes, 8);
      }
    }
  }
}

void read_by_rows(const tm_codes& from, int first, int count, int col, int num_cols, Tile* tile) {
  const int log_bits = from.bits == 2 ? 1 : from.bits == 4 ? 2 : 3;  // no division for each code
  const uint32_t mask = (1u << from.bits) - 1;
  for (int row = 0; row < count; row++) {
    const uint32_t* words = from.words + (first + row) * from.line_words;
    for (int i = 0; i < num_cols; i++) {
      const int at = column_of(from, col + i);
      const uint32_t code = words[at << log_bits >> 5] >> (at << log_bits & 31) & mask;
      tile->codes[row][i] = static_cast<int8_t>(code - static_cast<uint32_t>(from.minus));
    }
  }
}

void write_row(const tm_codes& from, int32_t kind, int row, int col, int num_cols, const int8_t* codes, uint8_t* out) {
  const int halves = has_halves(kind) ? 2 : 1;
  const int64_t num_scales = from.num_cols / from.group_size;
  for (int group = 0; group < num_cols; group += kGroup) {
    for (const uint16_t* values : {from.scales, from.minima}) {
      if (values == nullptr) continue;
      for (int half = 0; half < halves; half++, out += 2)
        std::memcpy(out, values + row * num_scales + (col + group + half * 16) / from.group_size, 2);
    }
    write_codes(kind, codes + group, out);
    out += code_bytes(kind);
  }
}

}  // namespace

const char* wrong_codes(const tm_codes& from, int32_t to_kind) {
  const bool by_row = from.layout == TM_CODES_BY_ROW, awq = from.layout == TM_CODES_AWQ;
  if (!by_row && !awq && from.layout != TM_CODES_BY_COLUMN) return "unknown layout of codes";
  if (from.bits != 4 && (awq || (from.bits != 2 && from.bits != 8))) return "codes of so many bits cannot be recoded";
  if (!is_quantised(to_kind) || is_integer(to_kind) || is_super(to_kind) || is_five(to_kind) || is_looked_up(to_kind)) return "codes cannot become this kind";
  if (has_minima(to_kind) != (from.minima != nullptr)) return "minima do not go with the kind";
  if (from.num_rows < 1 || from.num_cols < 1 || from.num_cols % kGroup != 0) return "bad matrix size";
  if (from.group_size < 16 || from.group_size % (has_halves(to_kind) ? 16 : kGroup) != 0) return "bad group size";
  if (from.num_cols % from.group_size != 0 || from.minus < 0 || from.minus > 128) return "bad groups";
  if (awq && from.num_rows % 8 != 0) return "rows are not whole words";
  const int64_t per_word = 32 / from.bits, col_words = (from.num_cols + per_word - 1) / per_word;
  const int64_t lines = by_row ? from.num_rows : awq ? from.num_cols : col_words;
  const int64_t line = by_row ? col_words : awq ? from.num_rows / 8 : from.num_rows;
  if (from.line_words < line || from.num_words < (lines - 1) * from.line_words + line) return "too few words";
  if (from.order != nullptr)
    for (int i = 0; i < from.num_cols; i++)
      if (from.order[i] < 0 || from.order[i] >= from.num_cols) return "a column lies outside of the matrix";
  return nullptr;
}

void recode_integers(Team* team, const tm_codes& from, int32_t to_kind, uint8_t* out) {
  const int64_t row_bytes = raw_row_bytes(to_kind, from.num_cols), group_bytes = raw_row_bytes(to_kind, kGroup);
  const auto read = from.layout == TM_CODES_BY_ROW ? read_by_rows : read_by_columns;
  team->for_each((from.num_rows + kRows - 1) / kRows, [&](int unit, int) {
    const int first = unit * kRows, count = std::min(kRows, from.num_rows - first);
    Tile tile;
    for (int col = 0; col < from.num_cols; col += kCols) {
      const int num_cols = std::min(kCols, from.num_cols - col);
      read(from, first, count, col, num_cols, &tile);
      for (int row = 0; row < count; row++)
        write_row(from, to_kind, first + row, col, num_cols, tile.codes[row], out + (first + row) * row_bytes + col / kGroup * group_bytes);
    }
  });
}

}  // namespace mill
