// The text of one sequence, prompt and output, indexed as it grows. The contexts that end in its last token are not, until a
// token follows: where the end of the text is looked for, it does not find itself.
#pragma once
#include <cstdint>
#include <vector>

#include "draft_search.h"

namespace mill {

class SequenceIndex {
 public:
  // expected: tokens that are known to come soon.
  SequenceIndex(const ContextLengths& contexts, int expected) : contexts_(contexts) {
    num_buckets_ = 256;
    while (num_buckets_ <= expected) num_buckets_ *= 2;
    heads_.assign(static_cast<size_t>(num_buckets_) * contexts_.count, -1);
  }

  void append(const int32_t* tokens, int count) {
    for (int i = 0; i < count; i++) {
      if (size() >= num_buckets_) grow();
      if (size() > 0) link(size() - 1);
      tokens_.push_back(tokens[i]);
    }
  }

  int size() const { return static_cast<int>(tokens_.size()); }
  const int32_t* tokens() const { return tokens_.data(); }

  int head(int level, uint64_t hash) const { return heads_[bucket(level, hash)]; }
  int older(int level, int at) const { return older_[static_cast<size_t>(at) * contexts_.count + level]; }
  bool owns(int) const { return true; }
  int before(int at) const { return at - 1; }
  int after(int at) const { return at + 1; }
  int32_t token(int at) const { return tokens_[at]; }
  int32_t token(int at, const Draft& draft) const { return at < size() ? tokens_[at] : draft.tokens[at - size()]; }

 private:
  size_t bucket(int level, uint64_t hash) const {
    return static_cast<size_t>(level) * num_buckets_ + (hash & static_cast<uint64_t>(num_buckets_ - 1));
  }

  void link(int at) {
    uint64_t hashes[kMostLengths];
    const int count = hash_contexts(contexts_, tokens_.data() + at + 1, at + 1, 0, hashes);
    older_.resize(static_cast<size_t>(at + 1) * contexts_.count, -1);
    for (int level = 0; level < count; level++) {
      int32_t& head = heads_[bucket(level, hashes[level])];
      older_[static_cast<size_t>(at) * contexts_.count + level] = head;
      head = at;
    }
  }

  void grow() {
    num_buckets_ *= 2;
    heads_.assign(static_cast<size_t>(num_buckets_) * contexts_.count, -1);
    for (int at = 0; at + 1 < size(); at++) link(at);
  }

  const ContextLengths contexts_;
  int num_buckets_;
  std::vector<int32_t> tokens_, heads_, older_;
};

}  // namespace mill
