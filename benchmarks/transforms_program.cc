// Row programs on the rows of a store, as a training step of the table runs them; called by transforms.py.
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "kvjax/ffi/cpu/row_pass.h"

namespace {

/// Rows with slots: the keys are their numbers.
struct Table {
  kvjax::TableSpec spec;
  kvjax::SlotLayout layout;
  kvjax::RowStore store;
  std::vector<uint64_t> keys;
  std::vector<int32_t> counts;
  std::vector<kvjax::RowUpdate> updates;
};

}  // namespace

extern "C" {

Table* make_table(int64_t n, int64_t dim, const char* layout) {
  kvjax::TableSpec spec;
  spec.name = "t", spec.dim = dim;
  const size_t bytes = spec.row_bytes();
  auto* table = new Table{spec,
                          kvjax::SlotLayout::Parse(layout),
                          kvjax::RowStore(std::make_shared<kvjax::HostSlabs>(0), bytes),
                          {},
                          {},
                          {}};
  table->store.Reserve(static_cast<size_t>(n));
  for (int64_t row = 0; row < n; ++row) {
    table->store.Insert(static_cast<uint64_t>(row));
    std::memset(table->store.Value(static_cast<uint32_t>(row)), 0, bytes);
  }
  if (!table->layout.empty()) table->store.AttachSlots(table->store.MakeSlots(table->layout, 0));
  return table;
}

void drop_table(Table* table) { delete table; }

/// The rows of a step: ids (n,).
void choose_rows(Table* table, const uint32_t* ids, int64_t n) {
  table->keys.assign(ids, ids + n), table->counts.assign(table->keys.size(), 1), table->updates.clear();
  for (uint32_t i = 0; i < table->keys.size(); ++i) table->updates.push_back({ids[i], i, 1});
}

/// gradients: (n, dim).
void run_program(Table* table, const int32_t* words, int64_t num_words, const uint64_t* shared,
                 const float* gradients, int64_t step) {
  const auto program = kvjax::Program::Parse("t", {words, static_cast<size_t>(num_words)}, table->spec.dim,
                                             table->spec.type, table->layout);
  kvjax::RowPass pass(table->spec, program, table->layout, shared, step);
  pass.Run(kvjax::Serial, table->store, table->updates,
           {.keys = table->keys.data(), .rows = gradients, .counts = table->counts.data()});
}

/// values: (rows, dim); slots: (rows, stride).
void read_rows(const Table* table, float* values, char* slots) {
  const size_t bytes = table->spec.row_bytes(), stride = table->layout.stride();
  for (uint32_t row = 0; row < table->store.end_row(); ++row) {
    std::memcpy(reinterpret_cast<char*>(values) + row * bytes, table->store.Value(row), bytes);
    if (stride > 0) std::memcpy(slots + row * stride, table->store.Slots(row), stride);
  }
}
}
