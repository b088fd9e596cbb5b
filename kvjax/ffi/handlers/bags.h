// Handlers of pooling: ids (n,) int32, weights (n,) float32, rows (n, dim) float32, bags (bags, dim) float32.
#pragma once
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "kvjax/ffi/core/bag.h"
#include "kvjax/ffi/handlers/decode.h"
#include "kvjax/ffi/handlers/failures.h"
#include "kvjax/ffi/handlers/tables.h"

namespace kvjax {

/// What a backend supplies for pooling; pointers as in Backend.
template <class B>
concept BagBackend = requires(typename B::Exec& exec, const BagShape& shape, const float* floats, float* out,
                              const int32_t* ints, int32_t* out_ints, size_t n, std::string_view name) {
  typename B::Ctx;
  B::BagSum(exec, shape, floats, floats, out);
  B::BagSpread(exec, shape, floats, floats, out);
  B::BagDot(exec, shape, floats, floats, out);
  B::BagMax(exec, shape, floats, out, out_ints);
  B::BagPlace(exec, shape, ints, floats, out);
  B::BagIds(exec, name, ints, n, n, out_ints);
};

/// The shape that ids, rows and bags give; positions are 32 bits wide, and so are the numbers of rows and
/// bags.
inline BagShape ShapeOfBags(const ffi::AnyBuffer& ids, const ffi::AnyBuffer& rows,
                            const ffi::AnyBuffer& bags) {
  const auto matrix = [](const ffi::AnyBuffer& x, const char* what) {
    Expect(x.element_type() == ffi::F32 && x.dimensions().size() == 2 && x.dimensions()[0] <= INT32_MAX, "",
           "lookup_bag", what, x);
    return x.dimensions();
  };
  const auto r = matrix(rows, "rows (n, dim) float32"), b = matrix(bags, "bags (bags, dim) float32");
  const BagShape shape{static_cast<size_t>(r[0]), static_cast<size_t>(b[0]), static_cast<size_t>(r[1]),
                       Data<int32_t>(ids)};
  Expect(Holds(ids, ffi::S32, shape.n), "", "lookup_bag", "ids (n,) int32", ids);
  Expect(b[1] == r[1], "", "lookup_bag", "bags of the rows' dim", bags);
  return shape;
}

inline void ExpectWeights(const BagShape& shape, const ffi::AnyBuffer& weights) {
  Expect(Holds(weights, ffi::F32, shape.n), "", "lookup_bag", "weights (n,) float32", weights);
}
inline void ExpectPositions(const BagShape& shape, const ffi::AnyBuffer& positions) {
  Expect(Holds(positions, ffi::S32, shape.bags * shape.dim), "", "lookup_bag", "positions (bags, dim) int32",
         positions);
}

template <BagBackend B>
ffi::Error BagSum(typename B::Exec exec, ffi::AnyBuffer ids, ffi::AnyBuffer weights, ffi::AnyBuffer rows,
                  Result bags) {
  return Guard("", "lookup_bag", [&] {
    const BagShape shape = ShapeOfBags(ids, rows, *bags);
    ExpectWeights(shape, weights);
    B::BagSum(exec, shape, Data<float>(weights), Data<float>(rows), Data<float>(bags));
  });
}
template <BagBackend B>
ffi::Error BagSpread(typename B::Exec exec, ffi::AnyBuffer ids, ffi::AnyBuffer weights, ffi::AnyBuffer bags,
                     Result rows) {
  return Guard("", "lookup_bag", [&] {
    const BagShape shape = ShapeOfBags(ids, *rows, bags);
    ExpectWeights(shape, weights);
    B::BagSpread(exec, shape, Data<float>(weights), Data<float>(bags), Data<float>(rows));
  });
}
template <BagBackend B>
ffi::Error BagDot(typename B::Exec exec, ffi::AnyBuffer ids, ffi::AnyBuffer rows, ffi::AnyBuffer bags,
                  Result weights) {
  return Guard("", "lookup_bag", [&] {
    const BagShape shape = ShapeOfBags(ids, rows, bags);
    ExpectWeights(shape, *weights);
    B::BagDot(exec, shape, Data<float>(rows), Data<float>(bags), Data<float>(weights));
  });
}
/// The bindings of the three calls above.
template <BagBackend B>
auto BindBags() {
  return Rets<1>(Args<3>(ffi::Ffi::Bind().template Ctx<typename B::Ctx>()));
}

/// positions: (bags, dim) int32, where each maximum stands.
template <BagBackend B>
ffi::Error BagMax(typename B::Exec exec, ffi::AnyBuffer ids, ffi::AnyBuffer rows, Result bags,
                  Result positions) {
  return Guard("", "lookup_bag", [&] {
    const BagShape shape = ShapeOfBags(ids, rows, *bags);
    ExpectPositions(shape, *positions);
    B::BagMax(exec, shape, Data<float>(rows), Data<float>(bags), Data<int32_t>(positions));
  });
}
template <BagBackend B>
auto BindBagMax() {
  return Rets<2>(Args<2>(ffi::Ffi::Bind().template Ctx<typename B::Ctx>()));
}
template <BagBackend B>
ffi::Error BagPlace(typename B::Exec exec, ffi::AnyBuffer ids, ffi::AnyBuffer positions, ffi::AnyBuffer bags,
                    Result rows) {
  return Guard("", "lookup_bag", [&] {
    const BagShape shape = ShapeOfBags(ids, *rows, bags);
    ExpectPositions(shape, positions);
    B::BagPlace(exec, shape, Data<int32_t>(positions), Data<float>(bags), Data<float>(rows));
  });
}

/// lengths: (bags,) int32; ids: (n,) int32, -1 for padding. `spread` says that other devices make the same
/// call.
template <BagBackend B>
ffi::Error BagIds(typename B::Exec exec, std::string_view name, bool spread, ffi::AnyBuffer lengths,
                  Result ids, Result status) {
  return Report(name, "lookup_bag", spread, Tell<B>(exec, name, "lookup_bag", status), [&] {
    for (const ffi::AnyBuffer& x : {lengths, *ids}) {
      Expect(x.element_type() == ffi::S32 && x.element_count() <= INT32_MAX, name, "lookup_bag",
             "lengths (bags,) and ids (n,) int32", x);
    }
    B::BagIds(exec, name, Data<int32_t>(lengths), lengths.element_count(), ids->element_count(),
              Data<int32_t>(ids));
  });
}
template <BagBackend B>
auto BindBagIds() {
  return Rets<2>(Args<1>(ffi::Ffi::Bind()
                             .template Ctx<typename B::Ctx>()
                             .template Attr<std::string_view>("table")
                             .template Attr<bool>("spread")));
}

}  // namespace kvjax
