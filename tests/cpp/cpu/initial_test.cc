// Initial rows by the kernels of each instruction set, against core/initial.h element by element.
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "kvjax/ffi/cpu/initial_rows.h"
#include "tests/cpp/support/check.h"
#include "tests/cpp/support/data.h"
#include "tests/cpp/support/program.h"

namespace cpu_initial {

using kvjax::Initializer;
using kvjax::RowType;
using kvjax::program::Kernels;
using Bytes = std::vector<std::byte>;

Bytes Want(const Initializer& initializer, RowType type, int64_t dim, uint64_t key) {
  Bytes row(static_cast<size_t>(dim) * kvjax::ItemSize(type) + 1, std::byte{0x5A});
  initializer.Generate(key, dim, [&](int64_t column, float x) { StoreElement(type, row.data(), column, x); });
  return row;
}

TEST(EveryInstructionSetWritesTheSameRows) {
  data::Stream stream(4);
  for (const Kernels& kernels : programs::AllKernels()) {
    for (const int64_t dim : {1, 2, 3, 4, 5, 8, 15, 16, 17, 33, 64, 255, 256, 257, 600}) {
      const auto pool = std::make_shared<std::vector<float>>(static_cast<size_t>(5 * dim), 0.37f);
      (*pool)[0] = -1;
      for (const Initializer& initializer : data::EachInitializer(pool, stream.Next())) {
        if (initializer.kind == Initializer::Kind::kGiven) continue;
        for (const RowType type : {RowType::kFloat32, RowType::kBFloat16, RowType::kFloat16}) {
          for (const uint64_t key : data::kAwkward) {
            Bytes row(static_cast<size_t>(dim) * kvjax::ItemSize(type) + 1, std::byte{0x5A});
            kvjax::StoreInitialRow(initializer, type, dim, key, row.data(), kernels);
            CHECK(data::SameBytes(row, Want(initializer, type, dim, key)));
          }
        }
      }
    }
  }
}

TEST(ElementsOfAnyPartOfARow) {
  const kvjax::Distribution normal{kvjax::Distribution::Kind::kNormal, 0.5, 2.0};
  constexpr int64_t kDim = 70;
  for (const Kernels& kernels : programs::AllKernels()) {
    float whole[kDim];
    kernels.elements(normal, 9, 77, 0, kDim, whole);
    for (int64_t begin = 0; begin < kDim; ++begin) {
      for (int64_t end = begin; end <= kDim; ++end) {
        std::vector<float> part(static_cast<size_t>(end - begin) + 1, -1e30f);
        kernels.elements(normal, 9, 77, begin, end, part.data());
        for (int64_t i = begin; i < end; ++i) CHECK_EQ(part[static_cast<size_t>(i - begin)], whole[i]);
        CHECK_EQ(part.back(), -1e30f);
      }
    }
  }
}

TEST(ManyRandomElements) {
  data::Stream stream(5);
  for (const Kernels& kernels : programs::AllKernels()) {
    for (int i = 0; i < 2000; ++i) {
      const uint64_t key = stream.Next();
      for (const auto kind :
           {kvjax::Distribution::Kind::kNormal, kvjax::Distribution::Kind::kTruncatedNormal}) {
        const Initializer made = data::Elements(kind, 0.0, 1.0, 3);
        float row[64];
        kernels.elements(made.segments[0].of, 3, key, 0, 64, row);
        made.Generate(key, 64, [&](int64_t column, float x) { CHECK_EQ(row[column], x); });
      }
    }
  }
}

}  // namespace cpu_initial
