// The decoder of what XLA hands over: operands, results and attributes, named and checked where they are
// taken.
//
// Types and shapes are checked here and nowhere below: a backend gets pointers that it can trust.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "kvjax/ffi/core/error_texts.h"
#include "kvjax/ffi/core/operands.h"
#include "kvjax/ffi/core/program.h"
#include "kvjax/ffi/core/registry.h"
#include "kvjax/ffi/core/spec.h"
#include "xla/ffi/api/ffi.h"

namespace kvjax {

namespace ffi = xla::ffi;

/// What an array is, for errors.
inline std::string Described(const ffi::AnyBuffer& array) {
  std::string text = "element type " + std::to_string(static_cast<int>(array.element_type())) + ", shape (";
  for (const int64_t d : array.dimensions()) text += std::to_string(d) + ",";
  return text + ")";
}

/// Throws unless `ok`: the op wants `want`.
inline void Expect(bool ok, std::string_view table, std::string_view op, std::string_view want,
                   const ffi::AnyBuffer& got) {
  if (!ok) throw OperandError(table, op, want, Described(got));
}

/// How JAX holds a type: 64-bit integers as pairs of 32-bit words, low word first, whatever jax_enable_x64
/// says.
template <class T>
struct HeldAs {
  static constexpr bool kPair = sizeof(T) == 8;
  static constexpr ffi::DataType kType = std::is_same_v<T, bool>      ? ffi::PRED
                                         : std::is_same_v<T, float>   ? ffi::F32
                                         : std::is_same_v<T, int32_t> ? ffi::S32
                                                                      : ffi::U32;
  static constexpr std::string_view kName = std::is_same_v<T, bool>      ? "bool"
                                            : std::is_same_v<T, float>   ? "float32"
                                            : std::is_same_v<T, int32_t> ? "int32"
                                                                         : "uint32";
  static constexpr size_t kWords = kPair ? 2 : 1;
};

inline ffi::DataType DataTypeOf(RowType type) {
  switch (type) {
    case RowType::kFloat32:
      return ffi::F32;
    case RowType::kBFloat16:
      return ffi::BF16;
    case RowType::kFloat16:
      return ffi::F16;
  }
  return ffi::DataType::INVALID;
}

/// An array of a call whose length is the caller's choice.
template <class T>
struct Array1 {
  T* data;
  size_t n;
};

/// One call of XLA: its operands, results and attributes. Operands and results are taken in their order;
/// `what` says the name and the shape of one for errors, and its type follows.
class Decoder {
 public:
  Decoder(int32_t device, ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attrs)
      : device(device), args_(args), rets_(rets), attrs_(attrs) {}

  const int32_t device;  // where the call runs, of those of this process

  // ---- what the call is about ---------------------------------------------------------------------------

  /// Errors from here on name the op, and the table, if the call has one.
  void Names(std::string_view op, std::string_view table = "") { op_ = op, table_ = table; }
  [[nodiscard]] std::string_view op() const { return op_; }
  [[nodiscard]] std::string_view table() const { return table_; }

  template <class T>
  [[nodiscard]] T Attr(std::string_view name) const {
    const ffi::ErrorOr<T> value = attrs_.get<T>(name);
    if (value.has_value()) return value.value();
    throw OperandError(table_, op_, "an attribute " + std::string(name), "none");
  }
  [[nodiscard]] bool Flag(std::string_view name) const { return Attr<bool>(name); }
  [[nodiscard]] std::string_view Text(std::string_view name) const { return Attr<std::string_view>(name); }
  [[nodiscard]] int64_t Number(std::string_view name) const { return Attr<int64_t>(name); }
  /// A number of things, of which there are so many at least and at most.
  [[nodiscard]] int64_t Count(std::string_view name, int64_t least, int64_t most) const {
    const int64_t number = Number(name);
    if (number >= least && number <= most) return number;
    const std::string want = std::to_string(least) + " to " + std::to_string(most);
    throw OperandError(table_, op_, "an attribute " + std::string(name) + " of " + want,
                       std::to_string(number));
  }
  [[nodiscard]] int64_t NumberOr(std::string_view name, int64_t otherwise) const {
    // XLA's text for one that is not there would end the process where there is no memory for it.
    return attrs_.contains(name) ? Number(name) : otherwise;
  }

  // ---- operands ------------------------------------------------------------------------------------------

