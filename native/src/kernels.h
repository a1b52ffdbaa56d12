// What the interpreter asks of an instruction set: plain-data arguments and one table of functions.
//
// Every variant is the same source (kernels.inc) over another lane type (lanes_*.h), so a value is made by the same
// IEEE operations in the same order everywhere: the variants agree bit for bit. The scalar lanes are plain loops and
// define the bits. Code compiled with wider instruction flags must not emit inline functions that other files share,
// so these headers and the .inc files use no standard library templates and keep every function static.
#pragma once
#include <stdint.h>

#include "philox.h"

namespace mill {

constexpr int kLanes = 16;    // output rows of a packed tile, keys of a score vector, partial sums of a reduction
constexpr int kGroup = 32;    // values that share one quantisation scale
constexpr int kSuperblock = 256;  // values that share the scale of their groups' scales
constexpr int kPanel = 12;    // activation rows stored next to each other, group by group
constexpr int kGatedGroups = 4;  // groups of inner values whose gates are computed together, then what they are multiplied by
constexpr int kSpan = 256;    // positions of one attention span
constexpr int kMaxTile = 32;  // most query vectors of one attention tile, over all variants
constexpr int kMaxHeadDim = 512;
constexpr int kQueryStride = kMaxHeadDim + 16;  // floats; no power of two, so that queries do not meet in a cache set
constexpr int kPlaneDepth = 256;  // products of int8 that stay below 2^22 in sum
constexpr int kQueryStarts = 2 * kMaxHeadDim / kPlaneDepth;
constexpr int kWidePanel = 16;    // rows of a tile of activation digits
constexpr int kWideStep = 64;     // values of a row in a tile
constexpr int kRoundedPanel = 32;   // rows of bf16 that pass weights together
constexpr int kRoundedSums = 1024;  // theirs with two tiles, or those of half as many with four

enum Activation : int { kSilu = 0, kGelu = 1, kGeluErf = 2, kRelu2 = 4 };
enum Decay : int { kByHead = 0, kByKey = 1, kByValue = 2 };

// 1.5 * 2^23: a float32 whose low mantissa bits count integers, so that adding an int to its bits adds it to its value.
constexpr float kMagic = 12582912.0f;
constexpr int32_t kMagicBits = 0x4B400000;

constexpr float kLog2E = 1.44269504f;  // weights of a softmax are powers of two

enum Kind : int32_t {
  kF32 = 0, kF16 = 1, kBF16 = 2, kQ4_0 = 3, kQ4_1 = 4, kQ8_0 = 5, kQ8_M = 6, kQ8_H = 7, kQ8_HM = 8,
  kQ2_K = 9, kQ3_K = 10, kQ4_K = 11, kQ5_K = 12, kQ6_K = 13, kQ5_0 = 14, kW4 = 15, kW4M = 16, kW8 = 17, kBF16P = 18,
  kMXFP4 = 19, kIQ4_NL = 20, kNumKinds = 21
};

// How a KV pool stores values: kF32, kF16, kBF16, or int8 codes with a scale for each token and head.
constexpr int kInt8 = 3;

// Channels of a head that int8 KV rotates together: see attention_codes.inc.
static inline int rotated_block(int head_dim) { return head_dim & -head_dim; }

static inline bool is_quantised(int32_t kind) { return kind >= kQ4_0 && kind != kBF16P; }
static constexpr bool is_bf16(int32_t kind) { return kind == kBF16 || kind == kBF16P; }
static inline bool is_integer(int32_t kind) { return kind >= kW4 && kind <= kW8; }  // see integer_weights.inc

// Super-blocks, and those whose scales and minima are rounded to f16; codes of 8 bits, of 5; scales for each 16 values rather
// than 32; codes of 4 bits that stand for values of a table; products summed for each 16; minima beside scales; what is added
// to codes; bytes of the codes of 32 values.
static constexpr bool is_super(int32_t kind) { return kind >= kQ2_K && kind <= kQ6_K; }
static constexpr bool rounds_products(int32_t kind) { return kind >= kQ4_K && kind <= kQ6_K; }
static constexpr bool is_wide(int32_t kind) { return kind >= kQ8_0 && kind <= kQ8_HM; }
static constexpr bool is_five(int32_t kind) { return kind == kQ5_0 || kind == kQ5_K; }
static constexpr bool has_halves(int32_t kind) {
  return kind == kQ8_H || kind == kQ8_HM || kind == kQ2_K || kind == kQ3_K || kind == kQ6_K;
}
static constexpr bool is_looked_up(int32_t kind) { return kind == kMXFP4 || kind == kIQ4_NL; }
static constexpr bool sums_halves(int32_t kind) { return has_halves(kind) || kind == kQ5_0; }
static constexpr bool has_minima(int32_t kind) {
  return kind == kQ4_1 || kind == kQ8_M || kind == kQ8_HM || kind == kQ2_K || kind == kQ4_K || kind == kQ5_K;
}
static constexpr int code_offset(int32_t kind) {
  return is_wide(kind) ? 128 : kind == kQ6_K ? 32 : kind == kQ5_0 ? 16 : kind == kQ4_0 ? 8 : kind == kQ3_K ? 4 : 0;
}
static constexpr int factor_bytes(int32_t kind) { return kind == kW4M ? 64 : kind == kW8 ? 0 : 16; }  // of integer kinds, in a tile
static constexpr int code_bytes(int32_t kind) {
  return kind == kQ2_K ? 8 : kind == kQ3_K ? 12 : kind == kQ6_K ? 24 : is_five(kind) ? 20 : is_wide(kind) || kind == kW8 ? 32 : 16;
}
// Of super-blocks: words of factors of a row; bits from one of a half to the next, of one, and what is added to it.
static constexpr int factor_words(int32_t kind) { return kind == kQ2_K || kind == kQ6_K ? 4 : 3; }
static constexpr int factor_step(int32_t kind) { return factor_words(kind) == 4 ? 8 : 6; }
static constexpr int factor_mask(int32_t kind) { return kind == kQ2_K ? 15 : kind == kQ6_K ? 255 : 63; }
static constexpr int factor_offset(int32_t kind) { return kind == kQ3_K ? 32 : kind == kQ6_K ? 128 : 0; }

// Of quantised kinds that are neither integer kinds nor in super-blocks: how many groups a block of a tile holds, bytes of a group's scales and minima,
// bytes of a block, and where a group's scales and codes lie. Minima lie behind the scales.
static constexpr int scale_bytes(int32_t kind) {
  return kind == kMXFP4 ? kLanes : kLanes * 2 * (has_halves(kind) ? 2 : 1) * (has_minima(kind) ? 2 : 1);
}
static constexpr int block_groups(int32_t kind) { return scale_bytes(kind) < 64 ? 64 / scale_bytes(kind) : 1; }
static constexpr int block_bytes(int32_t kind) { return block_groups(kind) * (scale_bytes(kind) + kLanes * code_bytes(kind)); }
static constexpr int64_t scales_at(int32_t kind, int64_t group) {
  return group / block_groups(kind) * block_bytes(kind) + group % block_groups(kind) * scale_bytes(kind);
}
static constexpr int64_t codes_at(int32_t kind, int64_t group) {
  return group / block_groups(kind) * block_bytes(kind) + block_groups(kind) * scale_bytes(kind) +
         group % block_groups(kind) * (kLanes * code_bytes(kind));
}

// Steps of kWideStep inputs that share a scale of their weights and are summed as int32, of `num_steps` in all. Few, so that the
// scale fits; but weights of kW4, whose scale is a fitted one, bear as many as an int32 holds where those are the whole row.
constexpr int kMostExactSteps = 9;
static constexpr int exact_steps(int32_t kind, int num_steps) {
  if (kind == kW4 && num_steps <= kMostExactSteps) return num_steps;
  const int blocks = (num_steps + 4) / 5;
  return (num_steps + blocks - 1) / blocks;
}
// The same in groups, and how many such blocks a row has.
static constexpr int exact_groups(int32_t kind, int num_groups) { return 2 * exact_steps(kind, (num_groups + 1) / 2); }
static constexpr int num_exact_blocks(int32_t kind, int num_groups) {
  const int size = exact_groups(kind, num_groups);
  return (num_groups + size - 1) / size;
}

// What codes of kinds that are looked up stand for; those of kMXFP4 (E2M1 of the OCP Microscaling Formats) are doubled.
constexpr int8_t kE2M1Values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
constexpr int8_t kIQ4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
static constexpr const int8_t* values_of(int32_t kind) { return kind == kMXFP4 ? kE2M1Values : kIQ4Values; }

// One packed matrix: tiles of 16 output rows, K ascending inside a tile, the last tile padded with zeros.
//
//   dense       tile = [K][16 rows] values; of bf16 [K/2][16 rows] pairs, the last one filled up with zero
//   packed bf16 tile = [K/8 groups][192 bytes], then a tail. A group is four steps of 16 pairs, the last one filled up. The low
//               bytes of its values (the last bit of the exponent, and the mantissa) lie in its second and third 64 bytes: of steps
//               0 and 1, 2 and 3, in turns 8 bytes of each. High bytes are looked up: the first 64 bytes hold 4-bit
//               indices in the same order, those of steps 2 and 3 in the upper halves. Tail: the 16 high bytes to be
//               looked up, the number of patches (uint32), and patches by step: high bytes that are not among these, each
//               step << 13 | (2 * row + input of the pair) << 8 | high byte
//   quantised   tile = one stream in the order of use, for short runs from several places are read at half the speed of
//               memory: blocks of whole cache lines, each [groups of the block][scales, minima], then [groups][words] codes;
//               scales and minima are [16] f16, a block one group or, without minima or halves, two. Those of kMXFP4 are the
//               exponents of float32 powers of two, [16] bytes, and a block four groups
//     2 bit     2 words of 64 bytes: byte j of word h, lane i holds codes k = 16h+j, 16h+4+j, 16h+8+j, 16h+12+j of row i,
//               from the lowest bits up
//     3 bit     2 such words of the lower 2 bits, then a word of upper bits as of 5 bits
//     4 bit     4 words of 64 bytes: word b, lane i holds codes k = 4b..4b+3 of row i (low) and 16+4b.. (high nibbles)
//     5 bit     4 such words of the lower 4 bits, then a word of upper bits: bit n of byte j, lane i is that of code
//               k = 4n+j of row i
//     6 bit     4 such words of the lower 4 bits, then 2 words of upper bits as of 2 bits
//     8 bit     8 words of 64 bytes: word j, lane i holds codes k = 4j..4j+3 of row i, stored + 128
//     integer   of kW4 and kW4M the 4-bit words, but q - 8 as 4 signed bits, and rows 4i..4i+3 of a word lie as their
//               codes 0..3 in bytes 0 2 4 6 (row 4i), 8 10 12 14, 1 3 5 7, 9 11 13 15; of kW8 the 8-bit words, but
//               signed, and zeros behind an odd last group;
//               then [groups] factors: of kW4 16 multipliers (int8), of kW4M 16 and 16 offsets (int16);
//               then [blocks][16] scales (float32): see integer_weights.inc
//     halves    scales and minima are [2][16]: of values 0..15, then of 16..31
//   super       tile = [K/256 super-blocks] of [16] f16 scales, with minima [16] f16, [3 or 4] words of factors, then
//               [8 groups] of words of codes as above. A scale of a group is that of its super-block times a factor,
//               and its minimum likewise; of 4 bits and more both are rounded to f16.
//     factors   Word w, lane i holds from the lowest bits up four of row i, for groups 2w and 2w+1 two each: those of the
//               scale and of the minimum, or of the scales of both halves. Of q2_k and q6_k they are bytes, others have 6
//               bits, and for w = 3 these 24 bits are the upper bytes of words 0, 1 and 2. Bytes of q2_k hold the
//               factor of a half's scale below that of its minimum; those of q3_k are stored + 32, of q6_k + 128
struct Part {
  int32_t kind;
  int32_t column0;  // first output column of this part
  int32_t num_rows, num_cols;
  const uint8_t* data;
  int64_t num_bytes;
};

// Of packed bf16: groups of a row, bytes of one, and of a tile's tail, with room for a patch of every 16th input.
constexpr int kPackedGroup = 192;
static inline int64_t packed_groups(int64_t num_cols) { return (num_cols + 7) / 8; }
static inline int64_t most_patches(int64_t num_cols) { return (num_cols + 15) / 16; }
static inline int64_t packed_tail(int64_t num_cols) { return 20 + 4 * most_patches(num_cols); }

// Of an integer kind: bytes of a tile's codes.
static inline int64_t integer_codes(int32_t kind, int64_t num_groups) {
  return (kind == kW8 ? (num_groups + 1) / 2 * 2 : num_groups) * code_bytes(kind) * kLanes;
}
// Where the code of a row and an input lies among a group's bytes, of 4 bits in the upper ones for inputs from 16 on; the
// code, signed; and the integer weight it stands for. multiplier, offset: see integer_weights.inc.
static inline int integer_code_at(int32_t kind, int row, int k) {
  if (kind == kW8) return k / 4 * 64 + row * 4 + k % 4;
  return k % 16 / 4 * 64 + row / 4 * 16 + row % 2 * 8 + row % 4 / 2 + 2 * (k % 4);
}
static inline int integer_code(int32_t kind, uint8_t byte, int k) {
  return kind == kW8 ? (int8_t)byte : (int8_t)(k < 16 ? byte << 4 : byte) >> 4;
}
static inline int integer_weight(int32_t kind, int code, int multiplier, int offset) {
  if (kind == kW8) return code;
  const int product = (code * multiplier * 4096 + (1 << 14)) >> 15;
  return kind == kW4M ? (product + offset) >> 4 : product;
}

// What a dot product needs besides the 32 codes of a group.
struct GroupFacts {
  float scale;       // amax / 127
  float scaled_sum;  // scale * sum of codes: meets the minima
  int32_t start4;    // kMagicBits - 8 * sum: where a q4_0 dot product starts
  int32_t start8;    // kMagicBits - 128 * sum: where a dot product with 8-bit codes starts
};

// Activations as int8, per panel of 12 rows: codes [groups][12][32]; the other arrays [groups][12].
struct Quantised {
  int8_t* codes;
  GroupFacts* facts;
  int32_t* low_sums;  // sum of codes 0..15: what kinds with halves need to tell them apart; null where none reads them
  int32_t num_groups;

