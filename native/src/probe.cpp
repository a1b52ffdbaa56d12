// See probe.h. One function per instruction set and question, chosen by the name of the kernels in use. Independent
// chains keep every unit busy, and an empty assembly statement keeps the compiler from shortening a loop
// whose results nobody wants.
#include "probe.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>

#if defined(TM_X86)
#include <immintrin.h>
#elif defined(TM_ARM64)
#include <arm_neon.h>
#endif

namespace mill {

namespace {

constexpr int kChains = 12;  // latency x units of the multipliers so far, and within the 16 registers of AVX2
constexpr int64_t kTurns = 4096;
constexpr int64_t kTurnsOfThread = 16, kPage = 4096;

using Body = void (*)(const uint8_t* data, int64_t num_bytes);

void read_words(const uint8_t* data, int64_t num_bytes) {
  uint64_t sum[8] = {};
  for (int64_t at = 0; at + 64 <= num_bytes; at += 64) {
    uint64_t words[8];
    std::memcpy(words, data + at, 64);
    for (int i = 0; i < 8; i++) sum[i] ^= words[i];
  }
  for (uint64_t& word : sum) asm volatile("" : : "r"(word));
}

// Chains are variables of their own: of an array the compiler would keep some in memory.
#define TM_EACH(what) \
  what(0) what(1) what(2) what(3) what(4) what(5) what(6) what(7) what(8) what(9) what(10) what(11)
#define TM_BEGIN(n) auto c##n = zero;
#define TM_TURN(constraint, n) \
  c##n = step(c##n);           \
  asm volatile("" : "+" constraint(c##n));
#define TM_TURN_X(n) TM_TURN("x", n)
#define TM_TURN_V(n) TM_TURN("v", n)
#define TM_TURN_W(n) TM_TURN("w", n)
#define TM_CHAINS(turn) \
  TM_EACH(TM_BEGIN)     \
  for (int64_t i = 0; i < kTurns; i++) { TM_EACH(turn) }

#if defined(TM_X86)

#define TM_AVX2 __attribute__((target("avx2,fma")))
#define TM_AVXVNNI __attribute__((target("avx2,fma,avxvnni")))
#define TM_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni,fma")))

TM_AVX2 void read_avx2(const uint8_t* data, int64_t num_bytes) {
  __m256i sum[4] = {};
  for (int64_t at = 0; at + 128 <= num_bytes; at += 128)
    for (int i = 0; i < 4; i++)
      sum[i] = _mm256_xor_si256(sum[i], _mm256_load_si256(reinterpret_cast<const __m256i*>(data + at + 32 * i)));
  for (__m256i& part : sum) asm volatile("" : : "x"(part));
}

TM_AVX512 void read_avx512(const uint8_t* data, int64_t num_bytes) {
  __m512i sum[4] = {};
  for (int64_t at = 0; at + 256 <= num_bytes; at += 256)
    for (int i = 0; i < 4; i++) sum[i] = _mm512_xor_si512(sum[i], _mm512_load_si512(data + at + 64 * i));
  for (__m512i& part : sum) asm volatile("" : : "v"(part));
}

TM_AVX2 void f32_avx2(const uint8_t*, int64_t) {
  const __m256 x = _mm256_set1_ps(0.5f), zero = _mm256_setzero_ps();
#define step(c) _mm256_fmadd_ps(x, x, c)
  TM_CHAINS(TM_TURN_X)
#undef step
}

TM_AVX512 void f32_avx512(const uint8_t*, int64_t) {
  const __m512 x = _mm512_set1_ps(0.5f), zero = _mm512_setzero_ps();
#define step(c) _mm512_fmadd_ps(x, x, c)
  TM_CHAINS(TM_TURN_V)
#undef step
}

// Without a dot-product instruction: multiply bytes to 16-bit pairs, pairs to 32-bit sums, add.
TM_AVX2 void int8_avx2(const uint8_t*, int64_t) {
  const __m256i x = _mm256_set1_epi8(1), ones = _mm256_set1_epi16(1), zero = _mm256_setzero_si256();
#define step(c) _mm256_add_epi32(c, _mm256_madd_epi16(_mm256_maddubs_epi16(x, c), ones))
  TM_CHAINS(TM_TURN_X)
#undef step
}

TM_AVXVNNI void int8_avxvnni(const uint8_t*, int64_t) {
  const __m256i x = _mm256_set1_epi8(1), zero = _mm256_setzero_si256();
#define step(c) _mm256_dpbusd_avx_epi32(c, x, x)
  TM_CHAINS(TM_TURN_X)
#undef step
}

TM_AVX512 void int8_avx512(const uint8_t*, int64_t) {
  const __m512i x = _mm512_set1_epi8(1), zero = _mm512_setzero_si512();
#define step(c) _mm512_dpbusd_epi32(c, x, x)
  TM_CHAINS(TM_TURN_V)
#undef step
}

__attribute__((target("avx512f,avx512bf16"))) void bf16_avx512(const uint8_t*, int64_t) {
  const __m512i x = _mm512_set1_epi32(0x3f003f00);
  const __m512 zero = _mm512_setzero_ps();
#define step(c) _mm512_dpbf16_ps(c, (__m512bh)x, (__m512bh)x)
  TM_CHAINS(TM_TURN_V)
#undef step
}

#if defined(TM_HAS_AMX)
// Four sums of full tiles, of bytes; of bf16 half as many. The kernels' use of tiles ends at their rest, before a probe.
constexpr double kTileOps = 4 * 2.0 * 16 * 16 * 64;

#define TM_TILES(product)                                                                                        \
  alignas(64) uint8_t config[64] = {1};                                                                          \
  for (int tile = 0; tile < 8; tile++) {                                                                         \
    config[16 + 2 * tile] = 64;                                                                                  \
    config[48 + tile] = 16;                                                                                      \
  }                                                                                                              \
  asm volatile("ldtilecfg %0" ::"m"(config) : "memory");                                                         \
  for (int64_t i = 0; i < kTurns; i++)                                                                           \
    asm volatile(product " %tmm5, %tmm4, %tmm0\n\t" product " %tmm6, %tmm4, %tmm1\n\t"                           \
                 product " %tmm5, %tmm7, %tmm2\n\t" product " %tmm6, %tmm7, %tmm3");                             \
  asm volatile("tilerelease");

__attribute__((target("amx-tile,amx-int8"))) void int8_amx(const uint8_t*, int64_t) { TM_TILES("tdpbssd") }
__attribute__((target("amx-tile,amx-bf16"))) void bf16_amx(const uint8_t*, int64_t) { TM_TILES("tdpbf16ps") }
#endif

#endif

#if defined(TM_ARM64)

void f32_neon(const uint8_t*, int64_t) {
  const float32x4_t x = vdupq_n_f32(0.5f), zero = vdupq_n_f32(0.0f);
#define step(c) vfmaq_f32(c, x, x)
  TM_CHAINS(TM_TURN_W)
#undef step
}

__attribute__((target("arch=armv8.2-a+dotprod"))) void int8_neon(const uint8_t*, int64_t) {
  const int8x16_t x = vdupq_n_s8(1);
  const int32x4_t zero = vdupq_n_s32(0);
#define step(c) vdotq_s32(c, x, x)
  TM_CHAINS(TM_TURN_W)
#undef step
}

#endif

struct Bodies {
  const char* isa;
  Body read, int8, f32, bf16;
  int lanes;  // of float32 in a vector; a byte dot product multiplies four times as many
};

constexpr Bodies kBodies[] = {
#if defined(TM_ARM64)
    {"neoni8mm", read_words, int8_neon, f32_neon, nullptr, 4},
    {"neon", read_words, int8_neon, f32_neon, nullptr, 4},
#endif
#if defined(TM_X86)
#if defined(TM_HAS_AMX)
    {"amx", read_avx512, int8_amx, f32_avx512, bf16_amx, 16},
#endif
    {"avx512bf16", read_avx512, int8_avx512, f32_avx512, bf16_avx512, 16},
    {"avx512", read_avx512, int8_avx512, f32_avx512, nullptr, 16},
    {"avxvnni", read_avx2, int8_avxvnni, f32_avx2, nullptr, 8},
    {"avx2", read_avx2, int8_avx2, f32_avx2, nullptr, 8},
#endif
    {"scalar", read_words, nullptr, nullptr, nullptr, 1},
    {"scalartiles", read_words, nullptr, nullptr, nullptr, 1},
};

// Phases in which each thread does a unit, and none ends before all have begun: the best of some in a row, for a thread that
// has lost its processor keeps the others waiting. For a fifth of a second at most.
double probe_phases(Team* team, int num_threads, int64_t rounds) {
  using Clock = std::chrono::steady_clock;
  constexpr int kInRow = 64;
  struct Meeting final : Job {
    int units;
    int64_t left, done = 0;
    std::atomic<int64_t> begun{0};
    Clock::time_point first, last;
    double best = 0;
    int next_phase() override {
      if (done % kInRow == 0) {
        const Clock::time_point now = Clock::now();
        if (done > 0) best = std::max(best, kInRow / std::chrono::duration<double>(now - last).count());
        last = now;
        if (left <= done || now - first > std::chrono::milliseconds(200)) return 0;
      }
      done++;
      return units;
    }
    void run_unit(int, int) override {
      begun.fetch_add(1);
      while (begun.load() < done * units) {
      }
    }
  } job;
  job.units = num_threads;
  job.left = rounds;
  job.first = Clock::now();
  team->run(&job, nullptr, num_threads);
  return job.best;
}

}  // namespace

double probe(Team* team, const Kernels* kernels, int32_t what, uint8_t* data, int64_t num_bytes, int64_t rounds) {
  const int threads = team->num_threads_for(1);
  if (what == kProbePhase) return probe_phases(team, threads, rounds);
  const Bodies* bodies = kBodies;
  while (std::strcmp(bodies->isa, kernels->name) != 0) bodies++;
  const Body body = what == kProbeRead ? bodies->read : what == kProbeInt8 ? bodies->int8 : what == kProbeBf16 ? bodies->bf16 : bodies->f32;
  if (body == nullptr) return 0;
  const int64_t share = num_bytes / threads / 256 * 256;
  // Whoever writes a page first has it near.
  const auto write = [&](int unit, int) {
    for (int64_t at = unit * share; at < (unit + 1) * share; at += kPage) data[at] = 1;
  };
  if (what == kProbeRead) team->for_each(threads, write, threads);
  // In turns, so that a core that is done early helps with the rest.
  const int turns = static_cast<int>(std::min(rounds, kTurnsOfThread));
  const auto run = [&](int unit, int) {
    const int turn = unit % turns;
    for (int64_t round = rounds * turn / turns; round < rounds * (turn + 1) / turns; round++) body(data + unit / turns * share, share);
  };
  const auto start = std::chrono::steady_clock::now();
  team->for_each(threads * turns, run, threads);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  double per_turn = 2.0 * kChains * bodies->lanes * (what == kProbeInt8 ? 4 : what == kProbeBf16 ? 2 : 1);
#if defined(TM_HAS_AMX)
  if (body == int8_amx) per_turn = kTileOps;
  if (body == bf16_amx) per_turn = kTileOps / 2;
#endif
  const double amount = what == kProbeRead ? static_cast<double>(share) : per_turn * kTurns;
  return amount * static_cast<double>(rounds) * threads / seconds;
}

}  // namespace mill