  ffi::AnyBuffer In() {
    const ffi::ErrorOr<ffi::AnyBuffer> buffer = args_.get<ffi::AnyBuffer>(arg_++);
    if (!buffer.has_value()) throw Short("operands", arg_);
    return buffer.value();
  }
  template <class T>
  const T* In(std::string_view what, size_t count) {
    return Checked<T>(In(), what, count);
  }
  /// (m,), for any m.
  template <class T>
  Array1<const T> InAny(std::string_view what) {
    const ffi::AnyBuffer buffer = In();
    Want(buffer.element_type() == HeldAs<T>::kType, [&] { return Typed<T>(what); }, buffer);
    return {static_cast<const T*>(buffer.untyped_data()), buffer.element_count() / HeldAs<T>::kWords};
  }
  /// (), or with the leading axes that vmap has given it.
  const uint32_t* InVersion(std::string_view what = "a version ()") {
    const ffi::AnyBuffer buffer = In();
    const bool ok = buffer.element_type() == ffi::U32 && buffer.element_count() >= 1;
    Want(ok, [&] { return Typed<uint32_t>(what); }, buffer);
    return static_cast<const uint32_t*>(buffer.untyped_data());
  }
  /// The same for a read: nullptr for that of a following handle, which brings an array (0,).
  const uint32_t* InReadVersion() {
    const ffi::AnyBuffer buffer = In();
    Want(buffer.element_type() == ffi::U32, "a version () or (0,) uint32", buffer);
    return buffer.element_count() == 0 ? nullptr : static_cast<const uint32_t*>(buffer.untyped_data());
  }
  /// No more than numbers of 32 bits count.
  KeySpan InKeys(bool narrow) {
    const ffi::AnyBuffer buffer = In();
    const auto dims = buffer.dimensions();
    Want(buffer.element_count() / 2 <= INT32_MAX, "2**31 - 1 keys at most", buffer);
    Want(buffer.element_type() == ffi::U32 && dims.size() > 0 && dims.back() == 2, "keys (..., 2) uint32",
         buffer);
    return {static_cast<const uint64_t*>(buffer.untyped_data()), buffer.element_count() / 2, narrow};
  }
  /// (n,) bool, or nothing for a mask that is true: nullptr.
  const bool* InMask(size_t n) {
    const ffi::AnyBuffer buffer = In();
    const bool none = Holds(buffer, ffi::PRED, 0);
    Want(none || Holds(buffer, ffi::PRED, n), "mask (n,) bool", buffer);
    return none ? nullptr : static_cast<const bool*>(buffer.untyped_data());
  }
  /// (n, dim) of the table's dtype.
  const std::byte* InRows(const TableSpec& spec, size_t n) { return Rows(In(), spec, n); }
  /// (n, dim) float32.
  const float* InFloats(const TableSpec& spec, size_t n) { return Floats(In(), spec, n); }
  /// Rows that the table cannot make itself: (m, dim) of its dtype, for any m.
  InitialRows InInitial(const TableSpec& spec) {
    const ffi::AnyBuffer buffer = In();
    const size_t m = buffer.element_count() / static_cast<size_t>(spec.dim);
    return {Rows(buffer, spec, m), m};
  }
  /// Counts (n,), canaries (s,) and rows (n, dim), in this order.
  GradientSpan InGradients(const TableSpec& spec, size_t n) {
    const int32_t* const counts = In<int32_t>("counts (n,)", n);
    const Array1<const uint32_t> canaries = InAny<uint32_t>("canaries (s,)");
    return {counts, InFloats(spec, n), canaries.data, canaries.n};
  }
  [[nodiscard]] bool HasIn() const { return arg_ < args_.size(); }
  /// The attribute `program`, nothing if it is empty.
  [[nodiscard]] std::optional<Program> ProgramFor(const TableSpec& spec, const SlotLayout& layout) const {
    const auto words = Attr<ffi::Span<const int32_t>>("program");
    if (words.size() == 0) return std::nullopt;
    return Program::Parse(table_, {words.begin(), words.size()}, spec.dim, spec.type, layout);
  }
  /// Its shared registers (n,): float32 or integers in the first of two words, or float64.
  const uint64_t* InShared(size_t n) { return In<uint64_t>("shared (s, 2)", n); }

  // ---- results -------------------------------------------------------------------------------------------

  ffi::AnyBuffer Out() {
    ffi::ErrorOr<ffi::Result<ffi::AnyBuffer>> buffer = rets_.get<ffi::AnyBuffer>(ret_++);
    if (!buffer.has_value()) throw Short("results", ret_);
    return **buffer;
  }
  template <class T>
  T* Out(std::string_view what, size_t count) {
    return const_cast<T*>(Checked<T>(Out(), what, count));
  }
  /// (), or with the leading axes that vmap has given it.
  template <class T>
  Array1<T> OutAll(std::string_view what) {
    const ffi::AnyBuffer buffer = Out();
    const bool ok = buffer.element_type() == HeldAs<T>::kType && buffer.element_count() >= 1;
    Want(ok, [&] { return Typed<T>(what); }, buffer);
    return {static_cast<T*>(buffer.untyped_data()), buffer.element_count()};
  }
  std::byte* OutRows(const TableSpec& spec, size_t n) { return const_cast<std::byte*>(Rows(Out(), spec, n)); }
  float* OutFloats(const TableSpec& spec, size_t n) { return const_cast<float*>(Floats(Out(), spec, n)); }
  /// The version of the next handle, or a canary.
  uint32_t* OutWord() { return Out<uint32_t>("one word ()", 1); }
  [[nodiscard]] bool HasOut() const { return ret_ < rets_.size(); }
  /// The last result, where a read puts its status; any other may be taken before or after.
  Array1<uint32_t> Status() {
    ffi::ErrorOr<ffi::Result<ffi::AnyBuffer>> buffer = rets_.get<ffi::AnyBuffer>(rets_.size() - 1);
    if (rets_.size() == 0 || !buffer.has_value()) throw Short("results", 1);
    status_ = true;
    const ffi::AnyBuffer status = **buffer;
    Want(status.element_type() == ffi::U32 && status.element_count() >= 1, "a word () uint32", status);
    return {static_cast<uint32_t*>(status.untyped_data()), status.element_count()};
  }

