// NoThreads: a scope in which the system gives no thread.
#pragma once
#include <pthread.h>

#include <cstddef>

/// While it lives, the system has no memory for the stack of another thread.
struct NoThreads {
  NoThreads() {
    pthread_getattr_default_np(&before);
    pthread_attr_t large = before;
    pthread_attr_setstacksize(&large, size_t{1} << 46);
    pthread_setattr_default_np(&large);
  }
  ~NoThreads() { pthread_setattr_default_np(&before); }
  pthread_attr_t before;
};
