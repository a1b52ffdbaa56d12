// Weights that a step takes in one order, of which some stay in memory and the others pass through it: each has its place, and
// is read again as soon as those whose bytes it overwrites are done. So the disk reads on through a step and into the next.
//
// One thread at a time.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "../include/tokenmill_native.h"
#include "disk_reader.h"

namespace mill {

class WeightRing {
 public:
  explicit WeightRing(DiskReader* reader) : reader_(reader) {}
  ~WeightRing();

  // In the order of use; once, before the first step.
  void set(const tm_ring_item* items, int num_items);
  int num_items() const { return num_items_; }

  // A weight is about to be used: waits for it.
  void need(int place);
  void done(int place);

 private:
  struct Item {
    Load load;
    bool stays = false;
    int64_t behind = 0;  // of those before it in the order, round and round, the nearest that shares bytes
  };

  void read_on();
  void start_at(int place);

  DiskReader* const reader_;
  int num_items_ = 0;
  std::unique_ptr<Item[]> items_;
  int64_t num_done_ = 0, num_asked_ = 0;  // counted round and round
};

}  // namespace mill
