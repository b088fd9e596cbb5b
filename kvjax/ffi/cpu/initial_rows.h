// Initial rows, written by the kernels of the processor's instruction set: the same bits as core/initial.h
// gives.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kvjax/ffi/core/initial.h"
#include "kvjax/ffi/core/row.h"
#include "kvjax/ffi/cpu/program/kernels.h"

namespace kvjax {

/// Writes initial rows by a generator or from a pool: some at once, since a short row alone takes as long as
/// several.
class InitialRowWriter {
 public:
  InitialRowWriter(const Initializer& initializer, RowType type, int64_t dim,
                   const program::Kernels& kernels = program::BestKernels())
      : initializer_(initializer), type_(type), dim_(dim), kernels_(kernels) {}

  InitialRowWriter(const InitialRowWriter&) = delete;
  ~InitialRowWriter() { Write(); }

  /// Writes the row of a key, at the latest when the writer ends.
  void Add(uint64_t key, std::byte* row) {
    keys_[size_] = key;
    rows_[size_] = row;
    if (++size_ == kRows) Write();
  }

 private:
  static constexpr size_t kRows = 16;
  static constexpr int64_t kPiece = 64;  // columns that are rounded together

  /// Those that wait.
  void Write() {
    if (initializer_.kind == Initializer::Kind::kPool) {
      for (size_t i = 0; i < size_; ++i) Store(i, 0, dim_, initializer_.PoolRow(keys_[i], dim_));
    } else {
      int64_t begin = 0;
      for (const Generator::Segment& segment : initializer_.segments) {
        const int64_t end = std::min(segment.end, dim_);
        Generate(segment.of, begin, end);
        begin = end;
        if (end == dim_) break;
      }
    }
    size_ = 0;
  }

  void Store(size_t i, int64_t begin, int64_t end, const float* from) {
    for (int64_t column = begin; column < end; ++column) {
      StoreElement(type_, rows_[i], column, from[column - begin]);
    }
  }

  /// The columns of one distribution.
  void Generate(const Distribution& of, int64_t begin, int64_t end) {
    float* to[kRows];
    if (type_ == RowType::kFloat32) {
      for (size_t i = 0; i < size_; ++i) to[i] = reinterpret_cast<float*>(rows_[i]) + begin;
      return kernels_.elements(of, initializer_.seed, size_, keys_, to, begin, end);
    }
    float pieces[kRows][kPiece];
    for (size_t i = 0; i < size_; ++i) to[i] = pieces[i];
    for (int64_t last = begin; begin < end; begin = last) {
      last = std::min(begin + kPiece, end);
      kernels_.elements(of, initializer_.seed, size_, keys_, to, begin, last);
      for (size_t i = 0; i < size_; ++i) Store(i, begin, last, pieces[i]);
    }
  }

  const Initializer& initializer_;
  const RowType type_;
  const int64_t dim_;
  const program::Kernels& kernels_;
  uint64_t keys_[kRows] = {};
  std::byte* rows_[kRows] = {};
  size_t size_ = 0;
};

}  // namespace kvjax
