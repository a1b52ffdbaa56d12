// Experts of which a bounded number is in memory and all are in a file. An operation asks for those that its step needs of a
// layer: it gets them in waves of as many as fit, and waits for each that is not in memory where it computes it. Meanwhile the
// layer after may be guessed.
//
// Of the functions, `gate_up` and `down` may be called by all threads of a team at once, the others by one at a time.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "../include/tokenmill_native.h"
#include "disk_reader.h"
#include "expert_guess.h"
#include "expert_slots.h"

namespace mill {

class ExpertStore {
 public:
  ExpertStore(DiskReader* reader, uint8_t* memory, int64_t memory_bytes)
      : reader_(reader), memory_(memory), memory_bytes_(memory_bytes) {}
  ~ExpertStore();

  // A layer whose experts have these ranges of the file. Its number; known layers keep theirs. Not once a step has begun.
  int add_layer(const tm_extent* gate_up, const tm_extent* down, int num_experts);
  // Whether an expert of any layer known so far fits.
  bool has_room() const { return memory_bytes_ >= slot_bytes_; }
  // Makes the slots. What is wrong, empty where nothing is.
  std::string prepare();

  // A step needs these experts of a layer, in rising order, for so many rows each.
  void begin(int layer, const int* experts, const int* rows, int num_experts, int total_rows);
  // Experts of the step to compute now, those in memory first; empty once all were given. Waves are in rising order: none has
  // an expert below one of a wave before. Those given before may leave from here on.
  const std::vector<int>& next_wave();

  // Of an expert of the wave; waits for it.
  const uint8_t* gate_up(int layer, int expert);
  const uint8_t* down(int layer, int expert);

  tm_store_facts facts() const;

 private:
  struct Expert {
    tm_extent parts[2];  // gate and up, down
  };
  // The loads of a slot: of gate and up, and of down.
  struct Slot {
    Load loads[2];
    bool guessed = false;  // and not asked for since
  };

  Slot& slot_of(int expert) { return slots_[bookkeeping_.slot_of(expert)]; }
  const uint8_t* part(int layer, int expert, int which);
  bool is_ready(int expert);
  bool claim(int expert, bool is_guess);
  void drain();
  void end_wave();
  void settle_guesses(bool wait);
  void judge_guess(const std::vector<int>& now);
  void guess(int num_needed);

  DiskReader* const reader_;
  uint8_t* const memory_;
  const int64_t memory_bytes_;
  int64_t slot_bytes_ = 0;
  ExpertSlots bookkeeping_;
  ExpertGuess guesses_;
  std::vector<Expert> experts_;
  std::vector<int64_t> first_offsets_;  // of each layer, by which it is known
  std::unique_ptr<Slot[]> slots_;

  int layer_ = -1;            // of the step under way
  std::vector<int> left_;     // what the step needs and no wave has given yet, as numbers of experts
  std::vector<int> held_;     // by the wave
  std::vector<int> wave_;     // places in the layer
  std::vector<int> guessed_;  // read ahead, and not settled
  std::vector<int> last_;     // places in the layer that it needs
  int num_rows_ = 0;
  std::vector<int> would_read_;  // places in the layer after that were guessed and are not in memory

  std::atomic<int64_t> hits_{0}, misses_{0}, guesses_read_{0}, guess_hits_{0};
};

}  // namespace mill
