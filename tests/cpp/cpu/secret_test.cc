// The secret of the process decides where keys stand in memory, and nothing else.
#include <memory>
#include <string_view>
#include <vector>

#include "tests/cpp/support/check.h"
#include "tests/cpp/support/data.h"

namespace cpu_secret {

using data::Floats;
using data::Keys;
using data::Live;
using data::State;
using kvjax::AdmissionSpec;
using kvjax::Snapshot;

/// All that anybody sees of a table that is written in many ways.
struct Story {
  Story() {
    kvjax::TableSpec spec = data::Spec(2);
    spec.admission = {.kind = AdmissionSpec::Kind::kMinCount,
                      .unadmitted = AdmissionSpec::Unadmitted::kShared,
                      .shared_key = 5,
                      .threshold = 2};
    spec.max_capacity = 300;
    spec.on_full = kvjax::OnFull::kEvict;
    spec.policy = kvjax::Policy::Parse("low\nlowest_score:needed:sum\nnorm\nmin_norm:0.01");
    Live table(spec);
    table.SetScore([&](std::string_view, const Snapshot& rows, std::vector<double>& out) {
      scored.insert(scored.end(), rows.keys.begin(), rows.keys.end());
      for (size_t i = 0; i < out.size(); ++i) out[i] = static_cast<double>(rows.frequencies[i] % 3);
    });
    table.SetSink([&](const Snapshot& rows, std::string_view) {
      evicted.insert(evicted.end(), rows.keys.begin(), rows.keys.end());
    });
    data::Stream stream(3);
    for (int64_t step = 0; step < 12; ++step) {
      Keys keys;
      for (uint64_t i = 0; i < 100; ++i) keys.push_back(17 * i + stream.Below(17));
      std::vector<int32_t> counts;
      Floats gradients;
      for (size_t i = 0; i < keys.size(); ++i) {
        counts.push_back(static_cast<int32_t>(1 + stream.Below(3)));
        for (int d = 0; d < 2; ++d) gradients.push_back(1.0f / static_cast<float>(1 + stream.Below(1000)));
      }
      for (const auto& target : table.Begin(keys, counts, {}, step, gradients))
        targets.push_back(target.gradient);
      sums.insert(sums.end(), table.shared_gradient.begin(), table.shared_gradient.end());
      table.Add(kvjax::Serial, table.version(), data::Span(keys), gradients.data(), {});
      table.Drop({keys[1], keys[50]});
    }
    state = std::make_unique<State>(table);
    rows = table.Rows({1, 2, 3, 5, 80});
  }

  Keys scored, evicted;
  std::vector<uint32_t> targets;
  Floats sums, rows;
  std::unique_ptr<State> state;
};

TEST(NoResultDependsOnTheSecret) {
  const uint64_t secret = kvjax::Secret();
  const Story first;
  CHECK(!first.scored.empty() && !first.evicted.empty() && first.sums.back() != 0.0f);
  for (const uint64_t other : {uint64_t{0}, ~secret}) {
    kvjax::Secret() = other;
    const Story second;
    CHECK(first.scored == second.scored);
    CHECK(first.evicted == second.evicted);
    CHECK(first.targets == second.targets);
    CHECK(data::SameBytes(first.sums, second.sums));
    CHECK(data::SameBytes(first.rows, second.rows));
    CHECK(data::Same(*first.state, *second.state));
  }
  kvjax::Secret() = secret;
}

}  // namespace cpu_secret
