// The tables of one backend by name, and by device where a table is sharded over several.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvjax/ffi/core/error_texts.h"
#include "kvjax/ffi/core/process.h"

namespace kvjax {

template <class Table>
class Registry {
 public:
  /// The device of a table that is not sharded: every call finds it, wherever it runs.
  static constexpr int32_t kEveryDevice = -1;

  static Registry& Get() {
    static auto* registry = new Registry();  // never destroyed: programs may still run at exit
    return *registry;
  }

  /// Throws in a fork of the process that the tables belong to; one of a process without tables may make its
  /// own.
  void CheckProcess(std::string_view name, std::string_view op) {
    if (process_.here()) return;
    if (!entries_.empty()) throw ForkedError(name, op);
    process_ = {};
  }

  /// make(i) builds the shard of devices[i]. Throws if the name is taken. Shards are made without the lock,
  /// and given up without it: both may wait for a device, whose calls, on other threads, may want a table.
  template <class Make>
  void Create(const std::string& name, const std::vector<int32_t>& devices, Make make) {
    CheckProcess(name, "get_table");
    CheckFree(name);
    std::vector<Shard> shards;
    for (size_t i = 0; i < devices.size(); ++i) shards.push_back({devices[i], make(i)});
    const std::lock_guard lock(mutex_);
    if (!entries_.try_emplace(name, std::move(shards)).second) throw NameError(name);
  }

  /// The shard that lives on a device; the table itself if it is not sharded.
  std::shared_ptr<Table> Find(std::string_view name, std::string_view op, int32_t device) {
    CheckProcess(name, op);
    const std::lock_guard lock(mutex_);
    const std::vector<Shard>& shards = Shards(name, op);
    for (const Shard& shard : shards) {
      if (shard.device == kEveryDevice || shard.device == device) return shard.table;
    }
    throw DeviceError(name, op, device);
  }

  /// One of the shards of this process, by its place among them. Takes no memory.
  std::shared_ptr<Table> At(std::string_view name, std::string_view op, size_t place) {
    CheckProcess(name, op);
    const std::lock_guard lock(mutex_);
    const std::vector<Shard>& shards = Shards(name, op);
    if (place < shards.size()) return shards[place].table;
    throw ShardError(name, op, shards.size(), place);
  }

  /// The shard of a device, or nullptr if the table has been dropped. For kEveryDevice, any of the shards.
  std::shared_ptr<Table> FindIfThere(std::string_view name, int32_t device) {
    const std::lock_guard lock(mutex_);
    const auto it = entries_.find(name);
    if (it == entries_.end()) return nullptr;
    for (const Shard& shard : it->second) {
      if (shard.device == kEveryDevice || device == kEveryDevice || shard.device == device)
        return shard.table;
    }
    return nullptr;
  }

  /// All shards of this process, in the order in which they were made.
  std::vector<std::shared_ptr<Table>> All(std::string_view name, std::string_view op) {
    CheckProcess(name, op);
    const std::lock_guard lock(mutex_);
    std::vector<std::shared_ptr<Table>> tables;
    for (const Shard& shard : Shards(name, op)) tables.push_back(shard.table);
    return tables;
  }

  /// Replaces the shards, unless these have been written since `version`.
  void Replace(std::string_view name, std::string_view op, uint32_t version,
               const std::vector<int32_t>& devices, const std::vector<std::shared_ptr<Table>>& tables) {
    std::vector<Shard> next;  // and then those that are gone, freed with the lock given back
    for (size_t i = 0; i < devices.size(); ++i) next.push_back({devices[i], tables[i]});
    Settle(name, op);
    const std::lock_guard lock(mutex_);
    CheckUnwritten(name, op, version);
    entries_.find(name)->second.swap(next);
  }

  /// The first version of shards that come after those of `version`, which they replace or whose name they
  /// take: its handles stay stale, even if a call that is already inside moves their version on.
  static uint32_t VersionBehind(uint32_t version) { return version + (1u << 16); }

  /// Forgets a table, unless it has been written since `only_at`, if that is given. Returns the first version
  /// of a later table of the name, in whatever backend.
  uint32_t Drop(std::string_view name, std::string_view op, std::optional<uint32_t> only_at) {
    Settle(name, op);
    std::vector<Shard> gone;  // freed with the lock given back
    const std::lock_guard lock(mutex_);
    uint32_t last = 0;
    for (const Shard& shard : Shards(name, op)) last = std::max(last, shard.table->version());
    if (only_at) CheckUnwritten(name, op, *only_at);
    const auto it = entries_.find(name);
    gone.swap(it->second);
    entries_.erase(it);
    return VersionBehind(last);
  }

 private:
  void CheckFree(const std::string& name) {
    const std::lock_guard lock(mutex_);
    if (entries_.contains(name)) throw NameError(name);
  }
  /// Without the lock: what a device is doing may wait for a call that wants it. And not from inside the
  /// user's code, which is called by a table that is to go.
  void Settle(std::string_view name, std::string_view op) {
    for (const auto& table : All(name, op)) table->CheckOutside(op);
    for (const auto& table : All(name, op)) table->Settle();
  }

  struct Shard {
    int32_t device;
    std::shared_ptr<Table> table;
  };

  const std::vector<Shard>& Shards(std::string_view name, std::string_view op) {
    const auto it = entries_.find(name);
    if (it != entries_.end()) return it->second;
    throw NoTableError(name, op);
  }

  void CheckUnwritten(std::string_view name, std::string_view op, uint32_t version) {
    for (const Shard& shard : Shards(name, op)) {
      if (shard.table->version() == version) continue;
      throw WrittenError(name, op);
    }
  }

  OwnProcess process_;
  std::mutex mutex_;
  std::map<std::string, std::vector<Shard>, std::less<>> entries_;
};

}  // namespace kvjax
