// Facts: what a table knows of a row in a training step beside its value, for updates that ask for it.
#pragma once
#include <cstddef>
#include <cstdint>

#include "kvjax/ffi/core/portable.h"
#include "kvjax/ffi/core/row.h"

namespace kvjax {

/// As kvjax/_values/facts.py reads them. Numbers of 64 bits are two words, the low one first.
struct RowFacts {
  int32_t occurrences = 0;     // of its key in the step's gradients
  int32_t frequency = 0;       // with this step
  int32_t missed = 0;          // steps between this one and the last; 0 for a row that is trained first
  uint32_t last_step[2] = {};  // -1 for such a row
  uint32_t step[2] = {};
  uint32_t key[2] = {};
  static constexpr size_t kWords = 9;
};
static_assert(sizeof(RowFacts) == RowFacts::kWords * sizeof(uint32_t));

KVJAX_HD inline int32_t Clipped(uint64_t number) {
  return number < INT32_MAX ? static_cast<int32_t>(number) : INT32_MAX;
}

/// Of a row whose header the step has not counted yet, and will by `counted`.
KVJAX_HD inline RowFacts FactsOf(const RowHeader& before, uint64_t occurrences, uint64_t counted,
                                 int64_t step, uint64_t key) {
  RowFacts facts;
  const uint64_t frequency = before.frequency + counted;
  const bool trained = before.frequency > 0;
  const auto last = static_cast<uint64_t>(before.version), now = static_cast<uint64_t>(step);
  facts.occurrences = Clipped(occurrences);
  facts.frequency = Clipped(frequency);
  facts.missed = trained && step > before.version ? Clipped(now - last - 1) : 0;
  PutWords(facts.last_step, trained ? last : ~uint64_t{0});
  PutWords(facts.step, now);
  PutWords(facts.key, key);
  return facts;
}

}  // namespace kvjax
