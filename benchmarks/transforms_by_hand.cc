// Optimizers written by hand, for rows in plain arrays: what transforms.py measures row programs against.
//
// It is compiled for the processor that it runs on, and each row is visited once, with the rows to come
// fetched ahead.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace {

struct Header {
  uint64_t frequency;
  int64_t version;
};

/// Rows of a table: values (n, dim), records of slots (n, stride) and headers, and those of a step. A record
/// has the slots of dim elements in the order of the transform's state, then its count.
struct Rows {
  float* values;
  char* slots;
  Header* headers;
  const uint32_t* ids;
  const float* gradients;
  int64_t n, stride, step;
};

/// lr, b1 (or decay), b2, eps, weight decay.
struct Rates {
  float lr, b1, b2, eps, decay;
};

/// 1 - base ** count.
class Debias {
 public:
  explicit Debias(float base) : base_(base) {}
  float operator()(int32_t count) {
    while (known_.size() <= static_cast<size_t>(count))
      known_.push_back(1 - std::pow(base_, static_cast<float>(known_.size())));
    return known_[static_cast<size_t>(count)];
  }

 private:
  float base_;
  std::vector<float> known_;
};

// Loops over a row stay loops: unrolled before the vectorizer sees them, those of 16 elements would be scalar
// code.
#define EACH(expressions) \
  _Pragma("GCC ivdep") _Pragma("GCC unroll 1") for (int d = 0; d < D; ++d) { expressions; }

template <int D, class F>
void Each(const Rows& rows, F f) {
  constexpr int64_t kAhead = D >= 128 ? 8 : D >= 64 ? 12 : 24;
  for (int64_t i = 0; i < rows.n; ++i) {
    if (i + kAhead < rows.n) {
      const int64_t next = rows.ids[i + kAhead];
      __builtin_prefetch(rows.headers + next, 1);
      for (int64_t b = 0; b < D; b += 16) __builtin_prefetch(rows.values + next * D + b, 1);
      for (int64_t b = 0; b < rows.stride; b += 64)
        __builtin_prefetch(rows.slots + next * rows.stride + b, 1);
      for (int64_t b = 0; b < D; b += 16) __builtin_prefetch(rows.gradients + (i + kAhead) * D + b);
    }
    const int64_t row = rows.ids[i];
    ++rows.headers[row].frequency;
    rows.headers[row].version = rows.step;
    f(rows.values + row * D, rows.slots + row * rows.stride, rows.gradients + i * D);
  }
}

template <int D>
float Norm(const float* x) {
  float sum = 0;
  for (int d = 0; d < D; ++d) sum += x[d] * x[d];
  return std::sqrt(sum);
}

using Row = float* __restrict;
using In = const float* __restrict;

template <int D>
void Run(std::string_view name, const Rows& rows, Rates h) {
  const float lr = h.lr, b1 = h.b1, b2 = h.b2, eps = h.eps, decay = h.decay;
  if (name == "sgd") {
    Each<D>(rows, [=](Row w, char*, In g) { EACH(w[d] -= lr * g[d]) });
  } else if (name == "momentum") {
    Each<D>(rows, [=](Row w, char* slots, In g) {
      auto* __restrict m = reinterpret_cast<float*>(slots);
      EACH(m[d] = g[d] + b1 * m[d]; w[d] -= lr * m[d])
    });
  } else if (name == "adagrad") {
    Each<D>(rows, [=](Row w, char* slots, In g) {
      auto* __restrict a = reinterpret_cast<float*>(slots);
      EACH(a[d] += g[d] * g[d]; w[d] -= lr * (a[d] > 0 ? g[d] / std::sqrt(a[d] + eps) : 0.0f))
    });
  } else if (name == "rmsprop") {
    Each<D>(rows, [=](Row w, char* slots, In g) {
      auto* __restrict v = reinterpret_cast<float*>(slots);
      EACH(v[d] = (1 - b1) * (g[d] * g[d]) + b1 * v[d]; w[d] -= lr * (g[d] / std::sqrt(v[d] + eps)))
    });
  } else if (name == "lion") {
    Each<D>(rows, [=](Row w, char* slots, In g) {
      auto* __restrict m = reinterpret_cast<float*>(slots);
      ++*reinterpret_cast<int32_t*>(m + D);
      EACH(const float c = (1 - b1) * g[d] + b1 * m[d]; m[d] = (1 - b2) * g[d] + b2 * m[d];
           w[d] -= lr * ((c > 0   ? 1.0f
                          : c < 0 ? -1.0f
                                  : c) +
                         decay * w[d]))
    });
  } else {
    Debias one(b1), two(b2);
    const bool adamw = name == "adamw", nadam = name == "nadam", amsgrad = name == "amsgrad",
               lamb = name == "lamb";
    Each<D>(rows, [&](Row w, char* slots, In g) {
      auto* __restrict m = reinterpret_cast<float*>(slots);
      auto* __restrict v = m + D;
      auto* __restrict most = v + D;  // of amsgrad only
      const int32_t count = ++*reinterpret_cast<int32_t*>(amsgrad ? most + D : most);
      const float s1 = one(count), s2 = two(count);
      if (amsgrad) {
        EACH(m[d] = (1 - b1) * g[d] + b1 * m[d]; v[d] = (1 - b2) * (g[d] * g[d]) + b2 * v[d];
             const float now = v[d] / s2; most[d] = now > most[d] ? now : most[d];
             w[d] -= lr * ((m[d] / s1) / (std::sqrt(most[d]) + eps)))
      } else if (nadam) {
        const float s3 = one(count + 1);
        EACH(m[d] = (1 - b1) * g[d] + b1 * m[d]; v[d] = (1 - b2) * (g[d] * g[d]) + b2 * v[d];
             w[d] -= lr * ((b1 * (m[d] / s3) + (1 - b1) * (g[d] / s1)) / (std::sqrt(v[d] / s2) + eps)))
      } else if (adamw) {
        EACH(m[d] = (1 - b1) * g[d] + b1 * m[d]; v[d] = (1 - b2) * (g[d] * g[d]) + b2 * v[d];
             w[d] -= lr * ((m[d] / s1) / (std::sqrt(v[d] / s2) + eps) + decay * w[d]))
      } else if (lamb) {
        float u[D];
        EACH(m[d] = (1 - b1) * g[d] + b1 * m[d]; v[d] = (1 - b2) * (g[d] * g[d]) + b2 * v[d];
             u[d] = (m[d] / s1) / (std::sqrt(v[d] / s2) + eps))
        const float row = Norm<D>(w), move = Norm<D>(u);
        const float trust = row == 0 || move == 0 ? 1.0f : row / move;
        EACH(w[d] -= lr * (u[d] * trust))
      } else {
        EACH(m[d] = (1 - b1) * g[d] + b1 * m[d]; v[d] = (1 - b2) * (g[d] * g[d]) + b2 * v[d];
             w[d] -= lr * ((m[d] / s1) / (std::sqrt(v[d] / s2) + eps)))
      }
    });
  }
}

}  // namespace

extern "C" void run_by_hand(const char* name, const Rows* rows, const Rates* rates, int64_t dim) {
  if (dim == 16) Run<16>(name, *rows, *rates);
  if (dim == 64) Run<64>(name, *rows, *rates);
  if (dim == 128) Run<128>(name, *rows, *rates);
}
