// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): a draw is a pure function of key
// and counter, so no generator state exists anywhere.
#pragma once
#include <stdint.h>

namespace mill {

constexpr uint32_t kPhiloxMultiply0 = 0xD2511F53u, kPhiloxMultiply1 = 0xCD9E8D57u;
constexpr uint32_t kPhiloxWeyl0 = 0x9E3779B9u, kPhiloxWeyl1 = 0xBB67AE85u;

// Purposes of draws. Each has random words of its own. A token id's word has its upper byte from one, a block of 16 bytes for
// 16 ids, and its others from another, a block of four words for four ids: most ids have lost by the first.
constexpr uint32_t kPurposeToken = 0, kPurposeXtc = 1, kPurposeTokenRest = 2;

// The key `seed` and the first three words of the counter. The fourth tells blocks of four words apart.
struct DrawName {
  uint64_t seed;
  uint32_t position, choice, purpose;
};

struct PhiloxBlock {
  uint32_t words[4];
};

static inline PhiloxBlock philox(const DrawName& name, uint32_t block) {
  uint32_t counter[4] = {name.position, name.choice, name.purpose, block};
  uint32_t key0 = (uint32_t)name.seed, key1 = (uint32_t)(name.seed >> 32);
  for (int round = 0; round < 10; round++) {
    const uint64_t product0 = (uint64_t)kPhiloxMultiply0 * counter[0];
    const uint64_t product1 = (uint64_t)kPhiloxMultiply1 * counter[2];
    const uint32_t next[4] = {
        (uint32_t)(product1 >> 32) ^ counter[1] ^ key0,
        (uint32_t)product1,
        (uint32_t)(product0 >> 32) ^ counter[3] ^ key1,
        (uint32_t)product0,
    };
    for (int i = 0; i < 4; i++) counter[i] = next[i];
    key0 += kPhiloxWeyl0;
    key1 += kPhiloxWeyl1;
  }
  return {{counter[0], counter[1], counter[2], counter[3]}};
}

}  // namespace mill
