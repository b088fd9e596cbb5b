// The registry: tables are made and given up while others look for theirs.
#include "kvjax/ffi/core/registry.h"

#include <atomic>
#include <future>
#include <thread>

#include "tests/cpp/support/check.h"

namespace core_registry {

using namespace std::chrono_literals;

struct Table {
  static inline std::atomic<int> alive = 0;
  Table() { ++alive; }
  ~Table() { --alive; }
  [[nodiscard]] uint32_t version() const { return 1; }
  void Settle() const {}
  void CheckOutside(std::string_view) const {}
};
using Registry = kvjax::Registry<Table>;

TEST(WhileATableIsMadeOthersAreFound) {
  // Several GPUs: making a shard waits for one, which waits for another in a collective, whose next call
  // wants its table.
  Registry registry;
  registry.Create("there", {-1}, [](size_t) { return std::make_shared<Table>(); });
  auto found =
      std::async(std::launch::deferred, [&] { return registry.Find("there", "lookup", 0) != nullptr; });
  bool in_time = false;
  std::promise<void> making;
  std::thread finds;
  registry.Create("new", {0, 1}, [&](size_t i) {
    if (i == 0) {
      std::promise<bool> promise;
      auto answer = promise.get_future();
      finds = std::thread([&, promise = std::move(promise)]() mutable { promise.set_value(found.get()); });
      in_time = answer.wait_for(2s) == std::future_status::ready;
    }
    return std::make_shared<Table>();
  });
  finds.join();
  CHECK(in_time);
  CHECK(registry.Find("new", "lookup", 1) != nullptr);
}

TEST(OneOfTwoWithANameIsRefusedAndLeavesNothing) {
  Registry registry;
  const int before = Table::alive;
  CHECK_THROWS(kInvalidArgument, registry.Create("t", {0}, [&](size_t) {
    registry.Create("t", {0}, [](size_t) { return std::make_shared<Table>(); });  // another thread is faster
    return std::make_shared<Table>();
  }));
  CHECK_EQ(Table::alive, before + 1);
  CHECK_THROWS(kInvalidArgument, registry.Create("t", {0}, [](size_t) -> std::shared_ptr<Table> {
    throw std::logic_error("the name is known to be taken before anything is made");
  }));
  CHECK(registry.Drop("t", "drop_table", {}) > 1);
  CHECK_EQ(Table::alive, before);
}

}  // namespace core_registry
