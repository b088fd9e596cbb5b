// NoSubnormals: a scope in which subnormal numbers are zero, as they are in XLA's own code on the CPU.
#pragma once
#include <cstdint>

namespace kvjax::program {

class NoSubnormals {
 public:
#if defined(__x86_64__)
  NoSubnormals() : before_(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(before_ | kFlushBoth); }
  ~NoSubnormals() { __builtin_ia32_ldmxcsr(before_); }

 private:
  static constexpr uint32_t kFlushBoth = 0x8040;  // results, and operands
  uint32_t before_;
#elif defined(__aarch64__)
  NoSubnormals() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" : : "r"(before_ | (uint64_t{1} << 24)));
  }
  ~NoSubnormals() { asm volatile("msr fpcr, %0" : : "r"(before_)); }

 private:
  uint64_t before_;
#endif
  NoSubnormals(const NoSubnormals&) = delete;
};

}  // namespace kvjax::program
