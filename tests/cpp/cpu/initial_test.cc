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
    for (const int64_t dim : {1, 2, 3, 4, 5, 8, 15, 16, 17, 33, 64, 65, 128, 129, 200}) {
      const auto pool = std::make_shared<std::vector<float>>(static_cast<size_t>(5 * dim), 0.37f);
      (*pool)[0] = -1;
      for (const Initializer& initializer : data::EachInitializer(pool, stream.Next())) {
        if (initializer.kind == Initializer::Kind::kGiven) continue;
        for (const RowType type : {RowType::kFloat32, RowType::kBFloat16, RowType::kFloat16}) {
          std::vector<uint64_t> keys(data::kAwkward.begin(), data::kAwkward.end());
          while (keys.size() < 35) keys.push_back(stream.Next());
          const size_t bytes = static_cast<size_t>(dim) * kvjax::ItemSize(type) + 1;
          std::vector<Bytes> rows(keys.size(), Bytes(bytes, std::byte{0x5A}));
          {
            kvjax::InitialRowWriter writer(initializer, type, dim, kernels);
            for (size_t i = 0; i < keys.size(); ++i) writer.Add(keys[i], rows[i].data());
          }
          for (size_t i = 0; i < keys.size(); ++i) {
            CHECK(data::SameBytes(rows[i], Want(initializer, type, dim, keys[i])));
          }
        }
      }
    }
  }
}

TEST(ElementsOfAnyPartOfSomeRows) {
  const kvjax::Distribution normal{kvjax::Distribution::Kind::kNormal, 0.5, 2.0};
  constexpr int64_t kDim = 70;
  const uint64_t keys[] = {77, 78, 1u << 31};
  for (const Kernels& kernels : programs::AllKernels()) {
    float whole[3][kDim];
    float* const rows[] = {whole[0], whole[1], whole[2]};
    kernels.elements(normal, 9, 3, keys, rows, 0, kDim);
    for (int64_t begin = 0; begin < kDim; ++begin) {
      for (int64_t end = begin; end <= kDim; ++end) {
        const auto width = static_cast<size_t>(end - begin);
        std::vector<float> parts(3 * (width + 1), -1e30f);
        float* const to[] = {parts.data(), parts.data() + width + 1, parts.data() + 2 * (width + 1)};
        kernels.elements(normal, 9, 3, keys, to, begin, end);
        for (int row = 0; row < 3; ++row) {
          for (size_t i = 0; i < width; ++i)
            CHECK_EQ(to[row][i], whole[row][begin + static_cast<int64_t>(i)]);
          CHECK_EQ(to[row][width], -1e30f);
        }
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
        float* const to[] = {row};
        kernels.elements(made.segments[0].of, 3, 1, &key, to, 0, 64);
        made.Generate(key, 64, [&](int64_t column, float x) { CHECK_EQ(row[column], x); });
      }
    }
  }
}

}  // namespace cpu_initial
