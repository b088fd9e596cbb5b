// The device table on host threads beside the CPU's: each call is made on both, and both must be the same
// after it.
#pragma once
#include <cmath>

#include "tests/cpp/support/device.h"

namespace pairs {

using device::Bytes;
using device::Chosen;
using device::Counted;
using device::Floats;
using device::Gradients;
using device::Keys;
using device::Mask;
using device::Sunk;
using kvjax::AdmissionSpec;
using kvjax::Initializer;
using kvjax::OnFull;
using kvjax::RowType;
using kvjax::Snapshot;
using kvjax::TableSpec;
using kvjax::device::Threads;

inline TableSpec Spec(int64_t dim = 3) {
  TableSpec spec = data::Spec(dim);
  return spec;
}

/// Whether a call was refused, by its code.
template <class F>
std::optional<kvjax::ErrorCode> CodeOf(F f) {
  try {
    f();
  } catch (const kvjax::Error& error) {
    return error.code();
  }
  return {};
}

/// Q: what runs the kernels.
template <class Q>
struct PairOn {
  template <class On = Q>
  PairOn(const TableSpec& spec, On q, uint64_t seed, uint64_t universe, kvjax::device::Budget budget = {})
      : cpu(spec, std::make_shared<kvjax::HostSlabs>(), 1), gpu(spec, q, budget), stream(seed) {
    for (size_t i = 0; i < universe; ++i) {
      keys.push_back(i < data::kAwkward.size() ? data::kAwkward[i] : stream.Next());
    }
    Score();
  }

  /// Does the same with both, which must do the same.
  template <class OnCpu, class OnGpu>
  void Both(OnCpu on_cpu, OnGpu on_gpu) {
    const auto failed = CodeOf(on_cpu);
    const auto refused = CodeOf(on_gpu);
    CHECK(failed == refused);
    refusals += failed.has_value();
    Compare();
  }
  void Compare() {
    CHECK_EQ(gpu.version(), cpu.version());
    CHECK_EQ(gpu.handle, cpu.version());
    CHECK(data::Same(gpu.Copy(), cpu.Copy()));
    const auto waiting = gpu.ExportAdmission(gpu.handle), waits = cpu.ExportAdmission(cpu.version());
    CHECK(waiting.keys == waits.keys && waiting.counts == waits.counts && waiting.cells == waits.cells);
    CHECK(Counted(gpu) == Counted(cpu));
    CHECK_EQ(sunk[0].size(), sunk[1].size());
    for (size_t i = 0; i < std::min(sunk[0].size(), sunk[1].size()); ++i) {
      CHECK(sunk[0][i].first == sunk[1][i].first && sunk[0][i].second.keys == sunk[1][i].second.keys);
      CHECK(data::SameBytes(sunk[0][i].second.values, sunk[1][i].second.values));
    }
  }
  void Sink() {
    cpu.SetSink([this](Snapshot rows, std::string_view why) { sunk[0].emplace_back(why, std::move(rows)); });
    gpu.SetSink([this](Snapshot rows, std::string_view why) { sunk[1].emplace_back(why, std::move(rows)); });
  }
  /// What evicts by a score needs a function for it.
  void Score() {
    const auto score = [](std::string_view, const Snapshot& rows, std::vector<double>& out) {
      for (size_t i = 0; i < out.size(); ++i) out[i] = static_cast<double>(rows.keys[i] % 1000);
    };
    cpu.SetScore(score);
    gpu.SetScore(score);
  }

