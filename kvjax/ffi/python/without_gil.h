// A guard that lets other Python threads run meanwhile.
#pragma once
#include <Python.h>
#include <unistd.h>

namespace kvjax {

/// Gives up the GIL for its lifetime.
///
/// Where Python has ended meanwhile, as it does beside a daemon thread, it ends this thread when that asks
/// for the GIL: by an unwinding that no destructor lets through, so that nanobind's guard ends the process
/// instead. Here the thread stays where it is until the process is gone, as Python 3.14 has it.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;
  ~WithoutGil() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {
      for (;;) pause();
    }
  }

 private:
  PyThreadState* state_;
};

}  // namespace kvjax
