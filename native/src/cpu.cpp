// On x86 cpuid says what the processor has, xgetbv which registers the operating system saves; both must agree. Asked
// directly, because compilers differ in what their built-in checks cover. On ARM the operating system says all.
#include "cpu.h"

#include <string.h>

#if defined(TM_X86)
#include <cpuid.h>
#include <immintrin.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "half.h"
#endif
#if defined(TM_ARM64) && defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(TM_ARM64) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace mill {

#if defined(TM_X86)
namespace {

struct Features {
  bool avx2, avxvnni, avx512, avx512bf16, amx;
  bool fast_bf16;  // vdpbf16ps multiplies more in a cycle than fused multiply-adds do
};

// Whether vdpbf16ps gives the bits of two fused multiply-adds, the odd one first, on which dense.inc relies. Manuals
// describe it so; this asks the processor, with sums that mostly cancel.
__attribute__((target("avx512f,avx512bf16"))) bool pairs_are_chained() {
  uint32_t state = 1;
  const auto draw = [&] { return (state = state * 1664525u + 1013904223u) >> 8; };
  for (int trial = 0; trial < 256; trial++) {
    uint16_t w[2], x[2];
    for (int i = 0; i < 2; i++) {
      w[i] = static_cast<uint16_t>((draw() & 0x80ff) | (draw() % 24 + 116) << 7);
      x[i] = static_cast<uint16_t>((draw() & 0x80ff) | (draw() % 24 + 116) << 7);
    }
    const double odd = static_cast<double>(bf16_to_float(w[1])) * bf16_to_float(x[1]);
    const float start = static_cast<float>(-odd * (trial % 2 ? 1.0 : 1.0000001));
    const float chained = __builtin_fmaf(bf16_to_float(w[0]), bf16_to_float(x[0]),
                                         __builtin_fmaf(bf16_to_float(w[1]), bf16_to_float(x[1]), start));
    const __m512i ww = _mm512_set1_epi32(w[0] | w[1] << 16), xx = _mm512_set1_epi32(x[0] | x[1] << 16);
    __m512 sum = _mm512_set1_ps(start);
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(ww), "v"(xx));
    if (float_to_bits(_mm512_cvtss_f32(sum)) != float_to_bits(chained)) return false;
  }
  return true;
}

// Linux saves the tiles of a process only after it has asked for that.
bool may_use_tiles() {
#if defined(__linux__)
  constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
  return false;
#endif
}

Features detect() {
  Features found = {};
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return found;
  const bool fma = c >> 12 & 1, osxsave = c >> 27 & 1, avx = c >> 28 & 1, f16c = c >> 29 & 1;
  if (!osxsave || !avx) return found;
  unsigned state, high;
  __asm__ volatile("xgetbv" : "=a"(state), "=d"(high) : "c"(0));
  const bool saves_ymm = (state & 0x06) == 0x06, saves_zmm = (state & 0xe6) == 0xe6;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return found;
  const bool avx2 = b >> 5 & 1;
  const bool saves_tiles = (state & 0x60000) == 0x60000, tiles = (d >> 22 & 5) == 5;  // bf16, (fp16,) tiles
  const bool int8_tiles = d >> 25 & 1, vbmi = c >> 1 & 1;
  const bool f = b >> 16 & 1, dq = b >> 17 & 1, bw = b >> 30 & 1, vl = b >> 31 & 1, vnni = c >> 11 & 1;
  found.avx2 = saves_ymm && avx2 && fma && f16c;
  found.avx512 = found.avx2 && saves_zmm && f && dq && bw && vl && vnni;
  if (found.avx2 && a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) {
    found.avxvnni = a >> 4 & 1;
    found.avx512bf16 = found.avx512 && (a >> 5 & 1) && pairs_are_chained();
    found.amx = found.avx512bf16 && vbmi && saves_tiles && tiles && int8_tiles && may_use_tiles();
    // AMD's processors do twice as many products with it, Intel's so far (measured: 93 against 155 GFLOP/s) fewer.
    found.fast_bf16 = found.avx512bf16 && __get_cpuid(0, &a, &b, &c, &d) && memcmp(&b, "Auth", 4) == 0;
  }
  return found;
}

}  // namespace
#endif

#if defined(TM_ARM64)
namespace {

struct Features {
  bool dot, i8mm;  // products of four signed bytes; of unsigned and signed ones
};

Features detect() {
  Features found = {};
#if defined(__APPLE__)
  const auto has = [](const char* name) {
    int value = 0;
    size_t size = sizeof(value);
    return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
  };
  found.dot = has("hw.optional.arm.FEAT_DotProd");
  found.i8mm = found.dot && has("hw.optional.arm.FEAT_I8MM");
#elif defined(__linux__)
  found.dot = getauxval(AT_HWCAP) >> 20 & 1;                // HWCAP_ASIMDDP
  found.i8mm = found.dot && (getauxval(26) >> 13 & 1) != 0;  // AT_HWCAP2, HWCAP2_I8MM
#endif
  return found;
}

}  // namespace
#endif

const Kernels* find_kernels(const char* name) {
  const bool any = strcmp(name, "auto") == 0;
#if defined(TM_X86)
  static const Features has = detect();
#if defined(TM_HAS_AMX)
  if (has.amx && (any || strcmp(name, "amx") == 0)) return &kAmxKernels;
#endif
  if (has.avx512bf16 && ((any && has.fast_bf16) || strcmp(name, "avx512bf16") == 0)) return &kAvx512Bf16Kernels;
  if (has.avx512 && (any || strcmp(name, "avx512") == 0)) return &kAvx512Kernels;
  if (has.avxvnni && (any || strcmp(name, "avxvnni") == 0)) return &kAvxVnniKernels;
  if (has.avx2 && (any || strcmp(name, "avx2") == 0)) return &kAvx2Kernels;
#endif
#if defined(TM_ARM64)
  static const Features has = detect();
  if (has.i8mm && (any || strcmp(name, "neoni8mm") == 0)) return &kNeonI8mmKernels;
  if (has.dot && (any || strcmp(name, "neon") == 0)) return &kNeonKernels;
#endif
  if (any || strcmp(name, "scalar") == 0) return &kScalarKernels;
  if (strcmp(name, "scalartiles") == 0) return &kScalarTilesKernels;
  return nullptr;
}

}  // namespace mill