  Keys Batch(size_t n) {
    Keys batch;
    for (size_t i = 0; i < n; ++i) batch.push_back(keys[stream.Below(keys.size())]);
    return batch;
  }
  Mask RandomMask(size_t n) {
    Mask mask(new bool[n]);
    for (size_t i = 0; i < n; ++i) mask[i] = stream.Below(4) != 0;
    return stream.Below(2) == 0 ? std::move(mask) : nullptr;
  }
  Floats RandomFloats(size_t n) {
    Floats out;
    for (size_t i = 0; i < n; ++i) out.push_back((static_cast<float>(stream.Below(2000)) - 1000) * 0.37f);
    return out;
  }
  Bytes Values(size_t n) {
    const TableSpec& spec = cpu.spec();
    Bytes out(n * spec.row_bytes());
    const Floats floats = RandomFloats(n * static_cast<size_t>(spec.dim));
    for (size_t j = 0; j < floats.size(); ++j)
      StoreElement(spec.type, out.data(), static_cast<int64_t>(j), floats[j]);
    return out;
  }
  /// Initial rows for the CPU, whose keys are `batch`.
  Bytes Given(const Keys& batch) {
    if (cpu.spec().initializer.kind != Initializer::Kind::kGiven) return {};
    Keys missing(batch.size() + 1);
    missing.resize(cpu.FindMissing(kvjax::Serial, cpu.version(), data::Span(batch), nullptr, missing.data()));
    return device::RowsFor(missing, cpu.row_bytes());
  }
  /// Distinct keys, then padding.
  Gradients RandomGradients(size_t n) {
    Gradients g;
    std::set<uint64_t> seen;
    for (const uint64_t key : Batch(n)) {
      if (seen.insert(key).second) g.keys.push_back(key);
    }
    for (size_t i = 0; i < g.keys.size(); ++i) g.counts.push_back(1 + static_cast<int32_t>(stream.Below(5)));
    const size_t padding = stream.Below(4);
    g.keys.resize(g.keys.size() + padding, 5);
    g.counts.resize(g.counts.size() + padding, 0);
    g.rows = RandomFloats(g.keys.size() * static_cast<size_t>(cpu.spec().dim));
    if (stream.Below(4) == 0) g.step = cpu.Copy(false).last_step + static_cast<int64_t>(stream.Below(3));
    return g;
  }
  void Train(const Gradients& g, const kvjax::SlotLayout& layout) {
    Keys valid;
    for (size_t i = 0; i < g.keys.size(); ++i) {
      if (g.counts[i] > 0) valid.push_back(g.keys[i]);
    }
    const size_t chunk = 1 + stream.Below(g.keys.size() + 2);
    Both([&] { device::Train(cpu, g, layout, Given(valid)); }, [&] { gpu.Train(g, layout, chunk); });
    if (refusals == 0) CHECK_EQ(gpu.step, cpu.step);
  }
  /// Reads are compared to the bit too.
  void Read(size_t n) {
    const Keys batch = Batch(n);
    const Mask mask = RandomMask(n);
    const size_t bytes = cpu.row_bytes();
    Bytes want(n * bytes), got(n * bytes, std::byte{1});
    const Mask found(new bool[n + 1]), was_found(new bool[n + 1]);
    const Keys valid = Chosen(batch, mask.get(), n);
    const Bytes given = Given(valid);
    const InitialRowsOf rows{given, bytes};
    const auto missing = stream.Below(2) == 0 ? kvjax::Missing::kTable : kvjax::Missing::kInitial;
    cpu.Lookup(kvjax::Serial, cpu.version(), data::Span(batch), mask.get(), rows, missing, want.data(),
               found.get());
    gpu.Lookup(gpu.q, {.version = &gpu.handle,
                       .keys = data::Span(batch),
                       .mask = mask.get(),
                       .initial = rows,
                       .missing = missing,
                       .rows = got.data(),
                       .found = was_found.get()});
    gpu.q.Wait();
    CHECK(data::SameBytes(want, got));
    CHECK(std::equal(found.get(), found.get() + n, was_found.get()));
    CHECK(gpu.Missing(batch, mask.get()) == MissingOnCpu(batch, mask.get()));

    std::vector<int64_t> frequencies(n), versions(n), gpu_frequencies(n), gpu_versions(n);
    const auto pinned = std::make_unique<bool[]>(n), gpu_pinned = std::make_unique<bool[]>(n);
    cpu.Inspect(kvjax::Serial, "contains", cpu.version(), data::Span(batch), found.get(), frequencies.data(),
                versions.data(), pinned.get());
    gpu.Inspect(gpu.q, {kvjax::Op::kContains, &gpu.handle, data::Span(batch), was_found.get(),
                        gpu_frequencies.data(), gpu_versions.data(), gpu_pinned.get()});
    gpu.q.Wait();
    CHECK(frequencies == gpu_frequencies && versions == gpu_versions);
    CHECK(std::equal(pinned.get(), pinned.get() + n, gpu_pinned.get()));
    CHECK(std::equal(found.get(), found.get() + n, was_found.get()));
    if (gpu.Layout().empty()) return;
    const size_t slot = gpu.Layout().slots()[0].bytes;
    Bytes cpu_slots(n * slot), gpu_slots(n * slot, std::byte{1});
    cpu.ReadSlot(kvjax::Serial, cpu.version(), "m", slot, data::Span(batch), cpu_slots.data());
    gpu.ReadSlot(gpu.q, {&gpu.handle, "m", slot, data::Span(batch), gpu_slots.data()});
    gpu.q.Wait();
    CHECK(data::SameBytes(cpu_slots, gpu_slots));
    gpu.Raise();
  }
  Keys MissingOnCpu(const Keys& batch, const bool* mask) {
    Keys missing(batch.size() + 1);
    missing.resize(cpu.FindMissing(kvjax::Serial, cpu.version(), data::Span(batch), mask, missing.data()));
    return missing;
  }