  // The same rows without their first groups; from one panel to the next it stays as far.
  Quantised from_group(int64_t group) const {
    const int64_t at = group * kPanel;
    return {codes + at * kGroup, facts + at, low_sums ? low_sums + at : low_sums, num_groups};
  }
};

// Values from one row of bf16 to the next: an odd number of cache lines, so that a tile's rows do not meet in a set.
static inline int64_t rounded_stride(int64_t width) { return ((width + 31) / 32 | 1) * 32; }

// Activations as two int8 digits each (linear_tiles.inc), per panel of 16 rows: [steps of 64 values][high, low][16][64],
// zeros behind the last value.
struct Wide {
  int8_t* codes;
  int64_t panel_bytes;
  float* scales;  // [rows]
};

struct LinearArgs {
  const Part* part;
  int64_t tile_bytes;  // from one tile of the part to the next
  int tile0, num_tiles;
  const Quantised* xq;  // quantised kinds
  const Wide* wide;     // integer kinds
  void* scratch;        // integer kinds: wide_scratch_bytes; for bf16 on tiles: rounded_scratch_bytes
  const float* x;       // dense kinds: row 0
  int64_t ld_x;
  const uint16_t* rounded;  // the same of round_row, for bf16 weights; those on tiles also read up to 15 rows more; null:
                            // these are multiplied from x
  int64_t ld_rounded;
  int row0, num_rows;
  float* out;  // element (row0, first column of tile0)
  int64_t ld_out;
  const float* residual;  // same place as out; null for none
  int64_t ld_residual;
  int up_tiles;  // on tiles: from a gate's tile to its up's, and out is act(gate) * up; 0 for no gate
  int activation;
  uint16_t* out_rounded;  // of bf16: null, or where act(gate) * up goes rounded, and then `out` may be null
  int64_t ld_out_rounded;
};

// Query vectors as codes, to meet int8 keys: x = scale * (128 * high + low), the two planes being int8.
struct QueryCodes {
  const int8_t* planes;   // [head_dim / 4][queries][high, low][4 channels], zeros behind the last channel
  const float* scales;    // [queries]
  const int32_t* starts;  // [queries][channels 0..255, 256..511][high, low]: where a sum with codes + 128 starts
};

// One span of keys for a tile of query vectors (rows x heads that share a KV head).
//
// int8: 16 keys are [head_dim / 4] times [16 keys][4 channels], each a code + 128, k_stride bytes from one to the next;
// 16 values are [4] times [head_dim][4 tokens], each a code.
struct SpanArgs {
  int dtype;             // KV storage: kF16, kBF16, kF32 or kInt8
  int num_queries, head_dim;
  const float* q;        // [num_queries][kQueryStride], of factor_words for bf16; not for int8, nor for bf16 where prepare_span is
  const uint16_t* q_bf16;  // where prepare_span is: [num_queries][rounded_stride(head_dim)], zeros behind the last channel
  uint8_t* prepared;       // where prepare_span is: prepared_bytes of room, at a multiple of 64
  bool is_prepared;        // prepare_span was called for this span
  QueryCodes codes;      // for int8
  const void* k_chunks[kSpan / kLanes];  // 16 keys each: channel d at element d * k_stride
  int64_t k_stride;
  const void* v_chunks[kSpan / kLanes];  // the same 16 tokens: channel c of token i at element i * head_dim + c
  const void* next_keys[kSpan / kLanes];  // keys that will be wanted next, to be fetched while values are weighed: parts of
  int num_next;                           // next_bytes each, as many as chunks
  int64_t next_bytes;
  const float* k_scales[kSpan / kLanes];  // int8: of 16 keys each, and of the values
  const float* v_scales[kSpan / kLanes];
  int first_key[kMaxTile];  // keys before it are behind the query's window
  int num_keys[kMaxTile];  // end of the query's keys in this span; 0 leaves its outputs alone
  float scale;
  float cap;  // of scaled scores; 0 for none
  float* max;  // [num_queries]
  float* sum;  // [num_queries]
  float* acc;  // [num_queries][head_dim]
};

// Room for what prepare_span makes of a span's keys and values, and which keys are NaN.
static inline int64_t prepared_bytes(int head_dim) {
  return 2 * kSpan * (int64_t)((head_dim + 31) / 32 * 32 + (head_dim + 15) / 16 * 16) + kSpan / 4;
}

// One span of latents for the query vectors of a pass: attention over keys of which the first value_dim channels are the
// values too. See latent.inc.
struct LatentArgs {
  int num_queries, key_dim, value_dim;
  int num_rows;                 // keys of the span that some query sees
  const uint16_t* const* rows;  // each one's channels as bf16, zeros behind the last up to a multiple of 32; and so many rows of
                                // zeros that they are a multiple of 16
  const float* row_scales;      // null, or what each of 256 is multiplied by
  const float* q;               // [num_queries][latent_stride(latent_width(key_dim))], of factor_words
  const int* num_keys;          // end of each query's keys in this span, at least 1
  float scale;
  float* scores;  // room: [num_queries][latent_stride(kSpan)]
  float* room;    // latent_room(key_dim)
  float* max;     // [num_queries]
  float* sum;     // [num_queries]
  float* acc;     // [num_queries][value_dim]
};

constexpr int kLatentKeyTiles = 6, kLatentValueTiles = 4;  // tiles of 16 keys, or of 16 channels, that are laid out together

// Floats from one row of n factors to the next: an odd number of cache lines.
static inline int64_t latent_stride(int64_t n) { return ((n + 15) / 16 | 1) * 16; }
// Of a latent as bf16, in values.
static inline int64_t latent_width(int64_t key_dim) { return (key_dim + 31) / 32 * 32; }
// Floats from one tile to the next, of a number of pairs.
static inline int64_t latent_tile(int64_t num_pairs) { return 32 * num_pairs + 16; }
static inline int64_t latent_room(int64_t key_dim) {
  const int64_t keys = kLatentKeyTiles * latent_tile(latent_width(key_dim) / 2), values = kLatentValueTiles * latent_tile(kSpan / 2);
  return keys > values ? keys : values;
}

// The recurrence of state.inc for one head and num_columns (a multiple of 16) columns of its state, over num_tokens positions.
// key_dim: a multiple of 4.
struct ScanArgs {
  int num_tokens, key_dim, num_columns;
  bool is_delta;
  int decay;  // of a position, `decays` holds one, or by key one for each channel of keys; by value it is e^(rate * factor)
  int64_t ld_keys, ld_values, ld_gates, ld_out;  // floats from one position to the next
  const float *q, *k, *v, *decays;
  const float* factors;  // one of a position; by value one for each column
  const float* rates;    // by value: [key_dim][ld_values]
  const float* skip;     // null, or what times v is added to the output: one, or by value one for each column
  float* state;          // [key_dim][state_stride]
  int64_t state_stride;
  float* out;
};

struct Kernels {
  const char* name;
  bool has_tiles;  // computes integer kinds
  int tile_queries;  // query vectors that attend_span takes at most
  void (*rest)();  // a thread that has used kernels is about to sleep or to do something else
  void (*linear)(const LinearArgs*);
  void (*quantise_wide)(const float* x, int num_cols, const Wide* out, int row);
  void (*rms_norm_wide)(const float* x, const float* weight, float eps, int num_cols, float* normed, const Wide* out, int row);
  void (*quantise_row)(const float* x, const Quantised* out, int row, int group0, int num_groups);
  void (*round_row)(const float* x, int n, uint16_t* out);  // for bf16 weights, or null
  void (*rms_norm_row)(const float* x, const float* weight, float eps, int num_cols, float* out);
  void (*rms_norm_rows)(const float* x, int num_rows, const float* weight, float eps, int num_cols, const Quantised* out,
                        int row);
  void (*layer_norm_row)(const float* x, const float* weight, const float* bias, float eps, int num_cols, float* out);
  void (*add)(const float* x, const float* y, int n, float* out);
  void (*scale)(const float* x, float by, int n, float* out);
  void (*soft_cap)(const float* x, float cap, int n, float* out);
  void (*activate)(int activation, const float* x, int n, float* out);
  void (*gated)(int activation, const float* gate, const float* up, int n, float* out);
  void (*gated_group)(int activation, const float* gate, const float* up, int64_t ld, int num_rows, const Quantised* out, int row,
                      int group);
  void (*gate_row)(const float* x, float gate, int n, float* out);
  void (*gate_each)(const float* x, const float* gate, int n, float* out);
  void (*multiply)(const float* x, const float* y, int n, float* out);
  void (*convolve)(const float* const* taps, const float* weights, int64_t ld, const float* bias, int num_taps, bool is_activated,
                   int n, float* out);
  void (*scan_gates)(const float* x, const float* rates, const float* bias, float low, float high, int n, float* decays,
                     float* steps);
  void (*scan)(const ScanArgs*);
  void (*softmax)(const float* x, int n, float* out);
  void (*sigmoid)(const float* x, int n, float* out);
  void (*swiglu)(const float* gate, const float* up, int n, float limit, float alpha, float* out);
  void (*add_scaled)(const float* x, float by, int n, float* sum);
  void (*copy_codes)(const Quantised* from, int row, const Quantised* to, int to_row);
  void (*rope_head)(const float* x, const float* cos_sin, int head_dim, float* out);
  bool (*is_within)(const float* x, int n, float limit);
  void (*store_k)(int dtype, const float* k, int head_dim, int block_size, void* slot);
  void (*store_v)(int dtype, const float* v, int head_dim, void* slot);
  void (*rotate)(const float* x, const float* factors, int n, float* out);
  void (*store_codes)(const float* x, int head_dim, int zero, int64_t step4, int64_t step1, uint8_t* codes, float* scale);
  void (*split_query)(const float* q, int head_dim, int64_t step4, int8_t* planes, float* scale, int32_t* starts);
  // Null, or for bf16: makes of keys [first, end) of a span what several calls of attend_span need. Where it is not
  // null, attend_span writes whole groups of 16 rows of acc.
  void (*prepare_span)(const SpanArgs*, int first, int end);
  void (*attend_span)(const SpanArgs*);
  void (*merge_span)(float* max, float* sum, float* acc, const float* span_max, const float* span_sum,
                     const float* span_acc, int num_queries, int head_dim);
  void (*factor_words)(const float* x, int n, float* words);
  void (*latent_row)(int dtype, const void* from, int key_dim, uint16_t* row);
  void (*attend_latents)(const LatentArgs*);
  void (*divide)(const float* x, float by, int n, float* out);
  float (*max_of)(const float* x, int n);
  int (*argmax)(const float* x, int n);
  float (*sum_exp)(const float* x, int n, float max);
  uint64_t (*exp_mass)(const float* x, int n, float max, float inverse_temperature, float* mass);
  void (*entropy_terms)(const float* x, const float* mass, int n, float max, float inverse_temperature, float* out);
  void (*typicality)(const float* x, int n, float max, float inverse_temperature, float mean, float* out);
  uint64_t (*sum_mass)(const float* mass, const float* keys, int n, float least, int* count);
  void (*drop_below)(float* mass, const float* keys, int n, float least);
  int (*low_ids)(const DrawName& name, int first, int end, int32_t* ids);
  void (*race_words)(const DrawName& name, const int32_t* ids, int count, uint32_t* words);
  void (*about_mass)(const float* x, int n, float max, float inverse_temperature, float least, float* sums);
  void (*chunk_max)(const float* x, int num_runs, float* out);
  int (*collect)(const float* x, int n, float least, float below, int32_t* ids, int room);
};

// chunk_max gives 16 maxima, of 16 values each, per run of 256.
constexpr int kChunkRun = 256;

extern const Kernels kScalarKernels, kScalarTilesKernels;
#if defined(TM_X86)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvxVnniKernels;
extern const Kernels kAvx512Kernels;
extern const Kernels kAvx512Bf16Kernels;
#if defined(TM_HAS_AMX)
extern const Kernels kAmxKernels;
#endif
#endif
#if defined(TM_ARM64)
extern const Kernels kNeonKernels;
extern const Kernels kNeonI8mmKernels;
#endif

}  // namespace mill
