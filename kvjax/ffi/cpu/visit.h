// Visits: a call on a table from its door to its end, between which rows that live in an engine are in
// memory.
#pragma once
#include <mutex>

#include "kvjax/ffi/core/away.h"

namespace kvjax {

/// The end of a call; of a table whose rows do not live in an engine it is nothing.
template <class Table>
class VisitOf {
 public:
  VisitOf(const Table& table, bool writes) : table_(table), writes_(writes) {
    if (table.in_.store.away() != nullptr) turn_ = std::unique_lock(table.away_turn_);
  }
  VisitOf(VisitOf&&) = default;
  ~VisitOf() {
    if (!turn_) return;
    // The store may have been replaced since this began.
    table_.in_.store.away()->End(table_.in_.store, table_.version(), table_.planning(), writes_);
  }

 private:
  const Table& table_;
  bool writes_;
  std::unique_lock<std::mutex> turn_;  // also those that read take turns, as they bring rows
};

/// A call that has been let in.
template <class Table, class Lock>
struct EnteredBy {
  Lock lock;
  VisitOf<Table> visit;
};

}  // namespace kvjax
