// Drafters without a model, for the sequences of one worker: which tokens may come next, from what is written already.
//
//   ngram   the longest run of ngram_min to ngram_max tokens that ends the sequence and occurred in it before: what followed
//           it the last time (prompt lookup; LLMA, arXiv 2304.04487). The last time resembles most what comes now; where it is
//           so near that it reaches the end, the draft repeats itself, so that a period goes on.
//   suffix  the longest run of up to suffix_depth tokens, in the sequence, in what ended sequences of its scope put out, or in a
//           corpus: what followed it most often, as far as the match is long and the counts are sure (SuffixDecoding, arXiv
//           2411.04975). Of these texts the one drafts of which more tokens are expected to be right.
//
// Equal calls give equal drafts: nothing depends on time, addresses or the order of a hash table.
#include <memory>
#include <new>
#include <string>
#include <unordered_map>
#include <vector>

#include "../include/tokenmill_native.h"
#include "corpus_index.h"
#include "draft_search.h"
#include "fail.h"
#include "output_index.h"
#include "sequence_index.h"

using mill::Draft;
using mill::fail;
using mill::guarded;

namespace {

constexpr int kOutputsAtOnce = 1024;  // tokens of ended sequences indexed by a call

struct Sequence {
  std::string scope;
  int num_before;
  mill::SequenceIndex index;
  std::vector<int32_t> corpora;
};

mill::ContextLengths contexts_of(const tm_drafter_settings& given) {
  const int shortest = given.suffix_depth > 0 ? 1 : given.ngram_min;
  return {shortest, std::max(given.ngram_max, given.suffix_depth)};
}

}  // namespace

struct tm_drafter {
  explicit tm_drafter(const tm_drafter_settings& given)
      : settings(given),
        contexts(contexts_of(given)),
        outputs(contexts, given.suffix_depth, given.output_bytes, given.suffix_depth > 0 ? given.suffix_texts : 0) {}

  bool look_up_ngram(const Sequence& sequence, int most, Draft& draft) {
    if (settings.ngram_max == 0) return false;
    const mill::SequenceIndex& own = sequence.index;
    find_matches(own, contexts, own.tokens() + own.size(), own.size(), 0, settings.ngram_max, matches);
    if (matches.length < settings.ngram_min) return false;
    matches.count = 1;
    follow(own, matches, most, 0, settings.vocab_size, draft);
    return draft.count > 0;
  }

  // Where the draft is from; -1: there is none.
  int look_up_suffix(const Sequence& sequence, int most, Draft& draft) {
    if (settings.suffix_depth == 0) return -1;
    const mill::SequenceIndex& own = sequence.index;
    const int32_t* const end = own.tokens() + own.size();
    find_matches(own, contexts, end, own.size(), 0, settings.suffix_depth, matches);
    follow_suffix(own, most, draft);
    if (const int number = outputs.number_of(sequence.scope); number >= 0) {
      const mill::OutputIndex::View view{outputs, number};
      find_matches(view, contexts, end, own.size(), static_cast<uint64_t>(number) + 1, settings.suffix_depth, matches);
      follow_suffix(view, most, other);
      if (other.score > draft.score) {
        draft = other;
        outputs.touch(sequence.scope, matches.at[0]);
      }
    }
    int source = TM_DRAFT_SUFFIX;
    for (const int32_t number : sequence.corpora) {
      corpora[number].find_matches(end, own.size(), settings.suffix_depth, matches);
      follow_suffix(corpora[number], most, other);
      if (other.score > draft.score) {
        draft = other;
        source = TM_DRAFT_CORPUS;
      }
    }
    return draft.count > 0 ? source : -1;
  }

  template <class Index>
  void follow_suffix(const Index& index, int most, Draft& draft) {
    const float longest = settings.suffix_factor * static_cast<float>(matches.length);
    follow(index, matches, static_cast<int>(std::min(longest, static_cast<float>(most))), settings.suffix_chance,
           settings.vocab_size, draft);
  }

