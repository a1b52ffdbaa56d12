// What drafters without a model share: where the end of a text has occurred before, and what followed it there.
//
// Places are indexed by the contexts that end in them, runs of tokens of a few lengths, each twice the one before. All places
// of one context are in a chain, the latest first, in a bucket that contexts of equal hash share. A context is looked up from
// the longest length down; at each place the match is then counted token by token, so no hash is ever trusted. Only so many
// places are looked at: what was written lately resembles most what comes, and a lookup takes about the same time in any text.
#pragma once
#include <algorithm>
#include <cstdint>

namespace mill {

constexpr int kOccurrences = 64;  // of a context: the latest, that are looked at
constexpr int kSteps = 1024;      // along a chain: places of other contexts included
constexpr int kMostLengths = 9, kMostContext = 256;
constexpr int kMostDrafted = 128;

struct ContextLengths {
  ContextLengths(int shortest, int longest) {
    for (int length = shortest; length <= longest && count < kMostLengths; length *= 2) lengths[count++] = length;
  }
  int count = 0;
  int lengths[kMostLengths] = {};
};

// The hash of each context that ends before `end`, where num_tokens precede it; returns how many there are.
inline int hash_contexts(const ContextLengths& contexts, const int32_t* end, int num_tokens, uint64_t seed, uint64_t* hashes) {
  int level = 0;
  uint64_t hash = seed;
  for (int i = 1; level < contexts.count && i <= num_tokens; i++) {
    hash = (hash ^ static_cast<uint32_t>(end[-i])) * 0x9E3779B97F4A7C15u;
    hash ^= hash >> 32;
    if (i == contexts.lengths[level]) hashes[level++] = hash;
  }
  return level;
}

// Places where the last `length` tokens of a text end, too; the latest first.
struct Matches {
  int length = 0, count = 0;
  int at[kOccurrences];
};

// The tokens that may come; score: how many of them are expected to be right.
struct Draft {
  int count = 0;
  float score = 0;
  int32_t tokens[kMostDrafted];
  float chances[kMostDrafted];
};

// Of the longest context of at most `longest` tokens that ends the text and occurs in the index: the places, among its latest,
// where most tokens match.
template <class Index>
void find_matches(const Index& index, const ContextLengths& contexts, const int32_t* end, int num_tokens, uint64_t seed,
                  int longest, Matches& found) {
  uint64_t hashes[kMostLengths];
  num_tokens = std::min(num_tokens, longest);
  found.length = found.count = 0;
  for (int level = hash_contexts(contexts, end, num_tokens, seed, hashes) - 1; level >= 0 && found.count == 0; level--) {
    int num_found = 0, at = index.head(level, hashes[level]);
    for (int step = 0; at >= 0 && step < kSteps && num_found < kOccurrences; step++, at = index.older(level, at)) {
      int length = 0;
      for (int place = index.owns(at) ? at : -1; place >= 0 && length < num_tokens; place = index.before(place)) {
        if (index.token(place) != end[-1 - length]) break;
        length++;
      }
      if (length < contexts.lengths[level]) continue;
      num_found++;
      if (length > found.length) found.length = length, found.count = 0;
      if (length == found.length) found.at[found.count++] = at;
    }
  }
}

// At most `most` tokens, each what followed the matches most often (of two, what followed the latest), with its share as the
// chance; a token whose chance, with those of all before it, is below `least` ends the draft. Matches that it did not follow
// count no more. A place that reaches the end of the text goes on with the draft itself.
template <class Index>
void follow(const Index& index, Matches& matches, int most, float least, int vocab_size, Draft& draft) {
  int32_t kinds[kOccurrences];
  int counts[kOccurrences], of[kOccurrences];
  float product = 1;
  draft.count = 0;
  draft.score = 0;
  while (draft.count < most) {
    int num_kinds = 0, num_left = 0, best = 0;
    for (int i = 0; i < matches.count; i++) {
      const int at = index.after(matches.at[i]);
      if (at < 0) continue;
      const int32_t token = index.token(at, draft);
      int kind = 0;
      while (kind < num_kinds && kinds[kind] != token) kind++;
      if (kind == num_kinds) kinds[num_kinds] = token, counts[num_kinds++] = 0;
      counts[kind]++;
      matches.at[num_left] = at;
      of[num_left++] = kind;
    }
    for (int kind = 1; kind < num_kinds; kind++)
      if (counts[kind] > counts[best]) best = kind;
    if (num_left == 0 || kinds[best] < 0 || kinds[best] >= vocab_size) return;
    const float chance = static_cast<float>(counts[best]) / static_cast<float>(num_left);
    product *= chance;
    if (product < least) return;
    draft.tokens[draft.count] = kinds[best];
    draft.chances[draft.count++] = chance;
    draft.score += product;
    matches.count = 0;
    for (int i = 0; i < num_left; i++)
      if (of[i] == best) matches.at[matches.count++] = matches.at[i];
  }
}

}  // namespace mill