  void Write(uint64_t op, size_t n) {
    const auto dim = static_cast<size_t>(cpu.spec().dim);
    const Keys batch = Batch(n);
    const Mask mask = RandomMask(n);
    const bool* const m = mask.get();
    const Keys valid = Chosen(batch, m, n);
    const auto span = data::Span(valid);
    const Bytes given = Given(valid);
    const InitialRowsOf initial{given, cpu.row_bytes()};
    const uint32_t v = cpu.version();
    switch (op) {
      case 0:
        return Both([&] { cpu.Insert(kvjax::Serial, v, span, initial); }, [&] { gpu.Ensure(batch, m); });
      case 1:
        return Both([&] { cpu.Table::Pin(kvjax::Serial, v, span, initial); },
                    [&] { gpu.Pinned(kvjax::Op::kPin, batch, m); });
      case 2:
        return Both([&] { cpu.Unpin(v, span); }, [&] { gpu.Pinned(kvjax::Op::kUnpin, batch, m); });
      case 3: {
        const Bytes values = Values(n);
        const Bytes theirs = Chosen(values, m, n, cpu.row_bytes());
        return Both([&] { cpu.Upsert(kvjax::Serial, v, span, theirs.data()); },
                    [&] { gpu.Put(batch, values, m); });
      }
      case 4: {
        const Bytes values = Values(n);
        const Bytes theirs = Chosen(values, m, n, cpu.row_bytes());
        return Both([&] { cpu.Assign(kvjax::Serial, v, span, theirs.data()); },
                    [&] { gpu.Set(batch, values, m); });
      }
      case 5: {
        const Floats deltas = RandomFloats(n * dim), theirs = Chosen(deltas, m, n, dim);
        return Both([&] { cpu.Add(kvjax::Serial, v, span, theirs.data(), initial); },
                    [&] { gpu.Plus(batch, deltas, m); });
      }
      case 6: {
        const Floats old_rows = RandomFloats(n * dim), new_rows = RandomFloats(n * dim);
        const Floats their_old = Chosen(old_rows, m, n, dim), their_new = Chosen(new_rows, m, n, dim);
        Mask exists(new bool[n]), their_exists(new bool[n]);
        for (size_t i = 0, j = 0; i < n; ++i) {
          exists[i] = stream.Below(2) == 0;
          if (m == nullptr || m[i]) their_exists[j++] = exists[i];
        }
        return Both(
            [&] {
              cpu.Accum(kvjax::Serial, v, span, their_old.data(), their_new.data(), their_exists.get());
            },
            [&] { gpu.Accumulate(batch, old_rows, new_rows, exists.get(), m); });
      }
      case 7:
        return Both([&] { cpu.Remove(v, span); }, [&] { gpu.Drop(batch, m); });
      case 8: {
        static const std::vector<std::string> policies = {"old\nmax_age:2",
                                                          "few\nleast_recent:5",
                                                          "most\nleast_frequent:-20:0\nsmall\nmin_norm:100.5",
                                                          "rare\nmin_frequency:2",
                                                          "decayed\nleast_frequent:7:2.5",
                                                          "scored\nlowest_score:6:f",
                                                          "none\nleast_recent:0"};
        const std::string& policy = policies[stream.Below(policies.size())];
        return Both([&] { cpu.Evict(policy); }, [&] { gpu.Prune(policy); });
      }
      case 9: {
        const Snapshot saved = cpu.Copy();
        const auto waiting = cpu.ExportAdmission(v);
        return Both([&] { cpu.Restore(data::View(saved), waiting); },
                    [&] { gpu.Restore(data::View(saved), waiting); });
      }
      case 10: {
        const size_t rows = stream.Below(300);
        return Both([&] { cpu.Reserve(v, rows); }, [&] { gpu.Reserve(gpu.handle, rows); });
      }
      case 11:
        return Both([&] { cpu.Clear(v); }, [&] { gpu.Empty(); });
      case 12:
        return Both([&] { cpu.ClearSlots(v); }, [&] { gpu.ForgetSlots(); });
      case 13:
        return Train(RandomGradients(n), {});
      default:
        return Train(RandomGradients(n), device::Momentum(cpu.spec().dim));
    }
  }
  void Run(int steps, size_t most) {
    for (int step = 0; step < steps; ++step) {
      const uint64_t pick = stream.Below(40);
      const size_t n = stream.Below(8) == 0 ? stream.Below(2) : stream.Below(most);
      Write(pick < 9 || pick > 30 ? pick % 9 : pick < 13 ? pick : 14, n);
      if (stream.Below(2) == 0) Read(stream.Below(most));
    }
    Compare();
  }

  struct InitialRowsOf {
    const Bytes& given;
    size_t row_bytes;
    operator kvjax::InitialRows() const { return {given.data(), given.size() / row_bytes}; }  // NOLINT
  };

  data::Live cpu;
  device::Device<Q> gpu;
  data::Stream stream;
  Keys keys;
  Sunk sunk[2];
  int refusals = 0;
};
using Pair = PairOn<Threads>;
using Device = device::Device<Threads>;

}  // namespace pairs
