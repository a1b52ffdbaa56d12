// What ended sequences have put out, indexed for those that run, in a bounded number of bytes.
//
// Every text has a scope, and is found from within it only: the scope's number is in every hash and is compared at every
// place. Tokens lie in pages, so that texts come and go without moving others; chains are linked in both directions for the same
// reason. A long text is cut into several, which overlap so that every place has its whole context and what follows it in one,
// and is indexed a few tokens at a time: no call takes long.
//
// Where room is needed, the scope with the greatest product of the square of its pages and the time since it was last of use
// loses the text that was of use longest ago: who has much gives first, who has gone does not stay for ever, and of scopes of
// one size the one that has gone longest gives. Time counts texts.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <list>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "draft_search.h"

namespace mill {

class OutputIndex {
 public:
  OutputIndex(const ContextLengths& contexts, int longest, int64_t num_bytes, int most_texts);

  void add(const std::string& scope, const int32_t* tokens, int count);
  // Indexes about so many tokens of what was added.
  void work(int num_tokens);

  // One scope as draft_search.h wants it.
  struct View {
    const OutputIndex& index;
    int scope;
    int head(int level, uint64_t hash) const { return index.heads_[index.bucket(level, hash)] - 1; }
    int older(int level, int at) const { return index.older_[index.link_of(level, at)] - 1; }
    bool owns(int at) const { return index.pages_[at / kPage].scope == scope; }
    int before(int at) const { return at % kPage ? at - 1 : index.pages_[at / kPage].before * kPage + kPage - 1; }
    int after(int at) const {
      const Page& page = index.pages_[at / kPage];
      return at % kPage + 1 < page.count ? at + 1 : page.after * kPage;
    }
    int32_t token(int at) const { return index.tokens_[at]; }
    int32_t token(int at, const Draft&) const { return index.tokens_[at]; }
  };

  // -1 where nothing is known of it.
  int number_of(const std::string& scope) const;
  // The text of this place was of use.
  void touch(const std::string& scope, int at);

 private:
  static constexpr int kPage = 32, kMostText = 4096, kAhead = 64;

  struct Text {
    std::vector<int> pages;
    int first, linked, end;  // contexts that end in [first, linked) are in the chains, those in [linked, end) will be
  };
  struct Scope {
    int number;
    int64_t num_pages = 0, last_use = 0;
    std::list<Text> texts;  // the one that was of use last first
  };
  struct Page {
    int scope = -1, before = -1, after = -1, count = 0;  // before, after: pages of the same text; -kPage / kPage is -1, too
    std::list<Text>::iterator text;
  };
  struct Added {
    std::string scope;
    std::vector<int32_t> tokens;
    int first, end;
  };
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  using Zeros = std::unique_ptr<int32_t[], Free>;  // not there before they are written
  static Zeros zeros(size_t count);

  size_t bucket(int level, uint64_t hash) const {
    return static_cast<size_t>(level) * num_buckets_ + (hash & static_cast<uint64_t>(num_buckets_ - 1));
  }
  size_t link_of(int level, int at) const { return static_cast<size_t>(at) * contexts_.count + level; }
  int place(const Text& text, int index) const { return text.pages[index / kPage] * kPage + index % kPage; }

  void begin(const Added& added);
  int hash(const Text& text, int index, int scope, uint64_t* hashes) const;
  void link(const Text& text, int index);
  void unlink(const Text& text, int index);
  void forget_one();

  const ContextLengths contexts_;
  const int longest_, most_texts_;
  int64_t num_buckets_ = 256, clock_ = 0;
  int num_texts_ = 0, next_scope_ = 0;
  Zeros tokens_, heads_, older_, newer_;  // chains by place + 1, 0: none; at the head of one `newer_` is -1 - its bucket
  std::vector<Page> pages_;
  std::vector<int> free_;
  std::unordered_map<std::string, Scope> scopes_;
  std::deque<Added> added_;
  Text* current_ = nullptr;  // the one that is being indexed
};

}  // namespace mill
