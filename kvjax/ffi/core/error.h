// The one exception type of the core, and the one form its text takes.
//
// Every message names the table, the operation, what was wanted, what came instead, and how to mend it.
#pragma once
#include <cstddef>
#include <exception>
#include <new>
#include <string>
#include <string_view>
#include <utility>

namespace kvjax {

enum class ErrorCode { kInvalidArgument, kNotFound, kFailedPrecondition, kResourceExhausted, kInternal };

class Error : public std::exception {
 public:
  Error(ErrorCode code, std::string message) : code_(code), message_(std::move(message)) {}

  [[nodiscard]] ErrorCode code() const { return code_; }
  [[nodiscard]] const char* what() const noexcept override { return message_.c_str(); }

 private:
  ErrorCode code_;
  std::string message_;
};

/// A disk that has no `bytes` more: a want of memory, to whoever does not ask; error: the errno of the call
/// that has failed. What operation wanted them is known where it is caught (core/failures.h).
struct NoDisk : std::bad_alloc {
  NoDisk(std::string folder, size_t bytes, int error)
      : folder(std::move(folder)), bytes(bytes), error(error) {}
  std::string folder;
  size_t bytes;
  int error;
};

/// Builds an Error in the form "kvjax: table 'user', op: want W, got G; mend".
inline Error MakeError(ErrorCode code, std::string_view table, std::string_view op, std::string_view want,
                       std::string_view got, std::string_view mend) {
  std::string text = "kvjax: ";
  if (!table.empty()) text.append("table '").append(table).append("', ");
  text.append(op).append(": want ").append(want).append(", got ").append(got).append("; ").append(mend);
  return Error(code, std::move(text));
}

}  // namespace kvjax
