// The instructions of row programs as functions of one element, for the lanes of a device.
#pragma once
#include <bit>
#include <cstdint>
#include <cstring>

#include "kvjax/ffi/core/instructions.h"
#include "kvjax/ffi/core/portable.h"

namespace kvjax::device {

namespace instruction {

KVJAX_HD inline uint32_t Bits(int32_t x) { return static_cast<uint32_t>(x); }
KVJAX_HD inline int32_t Word(uint32_t x) { return static_cast<int32_t>(x); }

#define KVJAX_MOVE(name, arity)
#define KVJAX_MAP(name, arity, In_, Out_, expression)                                                     \
  struct name##_map {                                                                                     \
    using In = In_;                                                                                       \
    using Out = Out_;                                                                                     \
    KVJAX_HD static Out Of([[maybe_unused]] In a, [[maybe_unused]] In b, [[maybe_unused]] In c, In, In) { \
      return expression;                                                                                  \
    }                                                                                                     \
  };                                                                                                      \
  [[maybe_unused]] KVJAX_HD inline Out_ name(In_ a, In_ b = In_(), In_ c = In_()) {                       \
    return name##_map::Of(a, b, c, In_(), In_());                                                         \
  }
#define KVJAX_FUSED(name, kinds, In_, Out_, calls)                                                    \
  struct name##_map {                                                                                 \
    using In = In_;                                                                                   \
    using Out = Out_;                                                                                 \
    KVJAX_HD static Out Of(In a, [[maybe_unused]] In b, [[maybe_unused]] In c, [[maybe_unused]] In d, \
                           [[maybe_unused]] In e) {                                                   \
      return calls;                                                                                   \
    }                                                                                                 \
  };
#define KVJAX_REDUCE(name, T_, zero, expression)          \
  struct name##_reduce {                                  \
    using T = T_;                                         \
    KVJAX_HD static T Zero() { return zero; }             \
    KVJAX_HD static T Of(T x, T y) { return expression; } \
  };
KVJAX_INSTRUCTIONS(KVJAX_MAP, KVJAX_MAP, KVJAX_REDUCE, KVJAX_MOVE, KVJAX_FUSED)
#undef KVJAX_MOVE
#undef KVJAX_MAP
#undef KVJAX_FUSED
#undef KVJAX_REDUCE

}  // namespace instruction

}  // namespace kvjax::device
