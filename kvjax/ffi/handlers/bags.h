// Handlers of bags: ids (n,) int32, weights (n,) float32, rows (n, dim) float32, bags (bags, dim) float32.
#pragma once
#include <cstddef>
#include <cstdint>

#include "kvjax/ffi/handlers/backend.h"
#include "kvjax/ffi/handlers/decode.h"
#include "kvjax/ffi/handlers/failures.h"
#include "kvjax/ffi/handlers/tables.h"

namespace kvjax {

/// A matrix of floats with 32-bit row numbers, because positions are 32 bits wide.
struct Matrix {
  Matrix(const Decoder& in, const ffi::AnyBuffer& buffer, const char* what)
      : data(static_cast<float*>(buffer.untyped_data())) {
    const auto dims = buffer.dimensions();
    in.Want(buffer.element_type() == ffi::F32 && dims.size() == 2 && dims[0] <= INT32_MAX, what, buffer);
    n = static_cast<size_t>(dims[0]), dim = static_cast<size_t>(dims[1]);
  }
  static Matrix Rows(const Decoder& in, const ffi::AnyBuffer& x) { return {in, x, "rows (n, dim) float32"}; }
  static Matrix Bags(const Decoder& in, const ffi::AnyBuffer& x) {
    return {in, x, "bags (bags, dim) float32"};
  }

  float* data;
  size_t n, dim;
};

inline BagShape ShapeOf(const Decoder& in, const ffi::AnyBuffer& ids, const Matrix& rows,
                        const Matrix& bags) {
  in.Want(Decoder::Holds(ids, ffi::S32, rows.n), "ids (n,) int32", ids);
  if (rows.dim != bags.dim) {
    throw OperandError("", in.op(), "bags of the rows' dim",
                       std::to_string(bags.dim) + " and " + std::to_string(rows.dim));
  }
  return {rows.n, bags.n, rows.dim, static_cast<const int32_t*>(ids.untyped_data())};
}

/// A call that is about no table.
template <class Body>
ffi::Error GuardBags(Decoder& in, Body body) {
  in.Names(Name(Op::kLookupBag));
  return Guard("", in.op(), body);
}

/// weights (n,).
inline float* Weights(const Decoder& in, const ffi::AnyBuffer& weights, size_t n) {
  in.Want(Decoder::Holds(weights, ffi::F32, n), "weights (n,) float32", weights);
  return static_cast<float*>(weights.untyped_data());
}

/// ids, weights, rows -> bags
template <Backend B>
ffi::Error BagSum(typename B::Exec& exec, Decoder& in) {
  return GuardBags(in, [&] {
    const ffi::AnyBuffer ids = in.In(), weights = in.In();
    const Matrix rows = Matrix::Rows(in, in.In()), bags = Matrix::Bags(in, in.Out());
    B::BagSum(in.Done(exec),
              {ShapeOf(in, ids, rows, bags), Weights(in, weights, rows.n), rows.data, bags.data});
  });
}
/// ids, weights, bags -> rows
template <Backend B>
ffi::Error BagExpand(typename B::Exec& exec, Decoder& in) {
  return GuardBags(in, [&] {
    const ffi::AnyBuffer ids = in.In(), weights = in.In();
    const Matrix bags = Matrix::Bags(in, in.In()), rows = Matrix::Rows(in, in.Out());
    B::BagExpand(in.Done(exec),
                 {ShapeOf(in, ids, rows, bags), Weights(in, weights, rows.n), bags.data, rows.data});
  });
}
/// ids, rows, bags -> weights
template <Backend B>
ffi::Error BagDot(typename B::Exec& exec, Decoder& in) {
  return GuardBags(in, [&] {
    const ffi::AnyBuffer ids = in.In();
    const Matrix rows = Matrix::Rows(in, in.In()), bags = Matrix::Bags(in, in.In());
    float* const weights = Weights(in, in.Out(), rows.n);
    B::BagDot(in.Done(exec), {ShapeOf(in, ids, rows, bags), rows.data, bags.data, weights});
  });
}
/// ids, rows -> bags, positions
template <Backend B>
ffi::Error BagMax(typename B::Exec& exec, Decoder& in) {
  return GuardBags(in, [&] {
    const ffi::AnyBuffer ids = in.In();
    const Matrix rows = Matrix::Rows(in, in.In()), bags = Matrix::Bags(in, in.Out());
    const BagShape shape = ShapeOf(in, ids, rows, bags);
    int32_t* const positions = in.Out<int32_t>("positions (bags, dim)", shape.bags * shape.dim);
    B::BagMax(in.Done(exec), {shape, rows.data, bags.data, positions});
  });
}
/// ids, positions, bags -> rows
template <Backend B>
ffi::Error BagPlace(typename B::Exec& exec, Decoder& in) {
  return GuardBags(in, [&] {
    const ffi::AnyBuffer ids = in.In(), positions = in.In();
    const Matrix bags = Matrix::Bags(in, in.In()), rows = Matrix::Rows(in, in.Out());
    const BagShape shape = ShapeOf(in, ids, rows, bags);
    in.Want(Decoder::Holds(positions, ffi::S32, shape.bags * shape.dim), "positions (bags, dim) int32",
            positions);
    B::BagPlace(in.Done(exec),
                {shape, static_cast<const int32_t*>(positions.untyped_data()), bags.data, rows.data});
  });
}

/// lengths -> ids, -1 for padding. The flag says that other devices make the same call.
template <Backend B>
ffi::Error BagIds(typename B::Exec& exec, Decoder& in) {
  return AnswerRead<B>(exec, in, Op::kLookupBag, [&] {
    const ffi::AnyBuffer lengths = in.In(), ids = in.Out();
    for (const ffi::AnyBuffer& x : {lengths, ids}) {
      in.Want(x.element_type() == ffi::S32 && x.element_count() <= INT32_MAX,
              "lengths (bags,) and ids (n,) int32", x);
    }
    B::BagIds(in.Done(exec),
              {in.table(), static_cast<const int32_t*>(lengths.untyped_data()), lengths.element_count(),
               static_cast<int32_t*>(ids.untyped_data()), ids.element_count()});
  });
}

}  // namespace kvjax
