# The host's compiler, or one sentence that says what is missing: CMake's own are pages.
if(NOT CMAKE_SYSTEM_NAME STREQUAL "Linux")
  message(FATAL_ERROR "kvjax needs Linux, for its ways to take memory and to reserve disk, and this is for "
                      "${CMAKE_SYSTEM_NAME}; install it in a container, a virtual machine or WSL")
endif()

include(CheckLanguage)
include(CheckCXXSourceCompiles)

check_language(CXX)
if(CMAKE_CXX_COMPILER)
  enable_language(CXX)
  set(CMAKE_CXX_STANDARD 20)
  check_cxx_source_compiles([[
#include <bit>
#include <concepts>
#include <span>
template <std::unsigned_integral T> int Width(std::span<const T> values) { return std::bit_width(values[0]); }
int main() { unsigned x[] = {1}; return Width<unsigned>(x); }
]] KVJAX_HAS_CXX20)
  set(got "${CMAKE_CXX_COMPILER} (${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}) does not know C++20")
elseif("$ENV{CXX}" STREQUAL "")
  set(got "there is none")
else()
  set(got "$ENV{CXX} is not there or does not work") # pip names Python's own in CXX where the user has named none
endif()

if(NOT KVJAX_HAS_CXX20)
  unset(CMAKE_CXX_COMPILER CACHE) # looked for anew in this build folder, once there is one
  unset(KVJAX_HAS_CXX20 CACHE)
  message(FATAL_ERROR "kvjax needs a C++20 compiler, and ${got}; install GCC 12 or a newer one, or Clang "
                      "(Debian and Ubuntu: apt-get install g++), or set CXX to one")
endif()
