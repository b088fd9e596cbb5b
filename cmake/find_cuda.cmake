# Says whether the CUDA backend can be built, and with which nvcc.
#
# A compiler that is there but of no use (too old, without headers, at odds with the host's compiler) must not break
# the build of everything else, so each one found is tried on a small program before CMake hears of it.
#
# nvcc takes minutes, so AUTO builds only for a machine that can run what it gets.
set(KVJAX_CUDA AUTO CACHE STRING "The CUDA backend: AUTO (built if there are a GPU's driver and nvcc), ON (or fail), OFF")
set_property(CACHE KVJAX_CUDA PROPERTY STRINGS AUTO ON OFF)
set(KVJAX_NVCC_MINIMUM 12.8) # the first that knows sm_100

set(KVJAX_HAS_CUDA OFF)
set(reasons "")
string(TOUPPER "${KVJAX_CUDA}" wanted)
if(NOT wanted MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "KVJAX_CUDA is AUTO, ON or OFF, not '${KVJAX_CUDA}'")
endif()

# Tries one nvcc. Sets `good` to its version, or `reason` to why it is of no use.
function(kvjax_try_nvcc nvcc good reason)
  set(${good} "" PARENT_SCOPE)
  execute_process(COMMAND "${nvcc}" --version OUTPUT_VARIABLE text ERROR_VARIABLE text RESULT_VARIABLE failed)
  string(REGEX MATCH "V([0-9]+\\.[0-9]+\\.[0-9]+)" _ "${text}")
  if(failed OR NOT CMAKE_MATCH_1)
    set(${reason} "it does not run" PARENT_SCOPE)
    return()
  endif()
  set(version ${CMAKE_MATCH_1})
  if(version VERSION_LESS KVJAX_NVCC_MINIMUM)
    set(${reason} "it is ${version}, and ${KVJAX_NVCC_MINIMUM} is the oldest that will do" PARENT_SCOPE)
    return()
  endif()
  set(trial "${CMAKE_BINARY_DIR}/cuda_trial")
  file(WRITE "${trial}.cu" [[
#include <cub/version.cuh>
#include <cuda/atomic>
#include <concepts>
__global__ void Kernel(int* x) { cuda::atomic_ref<int, cuda::thread_scope_device>(*x).fetch_add(1); }
int main() { Kernel<<<1, 1>>>(nullptr); return cudaDeviceSynchronize(); }
]])
  kvjax_cudart_folder("${nvcc}" folder)
  execute_process(
    COMMAND "${nvcc}" -std=c++20 -arch=sm_90 -ccbin "${CMAKE_CXX_COMPILER}" ${folder} -o "${trial}" "${trial}.cu"
    OUTPUT_VARIABLE text ERROR_VARIABLE text RESULT_VARIABLE failed)
  file(REMOVE "${trial}")
  if(failed)
    string(REGEX REPLACE "\n.*" "" text "${text}")
    set(${reason} "it cannot compile a small program (${text})" PARENT_SCOPE)
    return()
  endif()
  set(${good} ${version} PARENT_SCOPE)
endfunction()

# The pip packages keep the static runtime in lib/, where their nvcc does not look.
function(kvjax_cudart_folder nvcc flag)
  set(${flag} "" PARENT_SCOPE)
  get_filename_component(real "${nvcc}" REALPATH)
  get_filename_component(folder "${real}/../../lib" ABSOLUTE)
  if(EXISTS "${folder}/libcudart_static.a")
    set(${flag} "-L${folder}" PARENT_SCOPE)
  endif()
endfunction()

# What the driver's kernel module shows, or WSL in its stead. Not libcuda.so.1: toolkits and images without a GPU have
# one, too.
if(NOT DEFINED KVJAX_DRIVER_SIGNS)
  set(KVJAX_DRIVER_SIGNS /proc/driver/nvidia/version /dev/nvidiactl /usr/lib/wsl/lib/libcuda.so.1)
endif()
set(driver OFF)
foreach(sign ${KVJAX_DRIVER_SIGNS})
  if(EXISTS "${sign}")
    set(driver ON)
  endif()
endforeach()

if(wanted STREQUAL "OFF")
  message(STATUS "CUDA backend: not built: KVJAX_CUDA is OFF")
elseif(wanted STREQUAL "AUTO" AND NOT driver)
  message(STATUS "CUDA backend: not built: this machine has no driver of an NVIDIA GPU; KVJAX_CUDA=ON builds it for others")
else()
  # In the order in which they say what the user wants: by name, in the shell, in Python's environment (the packages
  # nvidia-cuda-nvcc and its kin), on the system.
  find_program(KVJAX_NVCC_IN_PATH nvcc PATHS ENV PATH NO_DEFAULT_PATH NO_CACHE)
  set(nvcc_in_packages "")
  if(Python_EXECUTABLE)
    execute_process(
      COMMAND "${Python_EXECUTABLE}" -c "import nvidia; print(';'.join(p + '/cu13/bin/nvcc' for p in nvidia.__path__))"
      OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE nvcc_in_packages ERROR_QUIET)
  endif()
  if(NOT DEFINED KVJAX_NVCCS)
    set(KVJAX_NVCCS ${CMAKE_CUDA_COMPILER} $ENV{CUDACXX} $ENV{CUDA_HOME}/bin/nvcc $ENV{CUDA_PATH}/bin/nvcc
                    ${KVJAX_NVCC_IN_PATH} ${nvcc_in_packages} /usr/local/cuda/bin/nvcc)
    list(REMOVE_DUPLICATES KVJAX_NVCCS)
  endif()

  foreach(nvcc ${KVJAX_NVCCS})
    if(NOT EXISTS "${nvcc}" OR nvcc STREQUAL "/bin/nvcc") # which an unset CUDA_HOME makes
      continue()
    endif()
    if(NOT "${nvcc}" STREQUAL "${KVJAX_NVCC}") # a build folder that is used again has tried it before
      kvjax_try_nvcc("${nvcc}" version reason)
      if(NOT version)
        list(APPEND reasons "${nvcc}: ${reason}")
        message(STATUS "CUDA backend: not with ${nvcc}: ${reason}")
        continue()
      endif()
      set(KVJAX_NVCC_VERSION ${version} CACHE INTERNAL "Its version")
    endif()
    set(KVJAX_NVCC "${nvcc}" CACHE INTERNAL "The nvcc that has been tried and works")
    set(KVJAX_HAS_CUDA ON)
    break()
  endforeach()

  string(REPLACE ";" "; " reasons "${reasons}")
  if(NOT reasons)
    set(reasons "nvcc is not in PATH, CUDACXX, CUDA_HOME, /usr/local/cuda or Python's packages")
  endif()
  if(KVJAX_HAS_CUDA)
    message(STATUS "CUDA backend: built with ${KVJAX_NVCC} (${KVJAX_NVCC_VERSION})")
  elseif(wanted STREQUAL "ON")
    message(FATAL_ERROR "CUDA backend: KVJAX_CUDA is ON, but there is no CUDA compiler: ${reasons}. Install CUDA 13's "
                        "toolkit and set CUDACXX to its nvcc, or pip install nvidia-cuda-nvcc nvidia-cuda-cccl "
                        "nvidia-cuda-runtime (13.x) into the environment that builds, or build without KVJAX_CUDA=ON")
  else()
    message(STATUS "CUDA backend: not built: ${reasons}")
  endif()
endif()
