// Refusals of the device, raised as errors: those of core/error_texts.h, which the CPU's table raises at
// once.
#pragma once
#include <atomic>
#include <bit>
#include <cstdint>
#include <string>

#include "kvjax/ffi/core/error_texts.h"
#include "kvjax/ffi/device/control.h"
#include "kvjax/ffi/device/table.h"

namespace kvjax::device {

/// Raises what a report says has been refused, once.
inline void RaiseRefused(const TableSpec& spec, Report& report) {
  const std::string& table = spec.name;
  const auto why = static_cast<Refusal>(LoadFromDevice(report.refusal));
  if (why == Refusal::kNone || why == Refusal::kTaken) return;
  const std::string_view op = NameOfOp(report.op);
  const uint32_t got = report.got, want = report.want;
  std::atomic_ref<uint32_t>(report.refusal).store(0);
  switch (why) {
    case Refusal::kStale:
      throw VersionError(table, op, got, want);
    case Refusal::kWidth:
      throw WidthError(table, op);
    case Refusal::kSeal:
      throw SealError(table, op);
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
    case Refusal::kChunk:
    default:
      throw ChunkError(table);
  }
}

template <class Q>
void DeviceTable<Q>::Raise() const {
  RaiseRefused(spec_, *report_);
}

/// The report of a call that belongs to no shard, or to the table as a whole. All devices make such a call of
/// a sharded table and must fail in the same way, so there the call has a report of its own, which each
/// device raises at once.
template <class Q>
class OwnReport {
 public:
  OwnReport(Q& q, const DeviceTable<Q>* table, Op op)
      : q_(q), table_(table), own_(q, table != nullptr && table->spec().sharded ? 1 : 0) {
    if (table_ != nullptr) call_ = table_->View(op, nullptr);
    if (own_.data() == nullptr) return;
    q.Fill(own_.data(), 0, sizeof(Report));
    call_.report = own_.data();
  }
  [[nodiscard]] CallView call() const { return call_; }

  void Raise() const {
    if (own_.data() != nullptr) {
      Report report;
      q_.Copy(&report, own_.data(), sizeof(report));
      q_.Wait();
      RaiseRefused(table_->spec(), report);
    } else if (Q::kSynchronous && table_ != nullptr) {
      table_->Raise();
    }
  }

 private:
  Q& q_;
  const DeviceTable<Q>* table_;
  Scratch<Q, Report> own_;
  CallView call_ = {};
};

}  // namespace kvjax::device
