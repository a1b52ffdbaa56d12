// The matrix unit: eight tiles of 16 rows x 64 bytes. With TM_AMX the processor's, else plain loops that define the bits.
//
// tile_dot_ss     C[m][n] (int32) += sum over k of A[m][k] (int8) * B[k / 4][4 n + k % 4] (int8)
// tile_dot_su     the same with B unsigned
// tile_dot_bf16   C[m][n] (float32) += even + odd, where `even` is the chain over k = 0, 2, .. 30 of fused steps with
//                 A[m][k] * B[k / 2][2 n], begun at zero, and `odd` that of k = 1, 3, .. 31 with B[k / 2][2 n + 1]; all
//                 are bf16, subnormal inputs and results count as zero (results that are so before they are rounded to
//                 the fewer bits of a subnormal number)
#pragma once
#include <stdint.h>
#include <string.h>

#include "half.h"
#include "kernels.h"

namespace {

constexpr int kTileBytes = 1024;

#if defined(TM_AMX)

// Configuring takes as long as dozens of products, so it lasts from a thread's first use to its next rest.
static thread_local bool tiles_are_ready = false;

// Tiles can be used from here to the end of the scope.
struct TileScope {
  TileScope() {
    if (tiles_are_ready) return;
    struct {
      uint8_t palette, start, reserved[14];
      uint16_t row_bytes[16];
      uint8_t rows[16];
    } config = {};
    config.palette = 1;
    for (int i = 0; i < 8; i++) {
      config.row_bytes[i] = 64;
      config.rows[i] = 16;
    }
    asm volatile("ldtilecfg %0" ::"m"(config) : "memory");
    tiles_are_ready = true;
  }
  TileScope(const TileScope&) = delete;
};

// What is left in tiles would slow down every switch of threads, and their configuration is the caller's again.
inline void rest() {
  if (tiles_are_ready) asm volatile("tilerelease");
  tiles_are_ready = false;
}

template <int T>
inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int T>
inline void tile_load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}
// The same, of what will not be wanted again soon.
template <int T>
inline void tile_load_once(const void* from, int64_t stride) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}
template <int T>
inline void tile_store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
}
template <int C, int A, int B>
inline void tile_dot_ss() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B>
inline void tile_dot_su() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B>
inline void tile_dot_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

#else

struct TileScope {
  TileScope() {}
};

inline void rest() {}

alignas(64) static thread_local uint8_t tiles[8][16][64];

template <int T>
inline void tile_zero() {
  memset(tiles[T], 0, kTileBytes);
}
template <int T>
inline void tile_load(const void* from, int64_t stride) {
  for (int r = 0; r < 16; r++) memcpy(tiles[T][r], (const uint8_t*)from + r * stride, 64);
}
template <int T>
inline void tile_load_once(const void* from, int64_t stride) {
  tile_load<T>(from, stride);
}
template <int T>
inline void tile_store(void* to, int64_t stride) {
  for (int r = 0; r < 16; r++) memcpy((uint8_t*)to + r * stride, tiles[T][r], 64);
}

template <int C, int A, int B, class Weight>
inline void tile_dot_bytes() {
  for (int m = 0; m < 16; m++) {
    int32_t sums[16];
    memcpy(sums, tiles[C][m], 64);
    for (int k = 0; k < 64; k++)
      for (int n = 0; n < 16; n++)
        sums[n] += (int32_t)(int8_t)tiles[A][m][k] * (int32_t)(Weight)tiles[B][k / 4][4 * n + k % 4];
    memcpy(tiles[C][m], sums, 64);
  }
}
template <int C, int A, int B>
inline void tile_dot_ss() {
  tile_dot_bytes<C, A, B, int8_t>();
}
template <int C, int A, int B>
inline void tile_dot_su() {
  tile_dot_bytes<C, A, B, uint8_t>();
}

inline float without_subnormals(float x) { return __builtin_fabsf(x) < 1.17549435e-38f ? __builtin_copysignf(0.0f, x) : x; }
inline float tile_bf16(const uint8_t* row, int at) {
  uint16_t bits;
  memcpy(&bits, row + 2 * at, 2);
  return without_subnormals(mill::bf16_to_float(bits));
}

inline float fused_step(float a, float b, float sum) {
  const float next = __builtin_fmaf(a, b, sum);
  if (__builtin_fabsf(next) != 1.17549435e-38f) return without_subnormals(next);
  const double exact = (double)a * b + sum;  // 2^-126 or, rounded to it as a subnormal number would be, less
  return __builtin_fabs(exact) < 0x1p-126 - 0x1p-151 ? __builtin_copysignf(0.0f, next) : next;
}

template <int C, int A, int B>
inline void tile_dot_bf16() {
  for (int m = 0; m < 16; m++) {
    float sums[16];
    memcpy(sums, tiles[C][m], 64);
    for (int n = 0; n < 16; n++) {
      float chain[2] = {0.0f, 0.0f};
      for (int k = 0; k < 32; k++)
        chain[k % 2] = fused_step(tile_bf16(tiles[A][m], k), tile_bf16(tiles[B][k / 2], 2 * n + k % 2), chain[k % 2]);
      sums[n] = without_subnormals(without_subnormals(sums[n]) + without_subnormals(chain[0] + chain[1]));
    }
    memcpy(tiles[C][m], sums, 64);
  }
}

#endif

}  // namespace