  // The drafter that has something, asked in order; -1: none has.
  int draft_for(const Sequence& sequence, int most, Draft& draft) {
    const int source = settings.suffix_first != 0 ? look_up_suffix(sequence, most, draft) : -1;
    if (source >= 0) return source;
    if (look_up_ngram(sequence, most, draft)) return TM_DRAFT_NGRAM;
    return settings.suffix_first != 0 ? -1 : look_up_suffix(sequence, most, draft);
  }

  const tm_drafter_settings settings;
  const mill::ContextLengths contexts;
  mill::OutputIndex outputs;
  std::vector<mill::CorpusIndex> corpora;
  std::unordered_map<int64_t, Sequence> sequences;
  mill::Matches matches;
  Draft other;
};

extern "C" {

tm_drafter* tm_drafter_new(const tm_drafter_settings* given) {
  tm_drafter* made = nullptr;
  guarded([&] {
    const bool has_ngram = given->ngram_max > 0, has_suffix = given->suffix_depth > 0;
    if (!has_ngram && !has_suffix) return fail("a drafter that looks nothing up");
    if (has_ngram && (given->ngram_min < 1 || given->ngram_min > given->ngram_max)) return fail("n-grams of no length");
    if (given->ngram_max > mill::kMostContext || given->suffix_depth > mill::kMostContext) return fail("a context is too long");
    made = new tm_drafter(*given);
    return 0;
  });
  return made;
}

void tm_drafter_free(tm_drafter* drafter) { delete drafter; }

int32_t tm_drafter_add_corpus(tm_drafter* drafter, const int32_t* tokens, const int32_t* places, int32_t num_places) {
  return guarded([&] {
    drafter->corpora.emplace_back(tokens, places, num_places);
    return 0;
  });
}

int32_t tm_drafter_begin(tm_drafter* drafter, int64_t sequence, const char* scope, int32_t expected, int32_t num_before) {
  return guarded([&] {
    drafter->sequences.erase(sequence);
    drafter->sequences.emplace(sequence, Sequence{scope, num_before, mill::SequenceIndex(drafter->contexts, expected), {}});
    return 0;
  });
}

int32_t tm_drafter_use_corpora(tm_drafter* drafter, int64_t sequence, const int32_t* corpora, int32_t count) {
  return guarded([&] {
    for (int i = 0; i < count; i++)
      if (corpora[i] < 0 || corpora[i] >= static_cast<int>(drafter->corpora.size())) return fail("a corpus that is not there");
    drafter->sequences.at(sequence).corpora.assign(corpora, corpora + count);
    return 0;
  });
}

int32_t tm_drafter_end(tm_drafter* drafter, int64_t sequence) {
  return guarded([&] {
    const auto found = drafter->sequences.find(sequence);
    if (found == drafter->sequences.end()) return 0;
    const Sequence& ended = found->second;
    drafter->outputs.add(ended.scope, ended.index.tokens() + ended.num_before, ended.index.size() - ended.num_before);
    drafter->sequences.erase(found);
    return 0;
  });
}

int32_t tm_drafter_propose(tm_drafter* drafter, int32_t num_sequences, const int64_t* sequences, const int32_t* starts,
                           const int32_t* tokens, const int32_t* most, int32_t width, int32_t* counts, int32_t* sources,
                           int32_t* drafts, float* chances) {
  return guarded([&] {
    drafter->outputs.work(kOutputsAtOnce);
    Draft draft;
    for (int i = 0; i < num_sequences; i++) {
      Sequence& sequence = drafter->sequences.at(sequences[i]);
      sequence.index.append(tokens + starts[i], starts[i + 1] - starts[i]);
      const int wanted = std::min(most[i], std::min(width, mill::kMostDrafted));
      draft.count = 0;
      sources[i] = wanted > 0 ? drafter->draft_for(sequence, wanted, draft) : -1;
      counts[i] = sources[i] < 0 ? 0 : draft.count;
      std::copy_n(draft.tokens, counts[i], drafts + static_cast<int64_t>(i) * width);
      std::copy_n(draft.chances, counts[i], chances + static_cast<int64_t>(i) * width);
    }
    return 0;
  });
}

}  // extern "C"
