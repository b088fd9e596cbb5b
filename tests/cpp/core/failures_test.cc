// Failures: what a call that fails gives to other devices, or to its caller; nothing is ever thrown.
#include "kvjax/ffi/core/failures.h"

#include <stdexcept>

#include "tests/cpp/support/check.h"
#include "tests/cpp/support/faults.h"

namespace core_failures {

using kvjax::Attempt;
using kvjax::Error;
using kvjax::ErrorCode;

constexpr uint32_t kUntouched = 77;
const auto fine = [] {};
const auto stale = [] { throw kvjax::VersionError("t", "apply", 1, 2); };

TEST(AStatusIsPutWhateverHappens) {
  uint32_t status = kUntouched;
  const auto put = [&](uint32_t number) { status = number; };
  CHECK(!Attempt("t", "apply", true, put, fine).has_value());
  CHECK_EQ(status, 0u);
  CHECK(!Attempt("t", "apply", true, put, stale).has_value());
  CHECK(status != 0 && status != kUntouched);
  const auto kept = kvjax::Failures::Get().Find(status);
  CHECK(kept.has_value() && kept->code() == ErrorCode::kFailedPrecondition);
  status = kUntouched;
  const auto error = Attempt("t", "apply", false, put, stale);
  CHECK(error.has_value() && error->code() == ErrorCode::kFailedPrecondition);
  CHECK_EQ(status, kUntouched);
}

TEST(WhereNoStatusCanBePutTheCallFails) {
  // On a GPU it takes a kernel, which may not start.
  const auto fails = [](uint32_t) {
    throw kvjax::CudaError("the start of a kernel", "cudaErrorLaunchFailure");
  };
  const auto out_of_memory = [](uint32_t) { throw std::bad_alloc(); };
  const auto odd = [](uint32_t) { throw std::runtime_error("odd"); };
  for (const bool sharded : {false, true}) {
    CHECK(Attempt("t", "lookup", sharded, fails, fine).has_value());
    CHECK(Attempt("t", "lookup", sharded, fails, stale).has_value());
    const auto memory = Attempt("t", "lookup", sharded, out_of_memory, fine);
    CHECK(memory.has_value() && memory->code() == ErrorCode::kResourceExhausted);
    const auto other = Attempt("t", "lookup", sharded, odd, fine);
    CHECK(other.has_value() && other->code() == ErrorCode::kInternal);
  }
}

TEST(FailuresWithoutMemoryForAWordAreToldOneByOne) {
  auto& failures = kvjax::Failures::Get();
  for (int i = 0; i < 2; ++i) {
    uint32_t status = 0;
    faults = {.armed = true, .for_good = true, .fail_at = 1};
    const auto error = Attempt(
        "t", "apply", true, [&](uint32_t number) { status = number; }, [] { throw std::bad_alloc(); });
    faults.armed = false;
    CHECK(!error.has_value() && status != 0);
    failures.Leave(status, "t");
    CHECK(failures.RefusesAnother(status));
    CHECK_EQ(failures.left().size(), 1u);
    const auto told = failures.Ask(status);
    CHECK(told.has_value() && told->code() == ErrorCode::kResourceExhausted);
    CHECK(!failures.Ask(status).has_value() && !failures.RefusesAnother(status));
  }
}

}  // namespace core_failures
