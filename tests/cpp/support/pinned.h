// Memory of the host that kernels reach under the same address: in a program that links pinned.cc all of it
// is, what `new` gives and the stack that a test runs on.
#pragma once

namespace pinned {

/// Runs a function on such a stack, from where on `new` gives such memory; returns what it does. Throws where
/// there is no GPU.
int Run(int (*function)());

}  // namespace pinned
