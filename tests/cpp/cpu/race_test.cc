// Readers beside a writer, for ThreadSanitizer: a read sees one whole version or is refused.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "tests/cpp/support/check.h"
#include "tests/cpp/support/data.h"

namespace cpu_race {

using data::Floats;
using data::Keys;
using data::Live;

constexpr size_t kDim = 33;

/// Calls `read` with the live version again and again until `writer` is done. Stale reads are refused and
/// only counted; nothing else may be thrown. CHECK is not for threads: `read` returns whether all was well.
template <class Read>
void ReadBeside(Live& table, Read read, const std::function<void()>& writer) {
  std::atomic<bool> done{false};
  std::atomic<int> good{0}, stale{0}, bad{0};
  const auto reader = [&] {
    do {
      try {
        (read(table.version()) ? good : bad) += 1;
      } catch (const kvjax::Error& error) {
        (error.code() == kvjax::ErrorCode::kFailedPrecondition ? stale : bad) += 1;
      }
      std::this_thread::yield();  // glibc's lock prefers readers: let the writer in
    } while (!done || good == 0);
  };
  std::thread first(reader), second(reader);
  writer();
  done = true;
  first.join();
  second.join();
  CHECK_EQ(bad, 0);
  CHECK(good > 0);
}

/// Whether all elements of the rows are one number: the writers below write no other rows.
bool IsOneNumber(const Floats& rows) {
  return std::all_of(rows.begin(), rows.end(), [&](float x) { return x == rows[0]; });
}

struct Reader {
  const Live& table;
  const Keys& keys;

