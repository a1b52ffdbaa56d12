// See expert_store.h.
#include "expert_store.h"

#include <algorithm>

namespace mill {

namespace {

constexpr int kFewRows = 16;    // steps that guesses are learnt from and made in
constexpr int kMostGuessed = 4;  // read ahead at once in such a step
constexpr int kPage = 4096;

int64_t expert_bytes(const tm_extent (&parts)[2]) { return parts[0].num_bytes + parts[1].num_bytes; }

}  // namespace

// The reader writes into memory that goes after this.
ExpertStore::~ExpertStore() { drain(); }

void ExpertStore::drain() {
  for (int slot = 0; slots_ != nullptr && slot < bookkeeping_.num_slots(); slot++)
    for (Load& load : slots_[slot].loads)
      if (load.state.load() == Load::kAsked && !reader_->withdraw(&load)) reader_->wait(&load);
}

int ExpertStore::add_layer(const tm_extent* gate_up, const tm_extent* down, int num_experts) {
  const auto known = std::find(first_offsets_.begin(), first_offsets_.end(), gate_up->offset);
  if (known != first_offsets_.end()) return static_cast<int>(known - first_offsets_.begin());
  drain();
  first_offsets_.push_back(gate_up->offset);
  for (int e = 0; e < num_experts; e++) {
    experts_.push_back({{gate_up[e], down[e]}});
    slot_bytes_ = std::max(slot_bytes_, expert_bytes(experts_.back().parts));
  }
  bookkeeping_.add_layer(num_experts);
  guesses_.add_layer(num_experts);
  slots_.reset();
  return bookkeeping_.num_layers() - 1;
}

std::string ExpertStore::prepare() {
  if (slots_ != nullptr || experts_.empty()) return "";
  const int64_t room = memory_bytes_ / slot_bytes_;
  if (room < 1 || reinterpret_cast<uintptr_t>(memory_) % kPage != 0) return "no room for an expert";
  const int num_slots = static_cast<int>(std::min<int64_t>(room, static_cast<int64_t>(experts_.size())));
  bookkeeping_.resize(num_slots);
  slots_ = std::make_unique<Slot[]>(num_slots);
  return "";
}

void ExpertStore::begin(int layer, const int* experts, const int* rows, int num_experts, int total_rows) {
  if (slots_ == nullptr) prepare();
  const int first = bookkeeping_.first_of(layer);
  end_wave();
  bookkeeping_.count(layer, experts, rows, num_experts, total_rows);
  left_.clear();
  for (int i = 0; i < num_experts; i++) {
    left_.push_back(first + experts[i]);
    const bool is_here = bookkeeping_.slot_of(left_.back()) >= 0;
    (is_here ? hits_ : misses_).fetch_add(1, std::memory_order_relaxed);
    if (is_here && slot_of(left_.back()).guessed) {
      guess_hits_.fetch_add(1, std::memory_order_relaxed);
      slot_of(left_.back()).guessed = false;
    }
  }
  const std::vector<int> now(experts, experts + num_experts);
  if (layer == layer_ + 1) {
    judge_guess(now);
    if (total_rows <= kFewRows && layer > 0) guesses_.learn(layer, last_, now);
  }
  would_read_.clear();
  last_ = now;
  layer_ = layer;
  num_rows_ = total_rows;
  wave_.clear();
}

const std::vector<int>& ExpertStore::next_wave() {
  const bool is_first = wave_.empty();
  const size_t needed = left_.size();
  const int first = bookkeeping_.first_of(layer_);
  end_wave();
  wave_.clear();
  if (left_.empty()) return wave_;
  // As many as there are slots, of which what is in memory stays.
  size_t count = std::min<size_t>(needed, bookkeeping_.num_slots());
  for (size_t i = 0; i < count; i++) {
    if (bookkeeping_.slot_of(left_[i]) < 0) continue;
    bookkeeping_.hold(left_[i]);
    held_.push_back(left_[i]);
  }
  settle_guesses(false);
  std::vector<int> coming, missing;
  for (size_t i = 0; i < count; i++) {
    const int expert = left_[i];
    if (bookkeeping_.slot_of(expert) < 0) {
      if (!claim(expert, false)) {
        settle_guesses(true);
        claim(expert, false);
      }
      missing.push_back(expert);
    } else if (is_ready(expert)) {
      wave_.push_back(expert - first);
    } else {
      coming.push_back(expert);
      for (Load& load : slot_of(expert).loads) reader_->hurry(&load);
    }
  }
  for (int which = 0; which < 2; which++)
    for (int expert : missing) reader_->ask(&slot_of(expert).loads[which], false);
  for (int expert : coming) wave_.push_back(expert - first);
  for (int expert : missing) wave_.push_back(expert - first);
  left_.erase(left_.begin(), left_.begin() + static_cast<std::ptrdiff_t>(count));
  if (is_first && left_.empty()) guess(static_cast<int>(needed));
  return wave_;
}

const uint8_t* ExpertStore::gate_up(int layer, int expert) { return part(layer, expert, 0); }
const uint8_t* ExpertStore::down(int layer, int expert) { return part(layer, expert, 1); }

const uint8_t* ExpertStore::part(int layer, int expert, int which) {
  Load& load = slot_of(bookkeeping_.first_of(layer) + expert).loads[which];
  reader_->wait(&load);
  return load.to;
}

bool ExpertStore::is_ready(int expert) {
  const Slot& slot = slot_of(expert);
  return slot.loads[0].state.load(std::memory_order_acquire) == Load::kReady &&
         slot.loads[1].state.load(std::memory_order_acquire) == Load::kReady;
}

// A slot for an expert, held, its loads ready to be asked for. False: there is none.
bool ExpertStore::claim(int expert, bool is_guess) {
  const int index = bookkeeping_.take(expert);
  if (index < 0) return false;
  bookkeeping_.hold(expert);
  (is_guess ? guessed_ : held_).push_back(expert);
  Slot& slot = slots_[index];
  slot.guessed = is_guess;
  uint8_t* to = memory_ + index * slot_bytes_;
  for (int which = 0; which < 2; which++) {
    const tm_extent& from = experts_[expert].parts[which];
    Load& load = slot.loads[which];
    load.offset = from.offset;
    load.num_bytes = from.num_bytes;
    load.sum = from.sum;
    load.to = to;
    to += from.num_bytes;
  }
  return true;
}

void ExpertStore::end_wave() {
  for (int expert : held_) bookkeeping_.let_go(expert);
  held_.clear();
}

// Guesses that the wave holds are its own now; what has come may leave again; what has not begun need not. wait: for all.
void ExpertStore::settle_guesses(bool wait) {
  std::vector<int> unsettled;
  for (int expert : guessed_) {
    if (std::find(held_.begin(), held_.end(), expert) != held_.end()) continue;
    Slot& slot = slot_of(expert);
    bool has_begun = false;
    for (Load& load : slot.loads) has_begun |= load.state.load() != Load::kIdle && !reader_->withdraw(&load);
    if (!has_begun) {
      bookkeeping_.let_go(expert);
      bookkeeping_.give_back(expert);
      continue;
    }
    // A part that was withdrawn is asked for again, so that the slot is whole.
    for (Load& load : slot.loads)
      if (load.state.load() == Load::kIdle) reader_->ask(&load, true);
    for (Load& load : slot.loads)
      if (wait) reader_->hurry(&load), reader_->wait(&load);
    if (is_ready(expert)) {
      bookkeeping_.let_go(expert);
    } else {
      unsettled.push_back(expert);
    }
  }
  guessed_.swap(unsettled);
}

void ExpertStore::judge_guess(const std::vector<int>& now) {
  int num_right = 0;
  for (int guessed : would_read_) num_right += std::binary_search(now.begin(), now.end(), guessed);
  guesses_.judge(num_right, static_cast<int>(would_read_.size()));
}

// Read ahead for the layer after: what a step of few rows is likely to need, where guesses pay; of a long prompt, which needs
// nearly all, what is needed most.
void ExpertStore::guess(int num_needed) {
  const int next = layer_ + 1;
  if (next >= bookkeeping_.num_layers()) return;
  const int first = bookkeeping_.first_of(next), count = bookkeeping_.experts_of(next);
  const bool is_few = num_rows_ <= kFewRows;
  std::vector<int> wanted;
  if (is_few) {
    for (int place : guesses_.guess(layer_, last_, num_needed))
      if (bookkeeping_.slot_of(first + place) < 0) wanted.push_back(place);
    would_read_ = wanted;
    if (!guesses_.pays()) return;
  } else if (2 * num_needed >= bookkeeping_.experts_of(layer_)) {
    for (int place = 0; place < count; place++)
      if (bookkeeping_.slot_of(first + place) < 0) wanted.push_back(place);
    std::stable_sort(wanted.begin(), wanted.end(),
                     [&](int a, int b) { return bookkeeping_.score(first + a) > bookkeeping_.score(first + b); });
  }
  const size_t most = is_few ? kMostGuessed : bookkeeping_.num_slots() / 4;
  if (wanted.size() > most) wanted.resize(most);
  std::vector<int> kept;  // of that layer, what is here is needed as much
  for (int e = first; e < first + count; e++)
    if (bookkeeping_.slot_of(e) >= 0) kept.push_back(e);
  for (int expert : kept) bookkeeping_.hold(expert);
  for (int place : wanted) {
    if (!claim(first + place, true)) break;
    for (Load& load : slot_of(first + place).loads) reader_->ask(&load, true);
    guesses_read_.fetch_add(1, std::memory_order_relaxed);
  }
  for (int expert : kept)
    if (std::find(guessed_.begin(), guessed_.end(), expert) == guessed_.end()) bookkeeping_.let_go(expert);
}

tm_store_facts ExpertStore::facts() const {
  tm_store_facts facts = {};
  facts.num_slots = bookkeeping_.num_slots();
  facts.slot_bytes = slot_bytes_;
  facts.hits = hits_.load(std::memory_order_relaxed);
  facts.misses = misses_.load(std::memory_order_relaxed);
  facts.guesses_read = guesses_read_.load(std::memory_order_relaxed);
  facts.guess_hits = guess_hits_.load(std::memory_order_relaxed);
  return facts;
}

}  // namespace mill
