// cpuid says what the processor has, xgetbv which registers the operating system saves; both must agree. Asked directly,
// because compilers differ in what their built-in checks cover.
#include "cpu.h"

#include <string.h>

#if defined(TM_X86)
#include <cpuid.h>
#endif

namespace mill {

#if defined(TM_X86)
namespace {

struct Features {
  bool avx2, avxvnni, avx512;
};

Features detect() {
  Features found = {false, false, false};
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return found;
  const bool fma = c >> 12 & 1, osxsave = c >> 27 & 1, avx = c >> 28 & 1, f16c = c >> 29 & 1;
  if (!osxsave || !avx) return found;
  unsigned state, high;
  __asm__ volatile("xgetbv" : "=a"(state), "=d"(high) : "c"(0));
  const bool saves_ymm = (state & 0x06) == 0x06, saves_zmm = (state & 0xe6) == 0xe6;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return found;
  const bool avx2 = b >> 5 & 1;
  const bool f = b >> 16 & 1, dq = b >> 17 & 1, bw = b >> 30 & 1, vl = b >> 31 & 1, vnni = c >> 11 & 1;
  found.avx2 = saves_ymm && avx2 && fma && f16c;
  found.avx512 = found.avx2 && saves_zmm && f && dq && bw && vl && vnni;
  if (found.avx2 && a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) found.avxvnni = a >> 4 & 1;
  return found;
}

}  // namespace
#endif

const Kernels* find_kernels(const char* name) {
  const bool any = strcmp(name, "auto") == 0;
#if defined(TM_X86)
  const Features has = detect();
  if (has.avx512 && (any || strcmp(name, "avx512") == 0)) return &kAvx512Kernels;
  if (has.avxvnni && (any || strcmp(name, "avxvnni") == 0)) return &kAvxVnniKernels;
  if (has.avx2 && (any || strcmp(name, "avx2") == 0)) return &kAvx2Kernels;
#endif
  if (any || strcmp(name, "scalar") == 0) return &kScalarKernels;
  return nullptr;
}

}  // namespace mill