  /// Looks all keys up at `version`; all rows must be of one write.
  bool Rows(uint32_t version) const {
    Floats rows(keys.size() * kDim);
    const auto found = std::make_unique<bool[]>(keys.size());
    table.Lookup(kvjax::Serial, version, data::Span(keys), data::AllOf(keys.size()), {},
                 kvjax::Missing::kTable, reinterpret_cast<std::byte*>(rows.data()), found.get());
    return IsOneNumber(rows) && std::all_of(found.get(), found.get() + keys.size(), [](bool f) { return f; });
  }
  /// Frequencies and versions of the keys grow together.
  bool Headers(uint32_t version) const {
    const auto found = std::make_unique<bool[]>(keys.size());
    std::vector<int64_t> frequencies(keys.size()), versions(keys.size());
    const auto pinned = std::make_unique<bool[]>(keys.size());
    table.Inspect(kvjax::Serial, "inspect", version, data::Span(keys), found.get(), frequencies.data(),
                  versions.data(), pinned.get());
    const auto same = [](const auto& v) {
      return std::all_of(v.begin(), v.end(), [&](int64_t x) { return x == v[0]; });
    };
    return same(frequencies) && same(versions);
  }
};

TEST(LookupsBesideUpserts) {
  Keys keys = data::kAwkward;
  for (uint64_t key = 1000; key < 1060; ++key) keys.push_back(key);
  Live table(kDim);
  table.Put(keys, Floats(keys.size() * kDim, 0.0f));
  const Reader reader{table, keys};
  ReadBeside(
      table, [&](uint32_t version) { return reader.Rows(version); },
      [&] {
        for (int step = 1; step <= 300; ++step) {
          table.Put(keys, Floats(keys.size() * kDim, static_cast<float>(step)));
          table.Ensure(Keys{static_cast<uint64_t>(step) << 20});  // the index grows meanwhile
          if (step % 3 == 0) table.Drop(Keys{static_cast<uint64_t>(step) << 20});
        }
      });
}

TEST(InspectionsBesideTraining) {
  Keys keys;
  for (uint64_t key = 0; key < 50; ++key) keys.push_back(key);
  Live table(kDim);
  const std::vector<int32_t> counts(keys.size(), 1);
  kvjax::SlotLayout layout;
  layout.Add("m", "float32[33]", 4 * kDim);
  const Reader reader{table, keys};
  ReadBeside(
      table, [&](uint32_t version) { return reader.Headers(version); },
      [&] {
        Floats values(keys.size() * kDim), slot(keys.size() * kDim);
        const auto fresh = std::make_unique<bool[]>(keys.size());
        for (int step = 1; step <= 300; ++step) {
          const auto ids = table.Open(keys, counts, layout);
          table.Gather(kvjax::Serial, table.token, ids.data(), ids.size(),
                       reinterpret_cast<std::byte*>(values.data()), fresh.get(),
                       {reinterpret_cast<std::byte*>(slot.data())});
          table.Scatter(kvjax::Serial, table.token, ids.data(), ids.size(), data::Bytes(values),
                        {data::Bytes(slot)}, true);
        }
      });
}

TEST(SettledVersionsAreOfWholeSteps) {
  constexpr size_t kRows = 60, kChunk = 20;
  Keys keys;
  for (uint64_t key = 0; key < kRows; ++key) keys.push_back(key);
  Live table(kDim);
  table.Put(keys, Floats(kRows * kDim));
  const auto whole = [&](uint32_t) {
    const kvjax::Snapshot s = table.Export(table.SettledVersion(), true);
    Floats rows(kRows * kDim);
    std::memcpy(rows.data(), s.values.data(), s.values.size());
    // The step has been applied to all rows: the number that it wrote is its own.
    return s.keys.size() == kRows && IsOneNumber(rows) && rows[0] == static_cast<float>(s.last_step);
  };
  ReadBeside(table, whole, [&] {
    const std::vector<int32_t> counts(kRows, 1);
    for (int step = 1; step <= 200; ++step) {
      const auto targets = table.Open(keys, counts);
      const Floats rows(kChunk * kDim, static_cast<float>(step));
      for (size_t start = 0; start < kRows; start += kChunk) {
        std::this_thread::sleep_for(std::chrono::microseconds(100));
        table.Scatter(kvjax::Serial, table.token, targets.data() + start, kChunk, data::Bytes(rows), {},
                      start + kChunk == kRows);
      }
      std::this_thread::sleep_for(std::chrono::microseconds(300));  // or all that is settled were stale
    }
  });
}

TEST(ExportsBesideLoadsAndClears) {
  Live table(kDim), source(kDim);
  Keys keys;
  for (uint64_t key = 0; key < 40; ++key) keys.push_back(key);
  source.Put(keys, Floats(keys.size() * kDim, 3.0f));
  const kvjax::Snapshot full = source.Copy();
  const auto whole = [&](uint32_t version) {
    const kvjax::Snapshot s = table.Export(version, true);
    return (s.keys.empty() || (s.keys == full.keys && s.values == full.values));
  };
  ReadBeside(table, whole, [&] {
    for (int step = 0; step < 40; ++step) {
      table.Restore(data::View(full));
      table.Clear(table.version());
    }
  });
}

/// Everything that changes a table, a step after the other.
void Write(Live& table, const kvjax::Snapshot& saved, int step) {
  data::Stream stream(static_cast<uint64_t>(step));
  Keys keys;
  for (uint64_t key = stream.Below(7); key < 900; key += 1 + stream.Below(7)) keys.push_back(key);
  kvjax::SlotLayout layout;
  layout.Add("m", "float32[33]", 4 * kDim);
  const auto targets = table.Open(keys, std::vector<int32_t>(keys.size(), 1), layout);
  const Floats rows(targets.size() * kDim, static_cast<float>(step));
  table.Scatter(kvjax::Serial, table.token, targets.data(), targets.size(), data::Bytes(rows),
                {data::Bytes(rows)}, true);
  table.Pin({static_cast<uint64_t>(step)});
  if (step % 4 == 0) table.Evict("restrict\nleast_recent:-100");  // and compacts
  if (step % 10 == 5) table.ClearSlots(table.version());
  if (step % 20 == 7) table.Clear(table.version());
  if (step % 20 == 13) table.Restore(data::View(saved));
}

TEST(ReadersBesideEveryWrite) {
  kvjax::TableSpec spec = data::Spec(kDim);
  spec.admission = {.kind = kvjax::AdmissionSpec::Kind::kMinCount, .threshold = 2};
  spec.max_capacity = 1500;
  spec.on_full = kvjax::OnFull::kEvict;
  spec.policy = kvjax::Policy::Parse("old\nmax_age:3");
  spec.evict_every = 5;
  Keys keys;
  for (uint64_t key = 0; key < 1400; ++key) keys.push_back(key);
  Live source(spec), serial(spec), table(spec);
  source.Put(keys, Floats(keys.size() * kDim, 3.0f));
  const kvjax::Snapshot saved = source.Copy();
  uint64_t evicted = 0;
  for (Live* t : {&serial, &table})
    t->SetSink([&](const kvjax::Snapshot& s, std::string_view) { evicted += s.keys.size(); });
  for (int step = 0; step < 60; ++step) Write(serial, saved, step);
  CHECK(evicted > 1000);

  std::atomic<uint64_t> turn{0};
  const auto read = [&](uint32_t version) {
    const size_t n = 200;
    Floats rows(n * kDim);
    const auto found = std::make_unique<bool[]>(n), pinned = std::make_unique<bool[]>(n);
    std::vector<int64_t> frequencies(n), versions(n);
    switch (++turn % 5) {
      case 0: {
        table.Lookup(kvjax::Serial, version, {keys.data(), n}, data::AllOf(n), {}, kvjax::Missing::kTable,
                     reinterpret_cast<std::byte*>(rows.data()), found.get());
        return true;
      }
      case 1:
        table.Inspect(kvjax::Serial, "inspect", version, {keys.data(), n}, found.get(), frequencies.data(),
                      versions.data(), pinned.get());
        return true;
      case 2: {
        const kvjax::Snapshot s = table.Export(version, true);
        return s.offsets.back() == static_cast<int64_t>(s.keys.size()) && s.keys.size() <= 1500;
      }
      case 3:
        return table.ExportAdmission(version).cells.empty();
      default:
        return table.Observe([](const kvjax::Contents& c) {
          return c.store.size() <= 1500 && c.store.end_row() >= c.store.size();
        });
    }
  };
  ReadBeside(table, read, [&] {
    for (int step = 0; step < 60; ++step) Write(table, saved, step);
  });
  CHECK(data::Same(data::State(serial), data::State(table)));
}

TEST(RowsInAnEngineBesideEveryWrite) {
  // Its calls come one at a time, so it has no lock.
  std::map<std::pair<std::string, uint64_t>, std::vector<std::byte>> engine_rows;
  kvjax::TableSpec spec = data::Spec(kDim);
  spec.max_capacity = 700;
  spec.on_full = kvjax::OnFull::kEvict;
  Live source(kDim), serial(spec), table(spec);
  Keys keys;
  for (uint64_t key = 0; key < 600; ++key) keys.push_back(key);
  source.Put(keys, Floats(keys.size() * kDim, 3.0f));
  const kvjax::Snapshot saved = source.Copy();
  for (int step = 0; step < 40; ++step) Write(serial, saved, step);
  table.SetEngine(
      {.get =
           [&](std::string_view column, kvjax::Engine::Keys wanted, size_t width, std::byte* out) {
             for (size_t i = 0; i < wanted.size(); ++i)
               std::copy_n(engine_rows.at({std::string(column), wanted[i]}).begin(), width, out + i * width);
           },
       .put =
           [&](std::string_view column, kvjax::Engine::Keys given, size_t width,
               const std::vector<std::byte>& rows) {
             for (size_t i = 0; i < given.size(); ++i) {
               const std::byte* const row = rows.data() + i * width;
               engine_rows[{std::string(column), given[i]}].assign(row, row + width);
             }
           },
       .remove =
           [&](kvjax::Engine::Keys gone) {
             for (const uint64_t key : gone)
               for (const char* column : {"values", "slots"}) engine_rows.erase({column, key});
           }});
  std::atomic<uint64_t> turn{0};
  const auto read = [&](uint32_t version) {
    const size_t n = 200;
    Floats rows(n * kDim);
    const auto found = std::make_unique<bool[]>(n);
    const kvjax::KeySpan some{keys.data(), n};
    switch (++turn % 5) {
      case 0:
        table.Lookup(kvjax::Serial, version, some, data::AllOf(n), {}, kvjax::Missing::kTable,
                     reinterpret_cast<std::byte*>(rows.data()), found.get());
        return true;
      case 1:
        table.ReadSlot(kvjax::Serial, version, "", 1, some, reinterpret_cast<std::byte*>(found.get()));
        return true;
      case 2:
        return table.Export(version, true).keys.size() <= 700;
      case 3:  // of a following handle
        table.Lookup(kvjax::Serial, std::nullopt, some, data::AllOf(n), {}, kvjax::Missing::kTable,
                     reinterpret_cast<std::byte*>(rows.data()), found.get());
        return true;
      default:
        return table.Stats().size <= 700;
    }
  };
  ReadBeside(table, read, [&] {
    for (int step = 0; step < 40; ++step) Write(table, saved, step);
  });
  CHECK(data::Same(data::State(serial), data::State(table)));
  CHECK(engine_rows.size() >= table.Stats().size);
}

TEST(FrozenRowsBesideEveryWrite) {
  // What is copied out part by part, beside writes, is what was there when it was frozen.
  Live table(kDim), source(kDim);
  Keys keys;
  for (uint64_t key = 0; key < 9000; ++key) keys.push_back(key);  // three parts
  source.Put(keys, Floats(keys.size() * kDim, 3.0f));
  const kvjax::Snapshot saved = source.Copy();
  table.Put(keys, Floats(keys.size() * kDim, 3.0f));
  std::atomic<int> copied{0};
  const auto copy = [&](uint32_t version) {
    const auto [frozen, admission] = table.Freeze(version, true);
    std::vector<int64_t> found;
    kvjax::Snapshot part;
    part.layout = frozen->layout();
    part.Resize(5000, kDim * 4);
    for (;;) {
      const size_t rows = table.NextOf(*frozen, data::SpaceOf(part));
      if (rows == 0) break;
      found.insert(found.end(), part.keys.begin(), part.keys.begin() + static_cast<ptrdiff_t>(rows));
      for (size_t i = 0; i < rows; ++i) {
        if (part.versions[i] > frozen->last_step()) return false;  // it has been written since
        if (part.has_slots[i] == std::byte{0}) continue;
        Floats row(2 * kDim);  // the value and the slot, which each step makes the same
        std::memcpy(row.data(), part.values.data() + i * kDim * 4, kDim * 4);
        std::memcpy(row.data() + kDim, part.slots[0].data() + i * kDim * 4, kDim * 4);
        if (!IsOneNumber(row)) return false;
      }
    }
    ++copied;
    return found.size() == frozen->size() && frozen->offsets().back() == static_cast<int64_t>(found.size());
  };
  ReadBeside(table, copy, [&] {
    for (int step = 0; step < 60; ++step) Write(table, saved, step);
  });
  CHECK(copied > 0);
}

TEST(StaleLoadsBesideClears) {
  Live table(kDim);
  const auto load = [&](uint32_t version) {
    try {
      table.CommitLoad(data::Ready(table, version - 1000, {}));
    } catch (const kvjax::Error& error) {
      return error.code() == kvjax::ErrorCode::kFailedPrecondition;
    }
    return false;
  };
  ReadBeside(table, load, [&] {
    for (int step = 0; step < 2000; ++step) table.Clear(table.version());
  });
}

TEST(ParallelCallsTouchDisjointData) {
  // Three threads share each call, as XLA's pool would.
  const kvjax::ParallelFor threads = [](size_t n, size_t, const std::function<void(size_t, size_t)>& body) {
    std::vector<std::thread> others;
    for (size_t t = 1; t < 3; ++t) others.emplace_back([&, t] { body(n * t / 3, n * (t + 1) / 3); });
    body(0, n / 3);
    for (std::thread& other : others) other.join();
  };
  kvjax::TableSpec spec = data::Spec(3);
  spec.type = kvjax::RowType::kBFloat16;  // rows of 6 bytes: neighbours must not share a word
  data::Live alone(spec, std::make_shared<kvjax::HostSlabs>(), 0);
  data::Live shared(spec, std::make_shared<kvjax::HostSlabs>(), 0);
  for (uint64_t batch = 0; batch < 4; ++batch) {
    Keys keys;
    for (uint64_t i = 0; i < 6000; ++i) keys.push_back((i * 7 + batch * 3000) % 9001);
    alone.Insert(kvjax::Serial, alone.version(), data::Span(keys), {});
    shared.Insert(threads, shared.version(), data::Span(keys), {});
    std::vector<std::byte> rows(keys.size() * 6);
    const auto found = std::make_unique<bool[]>(keys.size());
    shared.Lookup(threads, shared.version(), data::Span(keys), data::AllOf(keys.size()), {},
                  kvjax::Missing::kTable, rows.data(), found.get());
  }
  CHECK(data::Same(alone.Copy(), shared.Copy()));
}

}  // namespace cpu_race