  // ---- the end -------------------------------------------------------------------------------------------

  /// The operands that are left are only waited for.
  void SkipOperands() { arg_ = args_.size(); }
  /// Where the backend runs, `exec`: only once all operands and results have been taken. Surplus ones are
  /// refused.
  template <class Exec>
  Exec& Done(Exec& exec) const {
    if (arg_ < args_.size()) throw Surplus("operands", arg_, args_.size());
    const size_t results = ret_ + (status_ ? 1 : 0);
    if (results < rets_.size()) throw Surplus("results", results, rets_.size());
    return exec;
  }

  void Want(bool ok, std::string_view want, const ffi::AnyBuffer& got) const {
    Expect(ok, table_, op_, want, got);
  }
  /// The same; what is wanted is only said where there is need: a call that goes well takes no memory.
  template <class Say>
    requires std::is_invocable_v<Say>
  void Want(bool ok, Say say, const ffi::AnyBuffer& got) const {
    if (!ok) Want(false, say(), got);
  }
  static bool Holds(const ffi::AnyBuffer& buffer, ffi::DataType type, size_t count) {
    return buffer.element_type() == type && buffer.element_count() == count;
  }

 private:
  template <class T>
  static std::string Typed(std::string_view what) {
    return std::string(what).append(" ").append(HeldAs<T>::kName);
  }
  template <class T>
  const T* Checked(const ffi::AnyBuffer& buffer, std::string_view what, size_t count) const {
    const bool ok = Holds(buffer, HeldAs<T>::kType, count * HeldAs<T>::kWords);
    Want(ok, [&] { return Typed<T>(what); }, buffer);
    return static_cast<const T*>(buffer.untyped_data());
  }
  const std::byte* Rows(const ffi::AnyBuffer& buffer, const TableSpec& spec, size_t n) const {
    const bool ok = Holds(buffer, DataTypeOf(spec.type), n * static_cast<size_t>(spec.dim));
    if (!ok) throw OtherRowsError(table_, op_, Shaped(spec, n) + " of the table's dtype", Described(buffer));
    return static_cast<const std::byte*>(buffer.untyped_data());
  }
  const float* Floats(const ffi::AnyBuffer& buffer, const TableSpec& spec, size_t n) const {
    const bool ok = Holds(buffer, ffi::F32, n * static_cast<size_t>(spec.dim));
    Want(ok, [&] { return Shaped(spec, n) + " float32"; }, buffer);
    return static_cast<const float*>(buffer.untyped_data());
  }
  static std::string Shaped(const TableSpec& spec, size_t n) {
    return "rows (" + std::to_string(n) + ", " + std::to_string(spec.dim) + ")";
  }
  [[nodiscard]] Error Short(std::string_view what, size_t wanted) const {
    return OperandError(table_, op_, "at least " + std::to_string(wanted) + " " + std::string(what), "fewer");
  }
  [[nodiscard]] Error Surplus(std::string_view what, size_t taken, size_t got) const {
    return OperandError(table_, op_, "at most " + std::to_string(taken) + " " + std::string(what),
                        std::to_string(got));
  }

  ffi::RemainingArgs args_;
  ffi::RemainingRets rets_;
  ffi::Dictionary attrs_;
  std::string_view op_ = "call", table_;
  size_t arg_ = 0, ret_ = 0;
  bool status_ = false;  // whether the last result has been taken as that
};

/// The shard of the call's table that lives where the call runs.
template <class B>
std::shared_ptr<typename B::Table> TableOf(const Decoder& in) {
  return Registry<typename B::Table>::Get().Find(in.table(), in.op(), in.device);
}

/// The shard that a read is about: that of the device, or for a following handle of a table in the memory of
/// the host the one at `place` among those of this process, wherever the call runs. No version says that
/// such a handle is one from before the rows moved.
template <class B>
std::shared_ptr<typename B::Table> TableToRead(const Decoder& in, bool follows) {
  const int64_t place = in.NumberOr("place", -1);
  auto table = place < 0
                   ? TableOf<B>(in)
                   : Registry<typename B::Table>::Get().At(in.table(), in.op(), static_cast<size_t>(place));
  if (follows && table->spec().placement != in.NumberOr("placement", 0))
    throw MovedError(in.table(), in.op());
  return table;
}

}  // namespace kvjax
