// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): a draw is a pure function of key
// and counter, so no generator state exists anywhere.
#pragma once
#include <cstdint>

namespace mill {

// The first output word for key `seed` and counter (position, choice, purpose, 0).
inline uint32_t philox(uint64_t seed, uint32_t position, uint32_t choice, uint32_t purpose) {
  uint32_t counter[4] = {position, choice, purpose, 0};
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; round++) {
    const uint64_t product0 = 0xD2511F53ull * counter[0];
    const uint64_t product1 = 0xCD9E8D57ull * counter[2];
    const uint32_t next[4] = {
        static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key0,
        static_cast<uint32_t>(product1),
        static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key1,
        static_cast<uint32_t>(product0),
    };
    for (int i = 0; i < 4; i++) counter[i] = next[i];
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter[0];
}

}  // namespace mill
