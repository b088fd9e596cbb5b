// Visits: a call on a table from its door to its end, between which rows that live in an engine are in
// memory.
#pragma once
#include <mutex>
#include <string_view>

#include "kvjax/ffi/core/away.h"

namespace kvjax {

/// The end of a call; of a table whose rows do not live in an engine it is nothing.
template <class Table>
class VisitOf {
 public:
  VisitOf(const Table& table, std::string_view op, bool writes) : table_(table), writes_(writes) {
    if (table.in_.store.away() == nullptr) return;
    turn_ = std::unique_lock(table.away_turn_, std::defer_lock);
    table.gate_.Take(turn_, table.spec_.name, op);
    table.in_.store.away()->Enter();
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
  std::unique_lock<std::timed_mutex> turn_;  // also those that read take turns, as they bring rows
};

/// A call that has been let in.
template <class Table, class Lock>
struct EnteredBy {
  Lock lock;
  VisitOf<Table> visit;
};

}  // namespace kvjax
