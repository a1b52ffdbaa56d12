// See output_index.h.
#include "output_index.h"

#include <new>

namespace mill {

OutputIndex::Zeros OutputIndex::zeros(size_t count) {
  void* memory = std::calloc(count, sizeof(int32_t));
  if (memory == nullptr) throw std::bad_alloc();
  return Zeros(static_cast<int32_t*>(memory));
}

OutputIndex::OutputIndex(const ContextLengths& contexts, int longest, int64_t num_bytes, int most_texts)
    : contexts_(contexts), longest_(longest), most_texts_(most_texts) {
  const int64_t levels = contexts.count, token_bytes = sizeof(int32_t) * (1 + 3 * levels) + sizeof(Page) / kPage;
  const int64_t least = 4 * kMostText / kPage;  // there is room for a text while another leaves
  const int64_t num_pages = std::max(least, std::min<int64_t>(num_bytes / token_bytes / kPage, INT32_MAX / kPage - 1));
  while (num_buckets_ * 2 <= num_pages * kPage) num_buckets_ *= 2;
  tokens_ = zeros(num_pages * kPage);
  heads_ = zeros(num_buckets_ * levels);
  older_ = zeros(num_pages * kPage * levels);
  newer_ = zeros(num_pages * kPage * levels);
  pages_.resize(num_pages);
  for (int64_t page = num_pages; page-- > 0;) free_.push_back(static_cast<int>(page));
}

void OutputIndex::add(const std::string& scope, const int32_t* tokens, int count) {
  for (int from = 0, first = 0; most_texts_ > 0;) {
    const int length = std::min(kMostText, count - from);
    const bool is_last = from + length == count;
    const int end = is_last ? length - 1 : length - kAhead;  // nothing follows the last token
    if (end > first) added_.push_back({scope, {tokens + from, tokens + from + length}, first, end});
    if (is_last) return;
    from += end - longest_;
    first = longest_;
  }
}

void OutputIndex::work(int num_tokens) {
  while (num_tokens > 0) {
    if (current_ == nullptr) {
      if (added_.empty()) return;
      begin(added_.front());
      added_.pop_front();
    }
    for (; num_tokens > 0 && current_->linked < current_->end; num_tokens--) link(*current_, current_->linked++);
    if (current_->linked == current_->end) current_ = nullptr;
  }
}

void OutputIndex::begin(const Added& added) {
  const int count = static_cast<int>(added.tokens.size()), num_pages = (count + kPage - 1) / kPage;
  while (static_cast<int>(free_.size()) < num_pages || num_texts_ >= most_texts_) forget_one();
  const auto [entry, is_new] = scopes_.try_emplace(added.scope);
  Scope& scope = entry->second;
  if (is_new) scope.number = next_scope_++;
  scope.last_use = ++clock_;
  scope.num_pages += num_pages;
  scope.texts.push_front({{}, added.first, added.first, added.end});
  num_texts_++;
  Text& text = scope.texts.front();
  for (int i = 0; i < num_pages; i++) {
    const int number = free_.back(), before = i > 0 ? text.pages.back() : -1;
    free_.pop_back();
    pages_[number] = {scope.number, before, -1, std::min(kPage, count - i * kPage), scope.texts.begin()};
    if (before >= 0) pages_[before].after = number;
    text.pages.push_back(number);
    std::copy_n(added.tokens.data() + i * kPage, pages_[number].count, tokens_.get() + static_cast<size_t>(number) * kPage);
  }
  current_ = &text;
}

int OutputIndex::hash(const Text& text, int index, int scope, uint64_t* hashes) const {
  int32_t ending[kMostContext];
  const int most = std::min(index + 1, contexts_.lengths[contexts_.count - 1]);
  int32_t* const end = ending + most;
  for (int i = 0; i < most; i++) end[-1 - i] = tokens_[place(text, index - i)];
  return hash_contexts(contexts_, end, most, static_cast<uint64_t>(scope) + 1, hashes);
}

void OutputIndex::link(const Text& text, int index) {
  uint64_t hashes[kMostLengths];
  const int at = place(text, index), count = hash(text, index, pages_[at / kPage].scope, hashes);
  for (int level = 0; level < count; level++) {
    const size_t head = bucket(level, hashes[level]);
    const int32_t older = heads_[head];
    if (older > 0) newer_[link_of(level, older - 1)] = at + 1;
    older_[link_of(level, at)] = older;
    newer_[link_of(level, at)] = -1 - static_cast<int32_t>(hashes[level] & static_cast<uint64_t>(num_buckets_ - 1));
    heads_[head] = at + 1;
  }
}

void OutputIndex::unlink(const Text& text, int index) {
  const int at = place(text, index);
  for (int level = 0; level < contexts_.count && contexts_.lengths[level] <= index + 1; level++) {
    const int32_t older = older_[link_of(level, at)], newer = newer_[link_of(level, at)];
    if (older > 0) newer_[link_of(level, older - 1)] = newer;
    (newer > 0 ? older_[link_of(level, newer - 1)] : heads_[static_cast<size_t>(level) * num_buckets_ + (-1 - newer)]) = older;
  }
}

void OutputIndex::forget_one() {
  auto chosen = scopes_.begin();
  const auto cost = [&](const Scope& scope) { return scope.num_pages * scope.num_pages * (clock_ - scope.last_use + 1); };
  for (auto each = scopes_.begin(); each != scopes_.end(); ++each) {
    const int64_t own = cost(each->second), most = cost(chosen->second);
    if (own > most || (own == most && each->second.number < chosen->second.number)) chosen = each;
  }
  Scope& scope = chosen->second;
  const Text& text = scope.texts.back();
  for (int index = text.first; index < text.linked; index++) unlink(text, index);
  for (const int page : text.pages) {
    pages_[page].scope = -1;
    free_.push_back(page);
  }
  scope.num_pages -= static_cast<int64_t>(text.pages.size());
  scope.texts.pop_back();
  num_texts_--;
  if (scope.texts.empty()) scopes_.erase(chosen);
}

int OutputIndex::number_of(const std::string& scope) const {
  const auto found = scopes_.find(scope);
  return found == scopes_.end() ? -1 : found->second.number;
}

void OutputIndex::touch(const std::string& name, int at) {
  Scope& scope = scopes_.at(name);
  scope.last_use = clock_;
  scope.texts.splice(scope.texts.begin(), scope.texts, pages_[at / kPage].text);
}

}  // namespace mill
