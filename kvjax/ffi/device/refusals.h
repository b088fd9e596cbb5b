// Refusals of the device, raised as errors: those of core/error_texts.h, which the CPU's table raises at
// once.
#pragma once
#include <bit>
#include <cstdint>
#include <string>

#include "kvjax/ffi/core/error_texts.h"
#include "kvjax/ffi/device/control.h"
#include "kvjax/ffi/device/table.h"

namespace kvjax::device {

/// The words of a refusal.
struct RefusalWords {
  explicit RefusalWords(Report& report)
      : why(static_cast<Refusal>(LoadFromDevice(report.refusal))),
        op(LoadFromDevice(report.op)),
        got(LoadFromDevice(report.got)),
        want(LoadFromDevice(report.want)) {}
  Refusal why;
  uint32_t op, got, want;
};

[[noreturn]] inline void RaiseRefused(const TableSpec& spec, const RefusalWords& refused) {
  const std::string& table = spec.name;
  const std::string_view op = NameOfOp(refused.op);
  const uint32_t got = refused.got, want = refused.want;
  switch (refused.why) {
    case Refusal::kStale:
      throw VersionError(table, op, got, want);
    case Refusal::kWidth:
      throw WidthError(table, op);
    case Refusal::kCanary:
      throw CanaryError(table, op);
    case Refusal::kMerged:
      throw MergedError(table);
    case Refusal::kInitial:
      throw InitialError(table, op, want);
    case Refusal::kUses:
      throw UsesError(table, got >> 16, got & 0xFFFFu, std::bit_cast<float>(want));
    case Refusal::kLength:
      throw LengthError(table, static_cast<int32_t>(got), want);
    case Refusal::kLengths:
      throw LengthsError(table, got, want);
    case Refusal::kFull:
      if (want == kNoRow) throw FullError(table, op, spec.max_capacity, got);
      throw FullError(table, op, spec.max_capacity, got, want);
    case Refusal::kUnplanned:
      throw NotPlannedError(table);
    case Refusal::kNone:
      break;
  }
  throw UnexpectedError(op, "a refusal that does not say why");
}

/// Once each: the device reports no other before the next call has told it that this one has been raised.
template <class Q>
void DeviceTable<Q>::Raise() const {
  const uint32_t refusals = this->refusals();
  if (raised_.exchange(refusals) == refusals) return;
  const RefusalWords refused(*report_);
  rearms_ = true;  // from here on another thread may have the device write over the words
  RaiseRefused(spec_, refused);
}
/// After what has been raised, tells the device so.
template <class Q>
void DeviceTable<Q>::Rearm(Q& q) const {
  if (!rearms_.exchange(false)) return;
  try {
    q.Fill(&control_.data()->refusing, 0, sizeof(uint32_t));
  } catch (...) {  // the next call tells it
    rearms_ = true;
    throw;
  }
}

/// The report of a call that belongs to no shard, or to the table as a whole. All devices make such a call of
/// a sharded table and must fail in the same way, so there the call has a report of its own, which each
/// device raises at once.
template <class Q>
class OwnReport {
  struct Own {
    Report report;
    uint32_t refusing;
  };

 public:
  OwnReport(Q& q, DeviceTable<Q>* table, Op op)
      : q_(q), table_(table), own_(q, table != nullptr && table->spec().sharded ? 1 : 0) {
    if (table_ != nullptr) call_ = table_->View(op, nullptr);
    if (own_.data() == nullptr) Cover();
    if (own_.data() == nullptr) return;
    q.Fill(own_.data(), 0, sizeof(Own));
    call_.report = &own_.data()->report;
    call_.refusing = &own_.data()->refusing;
  }
  ~OwnReport() {
    try {
      if (own_.data() == nullptr) Cover();
    } catch (...) {  // a queue that takes nothing any more uses nothing; the table's next call says so
    }
  }
  OwnReport(const OwnReport&) = delete;
  OwnReport& operator=(const OwnReport&) = delete;
  [[nodiscard]] CallView call() const { return call_; }

  void Raise() const {
    if (own_.data() == nullptr) return;
    Own own;
    q_.Copy(&own, own_.data(), sizeof(own));
    q_.Wait();
    if (own.refusing != 0) RaiseRefused(table_->spec(), RefusalWords(own.report));
  }

 private:
  /// The table's report stays until what has been asked of the queue is done.
  void Cover() {
    if (table_ != nullptr) table_->Cover(q_);
  }

  Q& q_;
  DeviceTable<Q>* table_;
  Scratch<Q, Own> own_;
  CallView call_ = {};
};

}  // namespace kvjax::device
