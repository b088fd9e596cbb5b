// The whole test framework: named tests that run in order, and checks that say where and what.
#pragma once
#include <exception>
#include <iostream>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "kvjax/ffi/core/error.h"

namespace check {

struct Test {
  std::string_view file;
  const char* name;
  void (*run)();
};
inline std::vector<Test> tests;
inline int failures = 0;

struct Register {
  Register(const char* file, const char* name, void (*run)()) { tests.push_back({file, name, run}); }
};

template <class T>
void Print(const T& value) {
  if constexpr (requires { std::cerr << +value; }) {
    std::cerr << +value;  // a byte as a number
  } else {
    std::cerr << "(" << sizeof(T) << " bytes)";
  }
}

template <class A, class B>
bool Same(const A& a, const B& b) {
  constexpr bool kIntegers = std::is_integral_v<A> && std::is_integral_v<B> && !std::is_same_v<A, B>;
  if constexpr (kIntegers) {
    return std::cmp_equal(a, b);  // -1 is not 0xFFFFFFFF
  } else {
    return a == b;
  }
}

template <class A, class B>
void Equal(const A& a, const B& b, const char* text, const char* file, int line) {
  if (Same(a, b)) return;
  ++failures;
  std::cerr << file << ":" << line << ": " << text << ": got ";
  Print(a);
  std::cerr << " and ";
  Print(b);
  std::cerr << "\n";
}

template <class F>
void Throws(kvjax::ErrorCode code, F f, const char* text, const char* file, int line) {
  try {
    f();
    std::cerr << file << ":" << line << ": " << text << " threw nothing\n";
  } catch (const kvjax::Error& error) {
    if (error.code() == code) return;
    std::cerr << file << ":" << line << ": " << text << " threw another error: " << error.what() << "\n";
  }
  ++failures;
}

/// Runs the tests of the files whose path holds `topic`; returns what a process exits with.
inline int Run(std::string_view topic = "") {
  size_t ran = 0;
  for (const Test& test : tests) {
    if (test.file.find(topic) == std::string_view::npos) continue;
    ++ran;
    const int before = failures;
    try {
      test.run();
    } catch (const std::exception& error) {
      ++failures;
      std::cerr << test.name << " threw: " << error.what() << "\n";
    }
    std::cout << (failures == before ? "ok   " : "FAIL ") << test.name << std::endl;
    if (failures > before + 100) break;
  }
  if (ran == 0) std::cerr << "no tests of " << topic << "\n";
  return failures == 0 && ran > 0 ? 0 : 1;
}

}  // namespace check

#define TEST(name)                                             \
  static void name();                                          \
  static const check::Register name##_(__FILE__, #name, name); \
  static void name()
#define CHECK(condition) check::Equal(static_cast<bool>(condition), true, #condition, __FILE__, __LINE__)
#define CHECK_EQ(a, b) check::Equal(a, b, #a " == " #b, __FILE__, __LINE__)
#define CHECK_THROWS(code, expression) \
  check::Throws(kvjax::ErrorCode::code, [&] { (void)(expression); }, #expression, __FILE__, __LINE__)
