// The workers of row passes where memory runs out and comes back.
#include "kvjax/ffi/cpu/row_workers.h"

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <thread>
#include <utility>

#include "tests/cpp/support/check.h"
#include "tests/cpp/support/faults.h"
#include "tests/cpp/support/program.h"

namespace {

/// A worker that could not be made is made once there is memory again.
TEST(WorkersDoNotStayFewForWantOfMemory) {
  constexpr int32_t kFew = 16;
  kvjax::SlotLayout layout;
  layout.Add("count", "int32[]", 4);
  const auto program =
      kvjax::Program::Parse("t", programs::Sgd(kFew), kFew, kvjax::RowType::kFloat32, layout);
  kvjax::RowWorkers workers(program, layout, kFew * sizeof(float));
  std::unique_ptr<kvjax::RowWorker> first = workers.Take(), waited_for;
  std::thread other([&] {
    faults = {.armed = true, .for_good = true, .fail_at = 1};
    waited_for = workers.Take();
  });
  while (std::atomic_ref(faults.count).load() == 0) std::this_thread::yield();
  workers.Give(std::move(first));
  other.join();
  faults.armed = false;
  CHECK(waited_for != nullptr);
  auto another = std::async(std::launch::async, [&] { return workers.Take(); });
  const bool made = another.wait_for(std::chrono::seconds(20)) == std::future_status::ready;
  CHECK(made);
  if (!made) workers.Give(std::move(waited_for));  // or it would wait for ever
  another.get();
}

}  // namespace
