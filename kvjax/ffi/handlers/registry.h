// The tables of one backend by name.
#pragma once
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

#include "kvjax/ffi/core/error.h"

namespace kvjax {

template <class Table>
class Registry {
 public:
  static Registry& Get() {
    static auto* registry = new Registry();  // never destroyed: programs may still run at exit
    return *registry;
  }

  /// make(first_version) builds the table. Throws if the name is taken.
  template <class Make>
  void Create(const std::string& name, Make make) {
    const std::lock_guard lock(mutex_);
    Entry& entry = entries_[name];
    if (entry.table) {
      throw MakeError(ErrorCode::kInvalidArgument, name, "create", "a free name", "one in use",
                      "kvjax.drop_table(name) first, or choose another name");
    }
    entry.table = make(entry.next_version);
  }

  std::shared_ptr<Table> Find(std::string_view name, std::string_view op) {
    const std::lock_guard lock(mutex_);
    const auto it = entries_.find(name);
    if (it == entries_.end() || !it->second.table) {
      throw MakeError(ErrorCode::kNotFound, name, op, "a table of this name in the process", "none",
                      "make it with kvjax.get_table(name, dim=...)");
    }
    return it->second.table;
  }

  /// A later table of the same name starts behind the versions of this one, so that its handles stay stale.
  void Drop(std::string_view name) {
    const std::shared_ptr<Table> table = Find(name, "drop_table");
    const std::lock_guard lock(mutex_);
    Entry& entry = entries_.find(name)->second;
    // A gap, because a call that is already inside the old table may still move its version on.
    entry.next_version = table->version() + (1u << 16);
    entry.table.reset();
  }

 private:
  struct Entry {
    std::shared_ptr<Table> table;
    uint32_t next_version = 0;
  };
  std::mutex mutex_;
  std::map<std::string, Entry, std::less<>> entries_;
};

}  // namespace kvjax
