// A corpus as formats/corpus_index.py has it, mapped by the caller: its texts, and their places in the order of what is before
// them, the last token first. The end of a text is found among them by bisection, so that a lookup takes about as long in any
// corpus; what bounds of the bisection are known to match is not compared again (Manber and Myers, 1993).
#pragma once
#include <algorithm>
#include <cstdint>

#include "draft_search.h"

namespace mill {

class CorpusIndex {
 public:
  CorpusIndex(const int32_t* tokens, const int32_t* places, int num_places)
      : tokens_(tokens), places_(places), num_places_(num_places) {}

  // Of the places where most of the last `longest` tokens match: all, or kOccurrences that lie evenly among them, in order.
  void find_matches(const int32_t* end, int num_tokens, int longest, Matches& found) const {
    found.length = found.count = 0;
    num_tokens = std::min(num_tokens, longest);
    int least = -1, most = num_places_;  // whose contexts come before the end of the text, and do not
    int of_least = 0, of_most = 0;       // tokens that match there
    while (most - least > 1) {
      const int middle = least + (most - least) / 2;
      const Compared compared = compare(places_[middle], end, num_tokens, std::min(of_least, of_most));
      (compared.is_before ? least : most) = middle;
      (compared.is_before ? of_least : of_most) = compared.length;
    }
    found.length = std::max(of_least, of_most);
    if (found.length == 0) return;
    const int first = reach(least + 1, -1, end, found.length) + 1, last = reach(least, 1, end, found.length);
    const int64_t count = last - first;
    found.count = static_cast<int>(std::min<int64_t>(count, kOccurrences));
    for (int i = 0; i < found.count; i++) found.at[i] = places_[first + i * count / found.count];
  }

  int after(int at) const { return tokens_[at + 1] < 0 ? -1 : at + 1; }
  int32_t token(int at, const Draft&) const { return tokens_[at]; }

 private:
  struct Compared {
    int length;
    bool is_before;
  };

  // The context of a place, of which so many tokens are known to match. One that ends before the other comes before it.
  Compared compare(int place, const int32_t* end, int num_tokens, int known) const {
    for (int i = known; i < num_tokens; i++) {
      const int32_t token = tokens_[place - i];
      if (token < 0 || token != end[-1 - i]) return {i, token < end[-1 - i]};
    }
    return {num_tokens, false};
  }

  // The first index from `start`, which is none of those, in a direction, whose place matches fewer than `length` tokens.
  int reach(int start, int direction, const int32_t* end, int length) const {
    const auto matches = [&](int64_t index) {
      return index >= 0 && index < num_places_ && compare(places_[index], end, length, 0).length == length;
    };
    int64_t near = start, step = 1;  // near matches, or is the start
    while (matches(near + direction * step)) near += direction * step, step *= 2;
    int64_t far = near + direction * step;
    while (std::max(near, far) - std::min(near, far) > 1) {
      const int64_t middle = near + (far - near) / 2;
      (matches(middle) ? near : far) = middle;
    }
    return static_cast<int>(far);
  }

  const int32_t* tokens_;
  const int32_t* places_;
  int num_places_;
};

}  // namespace mill
