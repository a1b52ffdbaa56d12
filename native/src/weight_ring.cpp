// See weight_ring.h.
#include "weight_ring.h"

namespace mill {

WeightRing::~WeightRing() {
  for (int i = 0; i < num_items_; i++) {
    Load& load = items_[i].load;
    if (load.state.load() == Load::kAsked && !reader_->withdraw(&load)) reader_->wait(&load);
  }
}

void WeightRing::set(const tm_ring_item* items, int num_items) {
  num_items_ = num_items;
  items_ = std::make_unique<Item[]>(num_items);
  for (int i = 0; i < num_items; i++) {
    Load& load = items_[i].load;
    load.offset = items[i].extent.offset;
    load.num_bytes = items[i].extent.num_bytes;
    load.sum = items[i].extent.sum;
    load.to = items[i].to;
    items_[i].stays = items[i].stays != 0;
  }
  for (int i = 0; i < num_items; i++) {
    const Load& own = items_[i].load;
    for (int back = 1; back <= num_items && items_[i].behind == 0; back++) {
      const Load& other = items_[(i - back + num_items) % num_items].load;
      if (other.to < own.to + own.num_bytes && own.to < other.to + other.num_bytes) items_[i].behind = back;
    }
  }
}

void WeightRing::need(int place) {
  if (num_done_ % num_items_ != place) start_at(place);
  read_on();
  reader_->wait(&items_[place].load);
}

void WeightRing::done(int place) {
  if (num_done_ % num_items_ != place) return;
  if (!items_[place].stays) items_[place].load.state.store(Load::kIdle, std::memory_order_relaxed);
  num_done_++;
  read_on();
}

void WeightRing::read_on() {
  for (; num_asked_ < num_done_ + num_items_; num_asked_++) {
    Item& item = items_[num_asked_ % num_items_];
    if (item.load.state.load(std::memory_order_relaxed) != Load::kIdle) {
      if (item.stays) continue;
      return;
    }
    if (num_asked_ - item.behind >= num_done_) return;
    reader_->ask(&item.load, false);
  }
}

// Somebody uses them in another order.
void WeightRing::start_at(int place) {
  for (int i = 0; i < num_items_; i++) {
    Load& load = items_[i].load;
    if (load.state.load() == Load::kAsked && !reader_->withdraw(&load)) reader_->wait(&load);
    if (!items_[i].stays) load.state.store(Load::kIdle, std::memory_order_relaxed);
  }
  num_done_ = num_asked_ = place;
}

}  // namespace mill
