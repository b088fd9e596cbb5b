// What the device has refused, as errors: those of core/refusals.h, which the CPU's table raises at once.
#pragma once
#include <atomic>
#include <bit>
#include <cstdint>
#include <string>

#include "kvjax/ffi/core/refusals.h"
#include "kvjax/ffi/cuda/control.h"
#include "kvjax/ffi/cuda/table.h"

namespace kvjax::device {

template <class Q>
void DeviceTable<Q>::Raise() const {
  const auto why = static_cast<Refusal>(LoadFromDevice(report_->refusal));
  if (why == Refusal::kNone || why == Refusal::kTaken) return;
  const std::string op = OpNames::Get().Name(report_->op);
  const uint32_t got = report_->got, want = report_->want;
  std::atomic_ref<uint32_t>(report_->refusal).store(0);
  switch (why) {
    case Refusal::kStale:
      throw VersionError(spec_.name, op, got, want);
    case Refusal::kWidth:
      throw WidthError(spec_.name, op);
    case Refusal::kSeal:
      throw SealError(spec_.name, op);
    case Refusal::kMerged:
      throw MergedError(spec_.name);
    case Refusal::kInitial:
      throw InitialError(spec_.name, op, want);
    case Refusal::kUses:
      throw UsesError(spec_.name, got >> 16, got & 0xFFFFu, std::bit_cast<float>(want));
    case Refusal::kLength:
      throw LengthError(spec_.name, static_cast<int32_t>(got), want);
    case Refusal::kLengths:
      throw LengthsError(spec_.name, got, want);
    case Refusal::kChunk:
    default:
      throw ChunkError(spec_.name);
  }
}

}  // namespace kvjax::device
